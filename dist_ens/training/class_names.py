"""Names of classes in the training labels of `fit`."""

from collections.abc import Mapping

import numpy as np

from dist_ens.data import Source
from dist_ens.data.class_names import are_names, listed, names_in, with_class_numbers
from dist_ens.errors import UserError
from dist_ens.losses import Objective
from dist_ens.state import ClassNames, State
from dist_ens.types import Data


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
