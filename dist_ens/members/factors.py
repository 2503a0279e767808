"""A network whose products with some arrays are replaced, such as by those of low-rank adapters.

The forward pass is traced, and its operations are evaluated one by one. An array with factors is
kept as it is until a matrix product or a convolution takes it. So no network needs to know of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from dist_ens.ground.types import Leaf, PyTree, Tree

_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
}
_CHECKPOINTS = ("checkpoint", "remat", "remat2")
# product(inputs, array) -> outputs: the operation of the network, for any array of that kind.
Product = Callable[[jax.Array, jax.Array], jax.Array]


class Use(NamedTuple):
    """The use of an array in a matrix product or a convolution, `outputs = inputs * array`.

    Attributes:
        summed: Axes of the array over which the product sums, ascending.
        kept: Its other axes, which are axes of the outputs.
        of_inputs: Axes of the inputs that the axes in `scaled` are multiplied with.
        of_outputs: Axes of the outputs for those in `kept`.
        scaled: Axes in `summed` that are features, which excludes the window of a convolution.
    """

    summed: tuple[int, ...]
    kept: tuple[int, ...]
    of_inputs: tuple[int, ...]
    of_outputs: tuple[int, ...]
    scaled: tuple[int, ...]


class Factors(Protocol):
    """Arrays beside an array of a network, which change the products with it."""

    def product(self, use: Use, product: Product, inputs: jax.Array, array: jax.Array) -> jax.Array:
        """Returns the outputs of the changed product."""

    def merged(self, array: jax.Array) -> jax.Array:
        """Returns the changed array, for an operation that is no such product."""

    def changed(self, change: Callable[[jax.Array], jax.Array]) -> "Factors":
        """Returns the factors with a function applied to each, such as a cast."""


@partial(jax.tree_util.register_dataclass, data_fields=["array", "factors"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class _Held:
    """An array of a network, beside its factors."""

    array: jax.Array
    factors: Factors


def with_factors(
    fn: Callable[..., Tree], params: PyTree, factors: Mapping[int, Factors], *args: PyTree
) -> Tree:
    """Returns `fn(params, *args)` with factors at some of the leaves of `params`, by their number.

    It can be differentiated and vectorised as `fn` can. Inside a scan, a custom derivative or a
    loop, the changed array itself is made.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(params, *args)
    leaves = [
        _Held(leaf, factors[number]) if number in factors else leaf
        for number, leaf in enumerate(jax.tree.leaves(params))
    ]
    results = _evaluate(closed, [*leaves, *jax.tree.leaves(args)])
    return jax.tree.unflatten(jax.tree.structure(shapes), map(_merged, results))


def uses_of(fn: Callable[..., PyTree], params: PyTree, *args: PyTree) -> dict[int, Use | None]:
    """Returns the use of each leaf of `params` by its number, in the order of their first uses.

    It is None if another operation takes the leaf, such as an addition or a lookup, or if its uses
    differ.
    """
    found: dict[int, set[Use | None]] = {}

    def traced(params: PyTree, *args: PyTree) -> PyTree:
        count = len(jax.tree.leaves(params))
        probes = {number: _Probe(number, found) for number in range(count)}
        return with_factors(fn, params, probes, *args)

    jax.eval_shape(traced, params, *args)
    return {n: next(iter(uses)) if len(uses) == 1 else None for n, uses in found.items()}


@jax.tree_util.register_static
class _Probe:
    """Factors that change nothing, and record the uses of their array."""

    def __init__(self, number: int, found: dict[int, set[Use | None]]) -> None:
        self._number, self._found = number, found

    def product(self, use: Use, product: Product, inputs: jax.Array, array: jax.Array) -> jax.Array:
        self._found.setdefault(self._number, set()).add(use)
        return product(inputs, array)

    def merged(self, array: jax.Array) -> jax.Array:
        self._found.setdefault(self._number, set()).add(None)
        return array

    def changed(self, change: Callable[[jax.Array], jax.Array]) -> "_Probe":
        return self


def _merged(value: Leaf | _Held) -> Leaf:
    return value.factors.merged(value.array) if isinstance(value, _Held) else value


