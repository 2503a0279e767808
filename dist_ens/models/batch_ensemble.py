"""Members with heads that share most of their arrays: BatchEnsemble and TabM."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dist_ens.ground.errors import UserError
from dist_ens.ground.numbers import require_one_of, whole_number
from dist_ens.ground.types import Inputs, Key, ModelState, Network, Outputs, Params, PyTree
from dist_ens.layout.model_axis import names_of
from dist_ens.members import Member
from dist_ens.members.base import whole_network
from dist_ens.members.factors import Product, Use, along, uses_of, with_factors
from dist_ens.members.member import whole_parts, with_forward
from dist_ens.members.modes import Apply

_NETWORK, _OWN, _IN, _OUT = "network", "own", "r", "s"
# Numbers by which the keys of the scales differ from those of the networks.
_SCALES, _HEADS = 1, 2


def batch_ensemble(network: Network, heads: int, *, scales: str = "signs") -> Member:
    """Returns a member with heads that share the arrays of all matrix products and convolutions.

    Each head has vectors r and s of its own for each such array W, and own arrays of one axis, such
    as biases and scales of a normalisation. With x the inputs of a product, it is

        ((x * r) W) * s

    Other arrays of two or more axes, such as tables of embeddings, are shared as well.

    Args:
        network: Network of one head, in any form that `as_member` takes.
        heads: Number of heads, at least 1.
        scales: Distribution that r and s are drawn from. "signs" draws 1 and -1 equally often,
            "normal" draws from a normal distribution with mean 1 and standard deviation 0.5.

    Returns:
        The member. Its parameters are a dict of `network`, the shared arrays in the form of the
        network, `own`, a dict from names to arrays [heads, ...], and `r` and `s`, dicts from names
        to float32[heads, n...]. Model state has a leading axis [heads].

    >>> import dist_ens
    >>> member = batch_ensemble(dist_ens.models.mlp((4,), 3, hidden_sizes=(8,)), heads=2)
    >>> params, _ = member.init(jax.random.key(0), jnp.zeros((1, 4)))
    >>> params["r"]["0/w"].shape, params["s"]["0/w"].shape, params["own"]["0/b"].shape
    ((2, 4), (2, 8), (2, 8))
    >>> member.apply(params, (), jnp.ones((5, 4)), None, False)[0].shape
    (2, 5, 3)

    Source: Wen et al. (2020), https://arxiv.org/abs/2002.06715.
    """
    require_one_of("scales", scales, [*_DRAWN])
    base = whole_network(network, "batch_ensemble")
    name = f"batch_ensemble({base.name})"
    return _with_heads(base, heads, name, _of_batch_ensemble, _DRAWN[scales])


def tabm(network: Network, heads: int = 32, *, mini: bool = False) -> Member:
    """Returns a member with heads as TabM has them: the first scales differ, and the last layer.

    The arrays of all products are shared but for the last one, of which each head has its own, with
    its own bias. The vectors r of the first product begin as random signs, and all other r and s as
    ones. With `mini`, only the first product has vectors r, and hidden biases are shared.

    Args:
        network: Network of one head, in any form that `as_member` takes, such as `mlp`.
        heads: Number of heads, at least 1.
        mini: Whether to make TabM-mini.

    Returns:
        The member, with parameters as those of `batch_ensemble`. Train it with
        `losses.of_heads`, the mean of the heads' losses.

    >>> import dist_ens
    >>> member = tabm(dist_ens.models.mlp((4,), 1, hidden_sizes=(8,)), heads=3)
    >>> params, _ = member.init(jax.random.key(0), jnp.zeros((1, 4)))
    >>> params["own"]["1/w"].shape, [*params["r"]]
    ((3, 8, 1), ['0/w'])

    Source: Gorishniy et al. (2025), https://arxiv.org/abs/2410.24210.
    """
    kind = _of_tabm_mini if mini else _of_tabm
    base = whole_network(network, "tabm")
    return _with_heads(base, heads, f"tabm({base.name})", kind, _ones)


class _Parts(NamedTuple):
    """The names of the arrays of a network of which heads have something of their own.

    Attributes:
        scaled_in: Arrays with vectors r.
        scaled_out: Arrays with vectors s.
        own: Arrays that each head initialises for itself.
        copied: Arrays of which each head has a copy, which is trained for itself.
        signs: Arrays whose r begin as random signs.
    """

    scaled_in: frozenset[str]
    scaled_out: frozenset[str]
    own: frozenset[str]
    copied: frozenset[str] = frozenset()
    signs: frozenset[str] = frozenset()


def _of_batch_ensemble(kernels: list[str], vectors: list[str], after: list[str]) -> _Parts:
    return _Parts(frozenset(kernels), frozenset(kernels), frozenset(vectors))


def _of_tabm(kernels: list[str], vectors: list[str], after: list[str]) -> _Parts:
    *hidden, last = kernels
    own = frozenset((last, *after))
    return _Parts(
        frozenset(hidden), frozenset(hidden), own, frozenset(vectors) - own, frozenset(hidden[:1])
    )


def _of_tabm_mini(kernels: list[str], vectors: list[str], after: list[str]) -> _Parts:
    first = frozenset(kernels[:1])
    return _Parts(first, frozenset(), frozenset((kernels[-1], *after)), frozenset(), first)


def _signs(key: Key, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.rademacher(key, shape, jnp.float32)


def _normal(key: Key, shape: tuple[int, ...]) -> jax.Array:
    return 1 + 0.5 * jax.random.normal(key, shape)


def _ones(key: Key, shape: tuple[int, ...]) -> jax.Array:
    return jnp.ones(shape)


_DRAWN: Mapping[str, Callable[[Key, tuple[int, ...]], jax.Array]] = {
    "signs": _signs,
    "normal": _normal,
}


@partial(jax.tree_util.register_dataclass, data_fields=["r", "s"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class _RankOne:
    """The vectors of one array W, by which the inputs and the outputs of a product are scaled."""

    r: jax.Array | None
    s: jax.Array | None

    def product(self, use: Use, product: Product, inputs: jax.Array, array: jax.Array) -> jax.Array:
        if self.r is not None:
            inputs = inputs * along(self.r, use.of_inputs, inputs.ndim)
        outputs = product(inputs, array)
        if self.s is not None:
            outputs = outputs * along(self.s, use.of_outputs, outputs.ndim)
        return outputs

    def merged(self, array: jax.Array) -> jax.Array:
        raise UserError(
            "The network uses an array in another way in training than in evaluation, where a "
            "product takes it. Heads cannot scale it."
        )

    def changed(self, change: Callable[[jax.Array], jax.Array]) -> "_RankOne":
        r, s = (None if each is None else change(each) for each in (self.r, self.s))
        return _RankOne(r, s)


def _with_heads(
    base: Member,
    heads: int,
    name: str,
    parts_of: Callable[[list[str], list[str], list[str]], _Parts],
    draw: Callable[[Key, tuple[int, ...]], jax.Array],
) -> Member:
    """Returns a member with heads, whose parts the names of its arrays decide."""
    heads = whole_number("heads", heads, least=1)

    def init(key: Key, inputs: Inputs, **given: PyTree) -> tuple[Params, ModelState]:
        params, model_state = base.init(key, inputs, **given)
        keys = _of_heads(jax.random.fold_in(key, _HEADS), heads)
        own, of_heads = jax.vmap(lambda key: base.init(key, inputs, **given))(keys)
        leaves, owned = _named(params), _named(own)
        evaluate = base.with_named(given).evaluate
        used = {
            [*leaves][number]: use
            for number, use in uses_of(evaluate, params, model_state, inputs, key).items()
        }
        kernels = [each for each, use in used.items() if use and leaves[each].ndim > 1]
        if not kernels:
            raise UserError(
                f"The network {base.name} has no matrix product or convolution whose array heads "
                "could share. Give as_member a network with heads instead."
            )
        vectors = [each for each in leaves if leaves[each].ndim <= 1]
        order = [*used]
        last = order.index(kernels[-1])
        parts = parts_of(kernels, vectors, [each for each in vectors if each in order[last:]])
        scales: dict[str, dict[str, jax.Array]] = {_IN: {}, _OUT: {}}
        for number, each in enumerate(kernels):
            use = used[each]
            r_key, s_key = jax.random.split(jax.random.fold_in(key, _SCALES + number * 2**8))
            shape = leaves[each].shape
            if use and each in parts.scaled_in:
                of_r = _signs if each in parts.signs else draw
                scales[_IN][each] = of_r(r_key, (heads, *(shape[a] for a in use.scaled)))
            if use and each in parts.scaled_out:
                scales[_OUT][each] = draw(s_key, (heads, *(shape[a] for a in use.kept)))
        held = {each: owned[each] for each in leaves if each in parts.own}
        for each in parts.copied:
            held[each] = jnp.broadcast_to(leaves[each], (heads, *leaves[each].shape))
        rest = [None if each in held else leaf for each, leaf in leaves.items()]
        network = jax.tree.unflatten(jax.tree.structure(params), rest)
        return {_NETWORK: network, _OWN: held, **scales}, of_heads

    def of_all_heads(apply: Apply) -> Apply:
        def forward(
            params: Params,
            model_state: ModelState,
            inputs: Inputs,
            key: Key | None,
            train: bool,
            **given: PyTree,
        ) -> tuple[Outputs, ModelState]:
            network, structure = jax.tree.flatten(
                params[_NETWORK], is_leaf=lambda leaf: leaf is None
            )
            names = [*_named(jax.tree.unflatten(structure, [0] * len(network)))]

            def of_head(
                own: dict[str, jax.Array],
                scales: dict[str, dict[str, jax.Array]],
                model_state: ModelState,
                key: Key | None,
            ) -> tuple[Outputs, ModelState]:
                leaves = [own.get(name, leaf) for name, leaf in zip(names, network, strict=True)]
                whole = jax.tree.unflatten(structure, leaves)
                scaled = {*scales[_IN], *scales[_OUT]}
                factors = {
                    number: _RankOne(scales[_IN].get(name), scales[_OUT].get(name))
                    for number, name in enumerate(_named(whole))
                    if name in scaled
                }

                def of_base(
                    params: Params, model_state: ModelState, inputs: Inputs, key: Key | None
                ) -> tuple[Outputs, ModelState]:
                    return apply(params, model_state, inputs, key, train, **given)

                return with_factors(of_base, whole, factors, model_state, inputs, key)

            keys = None if key is None else _of_heads(key, heads)
            scales = {name: params[name] for name in (_IN, _OUT)}
            return jax.vmap(of_head)(params[_OWN], scales, model_state, keys)

        return forward

    return with_forward(
        base,
        of_all_heads,
        init=init,
        name=name,
        heads=heads,
        parts_of=whole_parts,
        adapt_loss=lambda loss: loss,
    )


def _of_heads(key: Key, heads: int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(heads))


def _named(params: PyTree) -> dict[str, jax.Array]:
    return dict(zip(names_of(params).values(), jax.tree.leaves(params), strict=True))
