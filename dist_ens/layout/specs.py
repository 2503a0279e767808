"""The partition specs of arrays on the mesh, and their names in the public API."""

import jax
from jax.sharding import PartitionSpec

from dist_ens.ground.errors import UserError
from dist_ens.ground.state import described
from dist_ens.ground.types import Axes, KeyPath, Leaf, PyTree, Specs

P = PartitionSpec

ENSEMBLE = "ensemble"
DATA = "data"
MODEL = "model"
AXES = (ENSEMBLE, DATA, MODEL)

MEMBERS = P(ENSEMBLE)  # [members, ...]: the state
BATCHES = P(None, DATA)  # [steps, batch, ...]: the batches of one call, the same for all members
MEMBER_BATCHES = P(ENSEMBLE, None, DATA)  # [members, steps, batch, ...]: each member's batches
BATCH = P(DATA)  # [batch, ...]: one batch for all members
MEMBER_METRICS = P(None, ENSEMBLE)  # [steps, members]
MEMBER_BATCH = P(ENSEMBLE, DATA)  # [members, batch, ...]: predictions, or a batch for each member
REPLICATED = P()  # [...]: the same on every device

NAMES = {"members": MEMBERS, "batch": BATCH, "member_batch": MEMBER_BATCH, "shared": REPLICATED}


def named_specs(specs: Specs) -> Specs:
    """Returns a tree of partition specs from a tree of their public names, or of both.

    >>> [tuple(spec) for spec in named_specs(("members", "batch"))]
    [('ensemble',), ('data',)]
    """

    def spec_of(spec: Specs) -> PartitionSpec:
        if not isinstance(spec, str):
            return spec
        if spec not in NAMES:
            raise UserError(f"{spec!r} is not a spec. Use one of {', '.join(map(repr, NAMES))}.")
        return NAMES[spec]

    return jax.tree.map(spec_of, specs, is_leaf=is_spec)


def without_data(spec: PartitionSpec) -> PartitionSpec:
    """Returns a spec without the data axis, which is the last axis of a spec that has it."""
    axes = [axis for axis in tuple(spec) if axis != DATA]
    while axes and axes[-1] is None:
        axes.pop()
    return P(*axes)


def specs_of_batch(declared: Specs, batch: PyTree) -> Specs:
    """Returns the spec of each leaf of a batch, `BATCH` or `REPLICATED`.

    `declared` is the name "batch" or "shared" for all leaves, or a dict of names, nested as the
    batch is. Leaves that it does not name have the spec "batch".

    >>> batch = {"inner": jax.numpy.zeros((4, 2)), "boundary": jax.numpy.zeros((3, 2))}
    >>> specs = specs_of_batch({"boundary": "shared"}, batch)
    >>> tuple(specs["inner"]), tuple(specs["boundary"])
    (('data',), ())
    """
    if isinstance(declared, str):
        return NAMES[declared]
    names = {keys_of(path): name for path, name in jax.tree_util.tree_leaves_with_path(declared)}
    used: set[tuple[str, ...]] = set()

    def spec_of(path: KeyPath, _: Leaf) -> PartitionSpec:
        keys = keys_of(path)
        found = [keys[:count] for count in range(len(keys) + 1) if keys[:count] in names]
        used.update(found)
        return NAMES[names[found[0]]] if found else BATCH

    specs = jax.tree_util.tree_map_with_path(spec_of, batch)
    unknown = [".".join(keys) for keys in names if keys not in used]
    if unknown:
        raise UserError(
            f"batch_specs names {', '.join(map(repr, unknown))}, and the batch has the leaves "
            f"{described(batch)}. Name parts that the batch has."
        )
    return specs


def keys_of(path: KeyPath) -> tuple[str, ...]:
    """Returns the keys of a path in a pytree as texts."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def is_spec(value: object) -> bool:
    """Returns whether a value is a partition spec. In some versions of JAX, it is also a pytree."""
    return isinstance(value, PartitionSpec)


def axis_of(spec: PartitionSpec, name: str) -> int | None:
    """Returns the position of a mesh axis in a spec; None if the spec does not use it."""
    return tuple(spec).index(name) if name in tuple(spec) else None


def members_axes(specs: Specs) -> Axes:
    """Returns the position of the members axis in each spec of a tree; None where it has none."""
    return jax.tree.map(lambda spec: axis_of(spec, ENSEMBLE), specs, is_leaf=is_spec)


def broadcast(prefix: Specs | Axes, tree: PyTree) -> list[Specs | Axes]:
    """Returns the leaf of a tree prefix, a spec or None, for each leaf of a tree."""

    def is_leaf(value: object) -> bool:
        return value is None or is_spec(value)

    found: list[Specs | Axes] = []
    jax.tree.map(
        lambda value, branch: found.extend([value] * len(jax.tree.leaves(branch))),
        prefix,
        tree,
        is_leaf=is_leaf,
    )
    return found
