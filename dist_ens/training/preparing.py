"""The data of a run as the loop takes them, made of the arguments of `fit`."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from dist_ens.callbacks import RunInfo
from dist_ens.data import Source, shared
from dist_ens.data.class_names import are_names, listed, names_in, with_class_numbers
from dist_ens.ensemble.batches import rows_of
from dist_ens.ground.errors import UserError
from dist_ens.ground.state import ClassNames, State
from dist_ens.ground.terminal import PlainConsole
from dist_ens.ground.types import Data
from dist_ens.losses import Objective
from dist_ens.metrics.metric import checked_metrics
from dist_ens.processes import cluster
from dist_ens.training.arguments import Door, FitArguments
from dist_ens.training.checks import check_arguments, try_parts
from dist_ens.training.data import eval_steps_of, last_step_of, training_data
from dist_ens.training.data_protocol import TrainingData
from dist_ens.training.held_out import EvalData, eval_data_of, with_validation
from dist_ens.training.run_record import record_of, with_data


@dataclasses.dataclass(frozen=True)
class Job:
    """A training that was asked for, all of it checked.

    `say` prints a sentence, and `warn` prints one even where nothing else is printed.
    """

    arguments: FitArguments
    door: Door
    data: TrainingData
    eval_data: EvalData | None
    info: RunInfo
    class_names: tuple[str, ...]
    say: Callable[[str], None]
    warn: Callable[[str], None]


def prepared(arguments: FitArguments, door: Door) -> Job:
    """Returns the job of some arguments, after all checks."""
    say, warn = _printers(door, arguments.progress)
    check_arguments(arguments)
    ensemble = arguments.ensemble
    data, names = numbered_classes(ensemble.trained_objective, arguments.data, arguments.state)
    data, held_out = with_validation(data, arguments.validation)
    train = training_data(data, arguments.batch_size, ensemble, arguments.order or shared())
    eval_data = None
    if arguments.eval_data is not None or held_out is not None:
        metrics = checked_metrics(arguments.metrics)
        eval_data = eval_data_of(
            arguments.eval_data, held_out, metrics, names, ensemble.batch_specs
        )
    info = RunInfo(
        ensemble,
        ensemble.ids.tolist(),
        first_step=0,
        last_step=last_step_of(train, arguments.steps, arguments.epochs),
        batch_size=rows_of(train.batch),
        directions=try_parts(arguments, train, eval_data, say),
        eval_every=eval_steps_of(train, arguments.eval_every),
    )
    if door.record is None and arguments.checkpoints is not None:
        record = record_of(ensemble, train.batch)
        record = with_data(record, train, arguments.validation, names)
        door = dataclasses.replace(door, record=record)
    return Job(arguments, door, train, eval_data, info, names, say, warn)


def _printers(door: Door, progress: bool) -> tuple[Callable[[str], None], Callable[[str], None]]:
    """Returns the functions that print a sentence and a warning."""

    def silent(_: str) -> None:
        pass

    if not cluster.is_main():
        return door.say or silent, silent
    if door.say is not None or progress:
        return (door.say or partial(PlainConsole().print, soft_wrap=True),) * 2
    return silent, logging.warning


def numbered_classes(
    objective: Objective | None, data: Data, state: State | None
) -> tuple[Data, tuple[str, ...]]:
    """Returns training data with class numbers in place of names, and the sorted names."""
    names = state.class_names if state is not None else ()
    if isinstance(data, Source):
        of_source = data.spec.class_names or names
        if names and of_source != names:
            raise UserError(
                f"The classes of the source are {listed(of_source)}, and the state was trained on "
                f"{listed(names)}. Give a source of the same classes, or no state."
            )
        if objective is not None and of_source:
            _check_count(objective, of_source, "The source")
        return data, ClassNames(of_source) if of_source else ()
    if objective is None or not isinstance(data, Mapping):
        return data, names
    labels, where = data.get(objective.LABELS), f"The data[{objective.LABELS!r}]"
    if not are_names(labels):
        return data, names
    if objective.num_classes is None:
        raise UserError(
            f"{where} has names of classes, and {objective.name} takes real targets. Give numbers, "
            "or an objective of classes."
        )
    names = names or ClassNames(names_in(np.asarray(labels), where))
    _check_count(objective, names, where)
    return with_class_numbers(data, objective.LABELS, names, "The data"), names


def _check_count(objective: Objective, names: tuple[str, ...], where: str) -> None:
    if len(names) != objective.num_classes:
        raise UserError(
            f"{where} has {len(names)} names of classes, {listed(names)}, and {objective.name} has "
            f"num_classes={objective.num_classes}. Give the objective {len(names)} classes, and "
            "the network as many outputs."
        )
