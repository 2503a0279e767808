"""The record of a run, which `fit` saves with each checkpoint."""

import collections
import dataclasses
import hashlib
import re
from collections.abc import Sequence

import jax

from dist_ens.checkpoint import StepRecord
from dist_ens.checkpoint.network_files import digest_of
from dist_ens.data import example_bytes_of
from dist_ens.data.source import fingerprint_of
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.fingerprint import fingerprint_of_step, versions
from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import KEY_RULE
from dist_ens.ground.state import leaf_types
from dist_ens.ground.types import Batch, Leaf, PyTree, Shapes
from dist_ens.processes import cluster
from dist_ens.training.data_protocol import TrainingData

# A fingerprint covers all examples in memory of up to the first number of bytes. It covers the
# second number of examples of larger data, and the third of examples that are not in memory.
_MOST_READ, _SAMPLED, _SAMPLED_OF_FILES = 2**26, 1000, 100
# A leaf of a batch in a record, such as `['inputs'] float32[128, 64]`, and a key of its path.
_LEAF = re.compile(r"(\S*) (\w+)\[([\d, ]*)\]")
_KEY = re.compile(r"\['([^']*)'\]|\[(\d+)\]|\.(\w+)")


class _Field(str):
    """The name of a field of a named tuple or a dataclass."""


def record_of(ensemble: Ensemble, batch: Batch) -> StepRecord:
    """Returns the record of a run, without its data, given shapes and types of a global batch."""
    # The policy for failures may change on resume, so the record does not depend on it.
    ensemble = ensemble.replace(failure_policy=None)
    leaves = leaf_types(ensemble.abstract_state(batch))
    objective, has_own = ensemble.trained_objective, ensemble.own_step is not None
    return StepRecord(
        member=ensemble.member.name,
        # A user's own step has no optimizer, and a loss that only scores it may change.
        optimizer="" if has_own else _name_of(ensemble.optimizer),
        loss=objective.name if objective else "" if has_own else _name_of(ensemble.loss),
        methods=tuple(map(_name_of, ensemble.methods)),
        num_members=ensemble.num_members,
        member_ids=tuple(ensemble.ids.tolist()),
        seed=int(ensemble.seed),
        hyper=ensemble.hyper.by_id(ensemble.ids.tolist()) or None,
        shared=None if ensemble.shared.is_empty else digest_of(ensemble.shared),
        shared_path=ensemble.shared.path or None,
        batch=", ".join(
            f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(batch)
        ),
        fingerprint=fingerprint_of_step(ensemble, batch),
        versions=versions(),
        leaves=hashlib.sha256(repr(sorted(leaves.items())).encode()).hexdigest(),
        key_rule=KEY_RULE,
    )


def with_data(
    record: StepRecord, train: TrainingData, validation: float | None, names: Sequence[str]
) -> StepRecord:
    """Returns a record with the facts of the training data, of which an iterable has none."""
    record = dataclasses.replace(record, class_names=tuple(names) or None)
    split = train.split
    if split is None or train.order is None:
        return record
    digits = fingerprint_of(
        split,
        example_bytes_of(split),
        most_bytes=_MOST_READ,
        sampled=_SAMPLED if split.in_memory else _SAMPLED_OF_FILES,
    )
    # Hosts must agree on whether the run may resume, also if one of them reads another file.
    of_main = cluster.bytes_of_main(bytes.fromhex(digits or "00" * 32))
    return dataclasses.replace(
        record,
        num_examples=len(split),
        num_groups=train.order.num_groups,
        validation=validation,
        examples=of_main.hex() if any(of_main) else None,
    )


def batch_shapes_in(record: StepRecord) -> Shapes:
    """Returns shapes and types of the batch of a record. A named tuple stands for any class."""
    leaves = []
    for path, dtype, shape in _LEAF.findall(record.batch):
        if _KEY.sub("", path):
            raise UserError(
                f"The batches of this run are {record.batch}, whose structure cannot be made "
                "again from its description. Resume the run with fit, which knows its batches."
            )
        keys = [
            _Field(field) if field else name if name else int(number)
            for name, number, field in _KEY.findall(path)
        ]
        lengths = tuple(int(length) for length in shape.split(",") if length.strip())
        leaves.append((keys, jax.ShapeDtypeStruct(lengths, dtype)))
    return _tree_of(leaves)


def _tree_of(leaves: Sequence[tuple[list[str | int], Leaf]]) -> PyTree:
    """Returns the pytree of dicts and tuples whose leaves have these paths."""
    if not leaves:
        return None
    if not leaves[0][0]:
        return leaves[0][1]
    branches: dict[str | int, list[tuple[list[str | int], Leaf]]] = {}
    for (first, *rest), leaf in leaves:
        branches.setdefault(first, []).append((rest, leaf))
    made = {key: _tree_of(branch) for key, branch in branches.items()}
    if isinstance(next(iter(made)), _Field):
        return collections.namedtuple("Batch", map(str, made), rename=True)(*made.values())
    return tuple(made.values()) if isinstance(next(iter(made)), int) else made


def _name_of(part: object) -> str:
    """Returns a readable name of a part. An Optax optimizer has the name of its function."""
    made_by = getattr(part, "update", part)
    return getattr(made_by, "__qualname__", type(part).__name__).partition(".<locals>")[0]
