"""The data of a run as the loop takes them, made of the arguments of `fit`."""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial

import numpy as np

from dist_ens.callbacks import RunInfo
from dist_ens.data import Source
from dist_ens.data.class_names import are_names, listed, names_in, with_class_numbers
from dist_ens.ensemble.batches import rows_of
from dist_ens.ground.errors import UserError
from dist_ens.ground.state import ClassNames, State
from dist_ens.ground.terminal import PlainConsole
from dist_ens.ground.types import Data
from dist_ens.losses import Objective
from dist_ens.metrics.metric import checked_metrics
from dist_ens.processes import cluster
from dist_ens.sampling import Order
from dist_ens.training.arguments import Door, FitArguments
from dist_ens.training.checks import try_parts
from dist_ens.training.data import training_data
from dist_ens.training.data_protocol import TrainingData
from dist_ens.training.evaluating import EvalData, eval_data_of, with_validation
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
    ensemble = arguments.ensemble
    data, names = numbered_classes(ensemble.trained_objective, arguments.data, arguments.state)
    data, held_out = with_validation(data, arguments.validation)
    train = training_data(arguments, data)
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
        last_step=_last_step(arguments, train.order),
        batch_size=rows_of(train.batch),
        directions=try_parts(arguments, train, eval_data, say),
        eval_every=_eval_steps(arguments, train.order),
    )
    if door.record is None and arguments.checkpoints is not None:
        record = record_of(ensemble, train.batch)
        record = with_data(record, train, arguments.validation, names)
        if isinstance(data, Source) and data.spec.table is not None:
            record = dataclasses.replace(record, table_spec=data.spec.to_dict())
        door = dataclasses.replace(door, record=record)
    return Job(arguments, door, train, eval_data, info, names, say, warn)


def _last_step(arguments: FitArguments, order: Order | None) -> int:
    if order is None or arguments.epochs is None:
        return int(arguments.steps or 0)
    return order.num_steps(arguments.epochs)


def _eval_steps(arguments: FitArguments, order: Order | None) -> int | Fraction | None:
    if isinstance(arguments.eval_every, str):
        return None if order is None else order.epoch_steps
    return arguments.eval_every


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
    known, where = getattr(state, "class_names", ()), "The source"
    labels = data.get(Objective.LABELS) if isinstance(data, Mapping) else None
    if isinstance(data, Source):
        names = data.spec.class_names or known
        if known and names != known:
            raise UserError(
                f"The classes of the source are {listed(names)}, and the state was trained on "
                f"{listed(known)}. Give a source of the same classes, or no state."
            )
    elif objective is not None and are_names(labels):
        where = f"The data[{objective.LABELS!r}]"
        names = known or names_in(np.asarray(labels), where)
    else:
        return data, known
    if objective is not None and names:
        if len(names) != objective.num_classes:
            raise UserError(
                f"{where} has {len(names)} names of classes, {listed(names)}, and {objective.name} "
                f"has num_classes={objective.num_classes}. Give an objective of {len(names)} "
                "classes, and the network as many outputs."
            )
        data = with_class_numbers(data, objective.LABELS, names, "The data")
    return data, ClassNames(names) if names else ()
