"""Functions of the members of a row and the whole batch, divided over its devices by XLA."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
from jax.sharding import PartitionSpec

from dist_ens.ground.types import PyTree, Specs, Tree
from dist_ens.layout.specs import DATA, ENSEMBLE, MODEL, axis_of, is_spec, without_data

if TYPE_CHECKING:
    from dist_ens.layout.mesh import Layout


def mapped_over_rows(
    layout: "Layout", fn: Callable, in_specs: Specs, out_specs: Specs, *, is_mesh: bool
) -> Callable[..., PyTree]:
    """Returns the function of `Layout.map_rows` for rows of several devices.

    `is_mesh` says that the only row is a mesh of its own, whose program has no `shard_map`.
    """
    axes = {ENSEMBLE, MODEL} if is_mesh else {MODEL}

    def spec_within(leaf: jax.Array, spec: PartitionSpec, shares_rows: bool) -> PartitionSpec:
        names: list[str | tuple[str, str] | None] = [
            name if name in axes else None for name in spec
        ]
        axis = axis_of(spec, DATA)
        # Some leaves of a batch hold no rows.
        if axis is not None and leaf.ndim > axis and leaf.shape[axis] % layout.data_axis == 0:
            count = layout.data_axis * layout.model_axis
            names[axis] = (DATA, MODEL) if shares_rows and leaf.shape[axis] % count == 0 else DATA
        while names and names[-1] is None:
            names.pop()
        return PartitionSpec(*names)

    def constrained(
        tree: Tree, specs: Specs, *, shares_rows: bool = False, keeps_members: bool = False
    ) -> Tree:
        leaves, structure = jax.tree.flatten(tree)
        placed = [
            leaf
            if keeps_members and axis_of(spec, DATA) is None
            else jax.lax.with_sharding_constraint(leaf, spec_within(leaf, spec, shares_rows))
            for leaf, spec in zip(leaves, layout.leaf_specs(specs, tree), strict=True)
        ]
        return jax.tree.unflatten(structure, placed)

    def of_row(*args: PyTree) -> PyTree:
        # Devices that gather the parameters of a member each take a part of its examples. The
        # arguments of a row's program have their parts already: naming them again costs copies.
        own = constrained(args, in_specs, shares_rows=layout.is_fsdp, keeps_members=is_mesh)
        return constrained(fn(*own), out_specs)

    def of_mesh(*args: PyTree) -> PyTree:
        with jax.sharding.use_abstract_mesh(layout.mesh.abstract_mesh):
            return of_row(*args)

    if is_mesh:
        return of_mesh
    return jax.shard_map(
        of_row,
        mesh=layout.mesh,
        in_specs=jax.tree.map(without_data, in_specs, is_leaf=is_spec),
        out_specs=jax.tree.map(without_data, out_specs, is_leaf=is_spec),
        axis_names={ENSEMBLE},
        check_vma=False,
    )
