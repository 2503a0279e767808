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


def check_fields_without_effect(experiment: Experiment, parts: OwnParts) -> None:
    """Raises a `UserError` if a field is set that a loss function or an own step does not see.

    Args:
        experiment: Description of the run.
        parts: Parts that were given.
    """
    if parts.step is not None:
        function, paths = "make_step", [*_OF_NETWORK, *_OF_STEP]
    elif parts.loss is not None:
        function, paths = "make_loss", [*_OF_NETWORK, "evaluation.pooling"]
    else:
        return
    for path in paths:
        section, _, name = path.partition(".")
        fields = getattr(experiment, section)
        value = getattr(fields, name)
        if value != getattr(type(fields)(), name):
            raise UserError(
                f"{path}={value!r} has no effect, because {function} calls the network itself. "
                f"Leave the field out, and let {function} do what it stands for."
            )


def require_trained_on(run: Run, source: Source) -> None:
    """Checks that a source is the one that a run was trained on.

    Args:
        run: Record of the run.
        source: Source that the run's experiment names, or that was given.

    Raises:
        UserError: If the description, the number of examples, or an example differs.
    """
    recorded = run.splits or {}
    changed = [n for n, here in source.fingerprint.items() if recorded.get(n, here) != here]
    if source.spec != run.spec:
        here, there = source.spec.told_apart(run.spec)
    elif source.num_train_examples != run.num_train_examples:
        here, there = (
            f"{count:,} training examples"
            for count in (source.num_train_examples, run.num_train_examples)
        )
    elif changed:
        splits = " and ".join(changed)
        here, there = (
            f"{splits} examples with other values",
            f"the same number of {splits} examples",
        )
    else:
        return
    raise UserError(
        f"The data from {run.experiment.data.source} is not what the run was trained on: here "
        f"{here}, there {there}. Put the data set back. If make_source of a config file made it, "
        "give that file as config; if Python gave it, evaluate in Python with that source."
    )


def require_own_keys(run: Run, workdir: str | os.PathLike[str]) -> None:
    """Checks that this version of dist_ens draws the random numbers of a run.

    Args:
        run: Record of the run.
        workdir: Folder of the run, for the message.

    Raises:
        UserError: If another version drew them, from other keys.
    """
    if run.record is None or run.record.key_rule != KEY_RULE:
        raise UserError(
            f"{quoted(workdir)} holds a run of another version of dist_ens, whose members drew "
            "other random numbers. Use that version."
        )
