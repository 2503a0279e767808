"""The partition specs of arrays on the mesh, and their names in the public API."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

from dist_ens.errors import UserError
from dist_ens.types import Axes, PyTree, Specs

P = PartitionSpec

ENSEMBLE = "ensemble"
DATA = "data"

MEMBERS = P(ENSEMBLE)  # [members, ...]: the state
BATCHES = P(None, DATA)  # [steps, batch, ...]: the batches of one call, the same for all members
MEMBER_BATCHES = P(ENSEMBLE, None, DATA)  # [members, steps, batch, ...]: each member's batches
BATCH = P(DATA)  # [batch, ...]: one batch for all members
MEMBER_METRICS = P(None, ENSEMBLE)  # [steps, members]
MEMBER_BATCH = P(ENSEMBLE, DATA)  # [members, batch, ...]: predictions, or a batch for each member
REPLICATED = P()  # [...]: the same on every device

NAMES = {"members": MEMBERS, "batch": BATCH, "member_batch": MEMBER_BATCH, "shared": REPLICATED}


def named_specs(specs: Specs) -> Specs:
    """Returns a tree of partition specs from a tree of their public names.

    Args:
        specs: Name ("members", "batch", "member_batch" or "shared"), `PartitionSpec` of this file,
            or a pytree of these.

    Returns:
        The tree with every name replaced by its `PartitionSpec`.

    Raises:
        UserError: If a name is not one of the four.

    >>> [tuple(spec) for spec in named_specs(("members", "batch"))]
    [('ensemble',), ('data',)]
    """

    def spec_of(spec: Specs) -> PartitionSpec:
        if isinstance(spec, PartitionSpec):
            return spec
        if not isinstance(spec, str) or spec not in NAMES:
            raise UserError(
                f"{spec!r} is not a spec. Use one of {', '.join(map(repr, NAMES))}, or a pytree of "
                "these."
            )
        return NAMES[spec]

    return jax.tree.map(spec_of, specs, is_leaf=is_spec)


def is_spec(value: object) -> bool:
    """Returns whether a value is a partition spec. In some versions of JAX, it is also a pytree."""
    return isinstance(value, PartitionSpec)


def axis_of(spec: PartitionSpec, name: str) -> int | None:
    """Returns the position of a mesh axis in a spec; None if the spec does not use it.

    Args:
        spec: Partition spec of an array.
        name: Name of a mesh axis.

    >>> axis_of(MEMBER_METRICS, ENSEMBLE)
    1
    """
    return tuple(spec).index(name) if name in tuple(spec) else None


def members_axes(specs: Specs) -> Axes:
    """Returns the position of the members axis in each spec of a tree; None where it has none."""
    return jax.tree.map(lambda spec: axis_of(spec, ENSEMBLE), specs, is_leaf=is_spec)


def broadcast(prefix: Specs | Axes, tree: PyTree) -> list[Any]:
    """Returns the leaf of a tree prefix that belongs to each leaf of a tree.

    Args:
        prefix: Tree prefix of `tree`. None and partition specs are its leaves.
        tree: Any pytree.

    Returns:
        A list in the order of `jax.tree.leaves(tree)`.
    """

    def is_leaf(value: object) -> bool:
        return value is None or is_spec(value)

    found: list[Any] = []
    jax.tree.map(
        lambda value, branch: found.extend([value] * len(jax.tree.leaves(branch))),
        prefix,
        tree,
        is_leaf=is_leaf,
    )
    return found
