"""Checks of a run: fields without effect, its data, and its random numbers."""

import os

from dist_ens.data import Source
from dist_ens.experiment.config_file import OwnParts
from dist_ens.experiment.experiment import Experiment
from dist_ens.experiment.record import Run
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import KEY_RULE

# Fields that say what happens to the inputs and outputs of a network.
_OF_NETWORK = ("data.mean", "data.std", "compute.rematerialize", "evaluation.dropout_samples")
_OF_STEP = ("compute.microbatches", "compute.dtype", "loss.options")


def fields_without_effect(experiment: Experiment, parts: OwnParts) -> list[str]:
    """Returns the fields that are set and that a loss function or an own step does not see."""
    if parts.step is None and parts.loss is None:
        return []
    found = []
    for path in (*_OF_NETWORK, *(_OF_STEP if parts.step else ["evaluation.pooling"])):
        section, _, name = path.partition(".")
        fields = getattr(experiment, section)
        value = getattr(fields, name)
        if value != getattr(type(fields)(), name):
            found.append(f"{path}={value!r}")
    if parts.step and experiment.data.examples == "bootstrap":
        found.append("data.examples='bootstrap'")
    if parts.step and parts.methods:
        found.append("make_methods")
    return found


def require_trained_on(run: Run, source: Source) -> None:
    """Checks that a source is the one that a run was trained on."""
    before, recorded = run.num_train_examples, run.splits or {}
    changed = [n for n, here in source.fingerprint.items() if recorded.get(n, here) != here]
    if source.spec != run.spec or source.num_train_examples != before or changed:
        here, there = source.spec.told_apart(run.spec)
        raise UserError(
            f"The data from {run.experiment.data.source} is not what the run was trained on: here "
            f"{source.num_train_examples:,} training examples, {here}, there {before:,}, {there}"
            f"{' and other values' if changed else ''}. Put the data set back. If make_source of "
            "a config file made it, give that file as config."
        )


def require_own_keys(run: Run, workdir: str | os.PathLike[str]) -> None:
    """Checks that this version of dist_ens draws the random numbers of a run."""
    if run.record is None or run.record.key_rule != KEY_RULE:
        raise UserError(f"{quoted(workdir)} holds a run of another version of dist_ens. Use that.")
