"""Scores and predictions of an ensemble and of every member."""

from dist_ens.evaluation.curves import curves_of, pictures_of
from dist_ens.evaluation.evaluator import Evaluator, broken_positions
from dist_ens.evaluation.scores import Evaluation, Scores, scores_of_means
from dist_ens.evaluation.scoring import evaluate

__all__ = [
    "Evaluation",
    "Evaluator",
    "Scores",
    "broken_positions",
    "curves_of",
    "evaluate",
    "pictures_of",
    "scores_of_means",
]
