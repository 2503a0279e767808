"""The executions of the members of a device, and a step with its lowerings applied."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from dist_ens.execution import lowerings
from dist_ens.execution.hoisting import hoisted
from dist_ens.execution.rewrite import Rule, rewritten
from dist_ens.execution.spec import (
    LOWERINGS,
    MEMBER_EXECUTIONS,
    Execution,
    MemberExecution,
    register,
)
from dist_ens.ground.shared import Shared
from dist_ens.ground.types import Axes, Leaf, PyTree, Tree
from dist_ens.layout import Layout, broadcast


def lowered(fn: Callable[..., Tree], execution: Execution, layout: Layout) -> Callable[..., Tree]:
    """Returns a function of one member, already differentiated, with its operations lowered."""
    columns = layout.data_axis
    rules: dict[Primitive, Rule] = {}
    names = execution.lowerings
    if columns > 1 or layout.model_axis > 1:
        rules[lowerings.pure_callback()] = lowerings.call_on_every_column
    if columns > 1:
        rules[lowerings.SCATTER_ADD] = partial(lowerings.scatter_add_by_columns, columns=columns)
        rules[lowerings.PRODUCT] = lowerings.product_of_swapped_factors
        if execution.members in ("vmap", "chunk"):
            # The compiler does not divide the grouped convolution of several members over the
            # columns. It would gather the batch, and each column would compute all of it.
            names = ("apart", *names)
    for name in names:
        lowering = LOWERINGS[name]
        rules[lowering.primitive] = partial(lowering.rule, columns=columns)
    return rewritten(fn, rules) if rules else fn


def over_members(
    fn: Callable[..., Tree], execution: Execution, in_axes: Axes, out_axes: Axes
) -> Callable[..., Tree]:
    """Returns a function of all members of a device; the axes are tree prefixes, 0 or None."""
    of_all = MEMBER_EXECUTIONS[execution.members].over_members
    return of_all(fn, in_axes, out_axes, execution.chunk_size)


def _vmap(
    fn: Callable[..., Tree], in_axes: Axes, out_axes: Axes, chunk_size: None
) -> Callable[..., Tree]:
    return jax.vmap(fn, in_axes=in_axes, out_axes=out_axes)


def _map(
    fn: Callable[..., Tree], in_axes: Axes, out_axes: Axes, chunk_size: int | None
) -> Callable[..., Tree]:
    def all_members(of_one: Callable[[list[Leaf]], Tree], own: list[Leaf]) -> Tree:
        stacked = jax.lax.map(of_one, own, batch_size=chunk_size)
        return _placed(lambda axis, leaf: jnp.moveaxis(leaf, 0, axis), out_axes, stacked)

    return _one_after_another(fn, in_axes, all_members)


def _unroll(
    fn: Callable[..., Tree], in_axes: Axes, out_axes: Axes, chunk_size: None
) -> Callable[..., Tree]:
    def all_members(of_one: Callable[[list[Leaf]], Tree], own: list[Leaf]) -> Tree:
        results = [of_one([leaf[i] for leaf in own]) for i in range(len(own[0]))]
        return _placed(lambda axis, *parts: jnp.stack(parts, axis=axis), out_axes, *results)

    return _one_after_another(fn, in_axes, all_members)


def _one_after_another(
    fn: Callable[..., Tree],
    in_axes: Axes,
    all_members: Callable[[Callable[[list[Leaf]], Tree], list[Leaf]], Tree],
) -> Callable[..., Tree]:
    """Returns a function of all members; `all_members` maps one over the leaves with members."""

    def of_all(*args: PyTree) -> Tree:
        leaves, structure = jax.tree.flatten(args)
        has_members = [axis is not None for axis in broadcast(in_axes, args)]
        parts = jax.tree.leaves(args, is_leaf=lambda node: isinstance(node, Shared))
        is_shared = [isinstance(part, Shared) for part in parts for _ in jax.tree.leaves(part)]

        def of_leaves(*merged: Leaf) -> Tree:
            return fn(*jax.tree.unflatten(structure, merged))

        if any(is_shared):
            of_leaves = hoisted(of_leaves, leaves, has_members, is_shared)

        def of_one(own: list[Leaf]) -> Tree:
            mine = iter(own)
            merged = [
                next(mine) if has else leaf for leaf, has in zip(leaves, has_members, strict=True)
            ]
            return of_leaves(*merged)

        own = [leaf for leaf, has in zip(leaves, has_members, strict=True) if has]
        return all_members(of_one, own)

    return of_all


def _placed(place: Callable[..., jax.Array], axes: Axes, *trees: Tree) -> Tree:
    """Applies `place(axis, *leaves)` to the corresponding leaves of trees of one structure."""
    flat = [jax.tree.leaves(tree) for tree in trees]
    placed = [place(*each) for each in zip(broadcast(axes, trees[0]), *flat, strict=True)]
    return jax.tree.unflatten(jax.tree.structure(trees[0]), placed)


register(MemberExecution("vmap", _vmap))
register(MemberExecution("unroll", _unroll))
register(MemberExecution("map", _map))
register(MemberExecution("chunk", _map, takes_size=True))
register(MemberExecution("loop", _map))  # `execution.loop` dispatches programs of one member.
