"""Execution of the members of a device. A new execution is added in this file only."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from dist_ens.execution import lowerings
from dist_ens.execution.rewrite import Rule, rewritten
from dist_ens.execution.spec import Execution
from dist_ens.layout import Layout, broadcast
from dist_ens.types import Axes, Leaf, PyTree, Tree

_RULES: dict[str, Rule] = {
    "patches": lowerings.convolution_as_patches,
    "canonical": lowerings.convolution_in_canonical_layout,
    "apart": lowerings.convolutions_apart,
    "aligned": lowerings.product_in_whole_vectors,
    "flat": lowerings.flat_gradient_of_weights,
    "masks": lowerings.max_pool_gradient_as_masks,
}
_RULES_OF_COLUMNS = ("patches", "canonical", "aligned")  # They take the number of columns.


def lowered(fn: Callable[..., Tree], execution: Execution, layout: Layout) -> Callable[..., Tree]:
    """Returns a function of one member with the lowerings of an execution applied.

    Args:
        fn: Function of one member. Differentiate it first.
        execution: Execution whose `convolutions`, `products` and `max_pooling` name the lowerings.
        layout: Layout of the members and the data.

    Returns:
        A function of the same arguments with the same results up to rounding; `fn` itself if no
        operation is lowered. On several columns, some operations are always lowered.
    """
    call = partial(lowerings.call_on_every_column, layout)
    rules: dict[Primitive, Rule] = {lowerings.pure_callback(): call} if layout.data_axis > 1 else {}
    convolutions, columns = execution.convolutions, layout.data_axis
    if columns > 1:
        rules[lowerings.SCATTER_ADD] = partial(lowerings.scatter_add_by_columns, columns=columns)
        rules[lowerings.PRODUCT] = lowerings.product_of_swapped_factors
        if execution.members in ("vmap", "chunk"):
            # The compiler does not divide the grouped convolution of several members over the
            # columns. It would gather the batch, and each column would compute all of it.
            convolutions = convolutions or "apart"
    named = {
        lowerings.CONVOLUTION: convolutions,
        lowerings.PRODUCT: execution.products,
        lowerings.MAX_POOL_GRADIENT: execution.max_pooling,
    }
    for primitive, name in named.items():
        if name is not None:
            takes_columns = name in _RULES_OF_COLUMNS
            rules[primitive] = (
                partial(_RULES[name], columns=columns) if takes_columns else _RULES[name]
            )
    return rewritten(fn, rules) if rules else fn


def over_members(
    fn: Callable[..., Tree], execution: Execution, in_axes: Axes, out_axes: Axes
) -> Callable[..., Tree]:
    """Returns a function of all members of a device, made from a function of one member.

    Args:
        fn: Function of one member.
        execution: Execution whose `members` says how the members are run. `loop` dispatches
            programs of one member (see `execution.loop`); inside a program it is `map`.
        in_axes: Position of the members axis in each argument, 0 or None; a tree prefix of the
            tuple of arguments.
        out_axes: Position of the members axis in each result; a tree prefix of the results.

    Returns:
        The function of all members.
    """
    if execution.members == "vmap":
        return jax.vmap(fn, in_axes=in_axes, out_axes=out_axes)

    def one_after_another(*args: PyTree) -> Tree:
        leaves, structure = jax.tree.flatten(args)
        has_members = [axis is not None for axis in broadcast(in_axes, args)]
        own = [leaf for leaf, has in zip(leaves, has_members, strict=True) if has]

        def of_one(own: list[Leaf]) -> Tree:
            mine = iter(own)
            merged = [
                next(mine) if has else leaf for leaf, has in zip(leaves, has_members, strict=True)
            ]
            return fn(*jax.tree.unflatten(structure, merged))

        if execution.members == "unroll":
            results = [of_one([leaf[i] for leaf in own]) for i in range(len(own[0]))]
            return _placed(lambda axis, *parts: jnp.stack(parts, axis=axis), out_axes, *results)
        stacked = jax.lax.map(of_one, own, batch_size=execution.chunk_size)
        return _placed(lambda axis, leaf: jnp.moveaxis(leaf, 0, axis), out_axes, stacked)

    return one_after_another


def _placed(place: Callable[..., jax.Array], axes: Axes, *trees: Tree) -> Tree:
    """Applies `place(axis, *leaves)` to the corresponding leaves of trees of one structure."""
    flat = [jax.tree.leaves(tree) for tree in trees]
    placed = [place(*each) for each in zip(broadcast(axes, trees[0]), *flat, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(trees[0]), placed)
