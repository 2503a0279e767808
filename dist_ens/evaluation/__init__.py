"""A state and examples in; scores and predictions of the ensemble and of every member out."""

from dist_ens.evaluation.curves import curves_of, pictures_of
from dist_ens.evaluation.evaluator import Evaluator, broken_positions
from dist_ens.evaluation.kinds import Kind, kind_of
from dist_ens.evaluation.scores import Evaluation, Scores

__all__ = [
    "Evaluation",
    "Evaluator",
    "Kind",
    "Scores",
    "broken_positions",
    "curves_of",
    "kind_of",
    "pictures_of",
]
