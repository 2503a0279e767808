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
    return _WithHeads(base, heads, _of_batch_ensemble, _DRAWN[scales]).member(name)


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
    return _WithHeads(base, heads, kind, _ones).member(f"tabm({base.name})")


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


@dataclasses.dataclass(frozen=True)
class _WithHeads:
    """The functions of a member with heads, whose parts the names of its arrays decide."""

    base: Member
    heads: int
    parts_of: Callable[[list[str], list[str], list[str]], _Parts]
    draw: Callable[[Key, tuple[int, ...]], jax.Array]

    def member(self, name: str) -> Member:
        """Returns the member."""
        whole_number("heads", self.heads, least=1)
        return with_forward(
            self.base,
            self.of_all_heads,
            init=self.init,
            name=name,
            heads=self.heads,
            parts_of=whole_parts,
            adapt_loss=lambda loss: loss,
        )

    def init(self, key: Key, inputs: Inputs, **given: PyTree) -> tuple[Params, ModelState]:
        """Returns the parameters and the model state; see `Member`."""
        base, heads = self.base, self.heads
        params, model_state = base.init(key, inputs, **given)
        keys = _of_heads(jax.random.fold_in(key, _HEADS), heads)
        own, of_heads = jax.vmap(lambda key: base.init(key, inputs, **given))(keys)
        leaves, owned = _named(params), _named(own)
        uses = uses_of(base.with_named(given).evaluate, params, model_state, inputs, key)
        parts, kernels = self._parts(leaves, {[*leaves][n]: use for n, use in uses.items()})
        held = {each: owned[each] for each in leaves if each in parts.own}
        for each in parts.copied:
            held[each] = jnp.broadcast_to(leaves[each], (heads, *leaves[each].shape))
        rest = [None if each in held else leaf for each, leaf in leaves.items()]
        network = jax.tree.unflatten(jax.tree.structure(params), rest)
        scales = self._scales(key, leaves, kernels, parts)
        return {_NETWORK: network, _OWN: held, **scales}, of_heads

    def _parts(
        self, leaves: Mapping[str, jax.Array], uses: Mapping[str, Use | None]
    ) -> tuple[_Parts, dict[str, Use]]:
        """Returns the parts, and the use of each array of a product, in their order."""
        kernels = {each: use for each, use in uses.items() if use and leaves[each].ndim > 1}
        if not kernels:
            raise UserError(
                f"The network {self.base.name} has no matrix product or convolution whose array "
                "heads could share. Give as_member a network with heads instead."
            )
        vectors, order = [each for each in leaves if leaves[each].ndim <= 1], [*uses]
        after = order[order.index([*kernels][-1]) :]
        parts = self.parts_of([*kernels], vectors, [each for each in vectors if each in after])
        return parts, kernels

    def _scales(
        self,
        key: Key,
        leaves: Mapping[str, jax.Array],
        kernels: Mapping[str, Use],
        parts: _Parts,
    ) -> dict[str, dict[str, jax.Array]]:
        """Returns the vectors r and s of all heads."""
        scales: dict[str, dict[str, jax.Array]] = {_IN: {}, _OUT: {}}
        for number, (each, use) in enumerate(kernels.items()):
            r_key, s_key = jax.random.split(jax.random.fold_in(key, _SCALES + number * 2**8))
            shape = leaves[each].shape
            if each in parts.scaled_in:
                of_r = _signs if each in parts.signs else self.draw
                scales[_IN][each] = of_r(r_key, (self.heads, *(shape[a] for a in use.scaled)))
            if each in parts.scaled_out:
                scales[_OUT][each] = self.draw(s_key, (self.heads, *(shape[a] for a in use.kept)))
        return scales

    def of_all_heads(self, apply: Apply) -> Apply:
        """Returns the forward pass of all heads, from that of the network."""

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

            def of_base(
                params: Params, model_state: ModelState, inputs: Inputs, key: Key | None
            ) -> tuple[Outputs, ModelState]:
                return apply(params, model_state, inputs, key, train, **given)

            def of_head(
                own: dict[str, jax.Array],
                r: dict[str, jax.Array],
                s: dict[str, jax.Array],
                model_state: ModelState,
                key: Key | None,
            ) -> tuple[Outputs, ModelState]:
                leaves = [own.get(name, leaf) for name, leaf in zip(names, network, strict=True)]
                whole = jax.tree.unflatten(structure, leaves)
                factors = {
                    number: _RankOne(r.get(name), s.get(name))
                    for number, name in enumerate(_named(whole))
                    if name in r or name in s
                }
                return with_factors(of_base, whole, factors, model_state, inputs, key)

            keys = None if key is None else _of_heads(key, self.heads)
            own, r, s = (params[name] for name in (_OWN, _IN, _OUT))
            return jax.vmap(of_head)(own, r, s, model_state, keys)

        return forward


def _of_heads(key: Key, heads: int) -> jax.Array:
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(heads))


def _named(params: PyTree) -> dict[str, jax.Array]:
    return dict(zip(names_of(params).values(), jax.tree.leaves(params), strict=True))