def _evaluate(closed: ClosedJaxpr, args: Sequence[Leaf | _Held]) -> list[Leaf | _Held]:
    jaxpr: Jaxpr = closed.jaxpr
    variables: list[Var] = [*jaxpr.constvars, *jaxpr.invars]
    values = dict(zip(variables, [*closed.consts, *args], strict=True))

    def read(atom: Var | Literal) -> Leaf | _Held:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        with eqn.ctx.manager:
            results = _apply(eqn, [read(atom) for atom in eqn.invars])
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _apply(eqn: JaxprEqn, inputs: list[Leaf | _Held]) -> Sequence[Leaf | _Held]:
    name, held = eqn.primitive.name, [isinstance(each, _Held) for each in inputs]
    if any(held):
        if name in _CALLS:
            return _evaluate(eqn.params[_CALLS[name]], inputs)
        if name in _CHECKPOINTS:
            inner = ClosedJaxpr(eqn.params["jaxpr"], ())
            options = {option: eqn.params[option] for option in ("prevent_cse", "policy")}
            return jax.checkpoint(partial(_evaluate, inner), **options)(inputs)
        if name == "convert_element_type":
            cast = partial(_bound, eqn)
            return [_Held(cast(inputs[0].array), inputs[0].factors.changed(cast))]
        place = held.index(True)
        ndims = [(each.array if isinstance(each, _Held) else each).ndim for each in inputs]
        if sum(held) == 1 and (use := _use_in(eqn, place, ndims)):
            return [_product(eqn, use, inputs, place)]
    results = _bound(eqn, *map(_merged, inputs))
    return results if eqn.primitive.multiple_results else [results]


def _bound(eqn: JaxprEqn, *inputs: Leaf) -> PyTree:
    params = eqn.primitive.get_bind_params(eqn.params)
    return eqn.primitive.bind(*inputs, **params)


def _use_in(eqn: JaxprEqn, place: int, ndims: Sequence[int]) -> Use | None:
    """Returns the use of an operand of a product; None if another operation takes it.

    `ndims` are the numbers of axes of the operands.
    """
    if eqn.primitive is jax.lax.dot_general_p:
        contracted, batched = eqn.params["dimension_numbers"]
        if any(batched):
            return None
        pairs = sorted(zip(contracted[place], contracted[1 - place], strict=True))
        summed, of_inputs = zip(*pairs, strict=True) if pairs else ((), ())
        kept = tuple(axis for axis in range(ndims[place]) if axis not in summed)
        # The axes of the first operand come first in the outputs.
        begin = 0 if place == 0 else ndims[1 - place] - len(summed)
        of_outputs = tuple(range(begin, begin + len(kept)))
        return Use(summed, kept, of_inputs, of_outputs, summed)
    if eqn.primitive is jax.lax.conv_general_dilated_p and place == 1:
        numbers = eqn.params["dimension_numbers"]
        if eqn.params["feature_group_count"] > 1 or eqn.params["batch_group_count"] > 1:
            return None
        out, features, *window = numbers.rhs_spec
        summed = tuple(sorted((features, *window)))
        return Use(summed, (out,), (numbers.lhs_spec[1],), (numbers.out_spec[1],), (features,))
    return None


def _product(eqn: JaxprEqn, use: Use, inputs: list[Leaf | _Held], place: int) -> jax.Array:
    held, other = inputs[place], inputs[1 - place]

    def product(inputs: jax.Array, array: jax.Array) -> jax.Array:
        operands = [inputs, inputs]
        operands[place] = array
        return _bound(eqn, *operands)

    return held.factors.product(use, product, other, held.array)  # type: ignore[arg-type]


def along(vector: jax.Array, axes: Sequence[int], ndim: int) -> jax.Array:
    """Returns an array [...] with `ndim` axes, its own ones at some places and in their order."""
    order = sorted(range(len(axes)), key=lambda number: axes[number])
    moved = jnp.transpose(vector, order)
    return jnp.expand_dims(moved, [axis for axis in range(ndim) if axis not in axes])
