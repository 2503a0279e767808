"""`Snapshot`: everything that one save writes."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from dist_ens.checkpoint.leaves import named_leaves
from dist_ens.checkpoint.lineage import Lineage
from dist_ens.ground.json_text import Json
from dist_ens.ground.types import PyTree
from dist_ens.layout import Piece, pieces_off_devices


@dataclasses.dataclass(frozen=True)
class Leaf:
    """An array of a state: its whole shape and type, and the parts that this host writes."""

    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: list[Piece]


def leaves_off_devices(state: PyTree) -> dict[str, Leaf]:
    """Returns the leaves of a state by name. Their copies to the hosts' memory are only queued.

    The caller may donate or delete the state right after this call.
    """
    named = named_leaves(state)
    pieces = pieces_off_devices(named)
    return {name: Leaf(leaf.shape, leaf.dtype, pieces[name]) for name, leaf in named.items()}


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Everything that one save writes.

    Attributes:
        leaves: Leaves of the state by name; see `leaves_off_devices`.
        record: Record of the run.
        scores: Scores of the ensemble at this step, by name; empty if it was not scored there.
        host_files: Bytes that belong to this host, by name (`[a-z_]+`), such as the position of its
            data iterator.
        lineages: Lineage of each member, by its id. A member without one was trained in this run.
        kept_step: Step that is kept in any case when this one is saved.
        before: Function that the writing thread calls before it writes, and that returns more host
            files, or None, on a single host, to write nothing. An `OSError` or a `SaveError` of it
            counts as one of writing.
    """

    step: int
    leaves: Mapping[str, Leaf]
    record: Mapping[str, Json]
    _: dataclasses.KW_ONLY
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    host_files: Mapping[str, bytes] = dataclasses.field(default_factory=dict)
    lineages: Mapping[int, Lineage] = dataclasses.field(default_factory=dict)
    kept_step: int | None = None
    before: Callable[[], Mapping[str, bytes] | None] = dict
