"""The data that `fit` scores: evaluation data, or held-out training examples."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dist_ens.data import PartOfSplit, Source, Split, TreeSplit, parts_of
from dist_ens.data.source import num_held_out
from dist_ens.ensemble import Ensemble
from dist_ens.evaluation import Evaluation, Scores
from dist_ens.evaluation.examples import Examples, examples_of
from dist_ens.evaluation.label_checks import check_classes, check_finite, check_inputs
from dist_ens.evaluation.scoring import BATCH_SIZE, score, score_directions
from dist_ens.ground.errors import UserError
from dist_ens.ground.state import State
from dist_ens.ground.types import Batch, Data, Shapes, Specs
from dist_ens.losses import Objective
from dist_ens.metrics import Metric


@dataclasses.dataclass(frozen=True)
class EvalData:
    """A split, and the functions that score it.

    Attributes:
        evaluate: Function of the ensemble, its state and whether the evaluation is the last one.
        directions: Function of the ensemble and the shapes of a training batch, which returns the
            direction of each score. It raises a `UserError` if the split cannot be scored.
    """

    name: str  # Name of the split in records, such as `test`.
    evaluate: Callable[[Ensemble, State, bool], tuple[Scores, Evaluation | None]]
    directions: Callable[[Ensemble, Shapes], Mapping[str, str | None]]
    split: Split | None = None


def with_validation(data: Data, share: float | None) -> tuple[Data, Examples | None]:
    """Returns the examples to train on, and the held-out ones, the same for every seed, or None."""
    if share is not None and not (isinstance(share, int | float) and 0 < share < 1):
        raise UserError(f"validation is {share!r}. Give a share of the examples in (0, 1).")
    if isinstance(data, Source):
        source = data if share is None else data.with_validation(share)
        return source, None if source.valid is None else Examples(source.valid, source.spec)
    if share is None:
        return data, None
    whole = TreeSplit(data)
    order = np.random.RandomState(0).permutation(len(whole))
    count = num_held_out(share, len(whole))
    valid, train = (np.sort(part) for part in (order[:count], order[count:]))
    return whole.take(train), Examples(PartOfSplit(whole, valid))


def eval_data_of(
    given: Data | EvalData | None,
    held_out: Examples | None,
    metrics: Sequence[Metric],
    names: Sequence[str] = (),
    batch_specs: Specs = "batch",
    batch_size: int = BATCH_SIZE,
) -> EvalData:
    """Returns the data that is scored: `eval_data` of `fit`, or else the held-out examples."""
    if isinstance(given, EvalData):
        return given
    examples = examples_of(held_out if given is None else given, names, batch_specs)

    def evaluate(
        ensemble: Ensemble, state: State, is_last: bool
    ) -> tuple[Scores, Evaluation | None]:
        at_end = {"intervals": is_last, "by_size": is_last}
        return score(ensemble, state, examples, metrics=metrics, batch_size=batch_size, **at_end)

    def directions(ensemble: Ensemble, batch: Batch) -> Mapping[str, str | None]:
        found = score_directions(ensemble, batch, examples, metrics=metrics, batch_size=batch_size)
        if isinstance(examples.split, TreeSplit):
            check_inputs(ensemble.objective, examples.split.tree, "eval_data")
        if ensemble.objective is not None and examples.split.in_memory:
            _check_eval_labels(ensemble.objective, examples.split)
        return found

    return EvalData("valid" if given is None else "test", evaluate, directions, examples.split)


def _check_eval_labels(objective: Objective, split: Split) -> None:
    """Raises a `UserError` if a label is no class or not finite, where its weight is not 0."""
    parts = parts_of(split, (objective.LABELS, objective.WEIGHTS))
    labels, subject = parts[objective.LABELS], "The labels of the evaluation data"
    if objective.WEIGHTS in parts:
        weights = parts[objective.WEIGHTS]
        ones = [1] * (labels.ndim - weights.ndim)
        weights = weights.reshape(*weights.shape[: labels.ndim], *ones)
        labels = np.where(weights == 0, labels.dtype.type(0), labels)
    if objective.num_classes is not None:
        check_classes(labels, objective.num_classes, subject)
    check_finite(objective, labels, subject)
