"""The data of a run as the loop takes them, made of the arguments of `fit`."""

from collections.abc import Callable, Mapping

import numpy as np

from dist_ens.callbacks import RunInfo
from dist_ens.data import Source
from dist_ens.data.class_names import are_names, listed, names_in, with_class_numbers
from dist_ens.ensemble.batches import rows_of
from dist_ens.errors import UserError
from dist_ens.losses import Objective
from dist_ens.metrics.metric import checked_metrics
from dist_ens.state import ClassNames, State
from dist_ens.training.arguments import FitArguments
from dist_ens.training.checks import check_arguments, check_parts
from dist_ens.training.data import eval_steps_of, last_step_of, training_data
from dist_ens.training.data_protocol import TrainingData
from dist_ens.training.held_out import EvalData, eval_data_of, with_validation
from dist_ens.types import Data


def prepared(
    arguments: FitArguments, say: Callable[[str], None]
) -> tuple[TrainingData, EvalData | None, RunInfo, tuple[str, ...]]:
    """Returns what a run needs, all of it checked.

    Args:
        arguments: Arguments of `fit`.
        say: Function that prints a sentence.

    Returns:
        The training data, the data to score or None, the steps of the run, and the names of the
        classes, which are empty if they have none.
    """
    check_arguments(arguments)
    ensemble = arguments.ensemble
    data, names = numbered_classes(ensemble.trained_objective, arguments.data, arguments.state)
    data, held_out = with_validation(data, arguments.validation)
    train = training_data(data, arguments.batch_size, ensemble)
    eval_data = None
    if arguments.eval_data is not None or held_out is not None:
        metrics = checked_metrics(arguments.metrics)
        eval_data = eval_data_of(
            arguments.eval_data, held_out, metrics, names, ensemble.batch_specs
        )
    directions = check_parts(arguments, train, eval_data, say)
    info = RunInfo(
        ensemble,
        ensemble.ids.tolist(),
        first_step=0,
        last_step=last_step_of(train, arguments.steps, arguments.epochs),
        batch_size=rows_of(train.batch),
        directions=directions,
        eval_every=eval_steps_of(train, arguments.eval_every),
    )
    return train, eval_data, info, names


def numbered_classes(
    objective: Objective | None, data: Data, state: State | None
) -> tuple[Data, tuple[str, ...]]:
    """Returns training data with class numbers in place of names, and the names of the classes.

    Args:
        objective: Objective of the ensemble; None for a loss function, which takes no names.
        data: Training data of `fit`.
        state: State to start from, whose names are kept; None for a new one.

    Returns:
        The data, and the sorted names; empty if the classes have none.

    Raises:
        UserError: If the objective takes other labels, or other names than the state has.
    """
    names = state.class_names if state is not None else ()
    if isinstance(data, Source):
        of_source = data.spec.class_names or names
        if names and of_source != names:
            raise UserError(
                f"The classes of the source are {listed(of_source)}, and the state was trained on "
                f"{listed(names)}. Give a source of the same classes, or no state."
            )
        return data, ClassNames(of_source) if of_source else ()
    if objective is None or not isinstance(data, Mapping):
        return data, names
    labels, where = data.get(objective.LABELS), f"The data[{objective.LABELS!r}]"
    if not are_names(labels):
        return data, names
    if objective.num_classes is None:
        raise UserError(
            f"{where} has names of classes, and {objective.name} takes real targets. Give numbers, "
            "or an objective of classes, such as dist_ens.losses.categorical."
        )
    names = names or ClassNames(names_in(np.asarray(labels), where))
    if len(names) != objective.num_classes:
        raise UserError(
            f"{where} has {len(names)} classes, {listed(names)}, and the objective "
            f"{objective.name} has {objective.num_classes}. Give the objective {len(names)} "
            "classes, and the network as many outputs."
        )
    return with_class_numbers(data, objective.LABELS, names, "The data"), names
