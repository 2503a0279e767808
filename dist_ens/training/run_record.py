"""The record of a run, which `fit` saves with each checkpoint."""

import dataclasses
import hashlib
from collections.abc import Sequence

import jax

from dist_ens.checkpoint import StepRecord
from dist_ens.data import example_bytes_of
from dist_ens.data.source import fingerprint_of
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.fingerprint import fingerprint_of_step, versions
from dist_ens.ground.randomness import KEY_RULE
from dist_ens.ground.state import leaf_types
from dist_ens.ground.types import Batch
from dist_ens.processes import cluster
from dist_ens.training.data_protocol import TrainingData

# A fingerprint covers all examples in memory of up to the first number of bytes. It covers the
# second number of examples of larger data, and the third of examples that are not in memory.
_MOST_READ, _SAMPLED, _SAMPLED_OF_FILES = 2**26, 1000, 100


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
        hyper=ensemble.hyper.described() or None,
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


def _name_of(part: object) -> str:
    """Returns a readable name of a part. An Optax optimizer has the name of its function."""
    made_by = getattr(part, "update", part)
    return getattr(made_by, "__qualname__", type(part).__name__).partition(".<locals>")[0]
