"""Low-rank adapters on a network that all members share."""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from dist_ens.ground.errors import UserError
from dist_ens.ground.numbers import whole_number
from dist_ens.ground.types import Inputs, Key, ModelState, Network, Outputs, Params, PyTree
from dist_ens.layout.model_axis import names_of
from dist_ens.members import Member
from dist_ens.members.base import base_of, checked_base, whole_network
from dist_ens.members.factors import Product, Use, uses_of, with_factors
from dist_ens.members.member import floats_as, whole_parts

_MOST_NAMED = 20


def lora(
    network: Network,
    rank: int,
    targets: str | Sequence[str] = "*",
    *,
    alpha: float | None = None,
) -> Member:
    """Returns a member whose parameters are low-rank adapters on a network that all members share.

    The network is in `shared`, and is not trained. A target W that maps inputs of length n to
    outputs of length m becomes

        W + alpha / rank * a b,   a: [n, rank] drawn from N(0, 1 / n), b: [rank, m] begins as 0

    A matrix product or a convolution is computed as `x W + alpha / rank * (x a) b`, so that no
    member has a W of its own. Another use of W, such as a lookup, makes the sum. The network's
    model state, such as statistics of BatchNorm, begins as that in `shared`, and each member has
    its own.

    Args:
        network: Network, in any form that `as_member` takes.
        rank: Rank of the adapters, at least 1 and at most the smaller of n and m.
        targets: Patterns of the names of arrays, such as `attention/*/kernel`, in which `*` stands
            for any characters. Default: all arrays that a product or a convolution takes.
        alpha: Scale of the adapters. Default: `rank`, so that the factor is 1.

    Returns:
        The member. Its parameters are a dict from names to `{"a": float32[n..., rank],
        "b": float32[rank, m...]}`.

    Raises:
        UserError: When the member is initialised, if a pattern fits no array, the rank is too
            large, or the arrays in `shared` are not those of the network.

    >>> import optax, dist_ens
    >>> mlp = dist_ens.models.mlp((4,), 3, hidden_sizes=(8,))
    >>> base, _ = mlp.init(jax.random.key(0), jnp.zeros((1, 4)))
    >>> ensemble = dist_ens.Ensemble(
    ...     lora(mlp, rank=1, targets="*/w"),
    ...     optax.adam(1e-3),
    ...     dist_ens.losses.categorical(3),
    ...     num_members=2,
    ...     shared=base,
    ... )
    >>> state = ensemble.init({"inputs": jnp.zeros((1, 4)), "labels": jnp.zeros(1, int)})
    >>> state.params["0/w"]["a"].shape, state.params["0/w"]["b"].shape
    ((2, 4, 1), (2, 1, 8))

    Source: Hu et al. (2021), https://arxiv.org/abs/2106.09685; for ensembles, Wang et al. (2023),
    https://arxiv.org/abs/2310.00035.
    """
    base, rank = whole_network(network, "lora"), whole_number("rank", rank, least=1)
    patterns = [targets] if isinstance(targets, str) else [*targets]
    if not patterns:
        raise UserError("targets is empty. Give patterns of names, or leave it out.")
    scale = 1.0 if alpha is None else alpha / rank

    def init(
        key: Key, inputs: Inputs, shared: PyTree = None, **given: PyTree
    ) -> tuple[Params, ModelState]:
        network = base.with_named(given)
        params, model_state = checked_base(network, key, inputs, shared)
        leaves, found = jax.tree.leaves(params), {}
        uses = uses_of(network.evaluate, params, model_state, inputs, key)
        for number, name in _targeted(params, patterns, uses).items():
            shape = leaves[number].shape
            a_shape, b_shape = (
                [shape[axis] for axis in axes] for axes in _axes_of(uses.get(number), len(shape))
            )
            most = min(math.prod(a_shape), math.prod(b_shape))
            if rank > most:
                raise UserError(
                    f"rank is {rank}, and {name} has the shape {[*shape]}. Use a rank of at most "
                    f"{most}, or other targets."
                )
            drawn = jax.random.normal(jax.random.fold_in(key, number), (*a_shape, rank))
            found[name] = {
                "a": drawn / math.sqrt(math.prod(a_shape)),
                "b": jnp.zeros((rank, *b_shape)),
            }
        return found, model_state

    def adapted(forward: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def apply(
            adapters: Params,
            model_state: ModelState,
            inputs: Inputs,
            key: Key | None,
            train: bool,
            shared: PyTree = None,
            **given: PyTree,
        ) -> tuple[Outputs, ModelState]:
            def of_base(
                params: Params, model_state: ModelState, inputs: Inputs, key: Key | None
            ) -> tuple[Outputs, ModelState]:
                own = given if base.takes_given else {}
                return forward(params, model_state, inputs, key, train, **own)

            params, args = shared[0], (model_state, inputs, key)
            # The axes of an adapter are those of evaluation, also in training.
            evaluate = base.with_named(given).evaluate
            uses, leaves = uses_of(evaluate, params, *args), jax.tree.leaves(params)
            factors = {}
            for number, name in _names(params).items():
                if name in adapters:
                    axes = _axes_of(uses.get(number), leaves[number].ndim)
                    own = floats_as(adapters[name], leaves[number].dtype)
                    factors[number] = _LowRank(own["a"], own["b"], scale, axes)
            return with_factors(of_base, params, factors, *args)

        return apply

    return dataclasses.replace(
        base,
        init=init,
        apply=adapted(base.apply),
        sample=None if base.sample is None else adapted(base.sample),
        name=f"lora({base.name})",
        takes_given=True,
        base_of=base_of(base),
        parts_of=whole_parts,
        adapt_loss=lambda loss: loss,
    )


def _names(params: PyTree) -> dict[int, str]:
    return dict(enumerate(names_of(params).values()))


def _targeted(
    params: PyTree, patterns: Sequence[str], uses: dict[int, Use | None]
) -> dict[int, str]:
    """Returns the names of the arrays that patterns fit, by their numbers."""
    names, leaves = _names(params), jax.tree.leaves(params)
    may_be = {number: name for number, name in names.items() if leaves[number].ndim > 1}
    if [*patterns] == ["*"]:
        found = {n: name for n, name in may_be.items() if uses.get(n) is not None}
        if found:
            return found
        listed = ", ".join([*may_be.values()][:_MOST_NAMED])
        raise UserError(
            "No matrix product or convolution outside of a scan takes an array of the network. "
            f"Name targets of {listed}."
        )
    found = {}
    for pattern in patterns:
        fitting = {n: name for n, name in may_be.items() if fnmatch.fnmatchcase(name, pattern)}
        if not fitting:
            listed = ", ".join([*may_be.values()][:_MOST_NAMED])
            raise UserError(
                f"The target {pattern!r} fits no array of the network with two or more axes: "
                f"{listed}. Use names, in which * stands for any characters."
            )
        found |= fitting
    return dict(sorted(found.items()))


def _axes_of(use: Use | None, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the axes of an array over which a product sums, and the others."""
    if use is None:
        return tuple(range(ndim - 1)), (ndim - 1,)
    return use.summed, use.kept


@partial(jax.tree_util.register_dataclass, data_fields=["a", "b"], meta_fields=["scale", "axes"])
@dataclasses.dataclass(frozen=True)
class _LowRank:
    """The factors of one array W, which becomes W + scale * a b.

    `axes` are those of W that `a` has, and those that `b` has.
    """

    a: jax.Array
    b: jax.Array
    scale: float
    axes: tuple[tuple[int, ...], tuple[int, ...]]

    def product(self, use: Use, product: Product, inputs: jax.Array, array: jax.Array) -> jax.Array:
        if (use.summed, use.kept) != self.axes:
            return product(inputs, self.merged(array))
        rank, count = self.a.shape[-1], len(use.kept)
        # `a` as an array of the network: its kept axes are the rank, and axes of length 1.
        a = jnp.expand_dims(jnp.moveaxis(self.a, -1, 0), range(1, count))
        low = product(inputs, jnp.moveaxis(a, range(a.ndim), (*use.kept, *use.summed)))
        place = use.of_outputs[0]
        low = low.reshape(*low.shape[:place], rank, *low.shape[place + count :])
        change = jnp.tensordot(low, self.b, axes=(place, 0))
        ends = range(change.ndim - count, change.ndim)
        return product(inputs, array) + self.scale * jnp.moveaxis(change, ends, use.of_outputs)

    def merged(self, array: jax.Array) -> jax.Array:
        change = jnp.tensordot(self.a, self.b, axes=1)
        order = [axis for axes in self.axes for axis in axes]
        return array + self.scale * jnp.moveaxis(change, range(array.ndim), order)

    def changed(self, change: Callable[[jax.Array], jax.Array]) -> "_LowRank":
        return _LowRank(change(self.a), change(self.b), self.scale, self.axes)
