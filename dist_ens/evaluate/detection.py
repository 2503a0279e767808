"""How well an ensemble tells examples of another kind from those like its training data."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dist_ens.data import Split
from dist_ens.errors import UserError
from dist_ens.evaluate.scores import DRAWS, Evaluation
from dist_ens.metrics import bootstrap_weights, interval, mean_of
from dist_ens.metrics.ranking import detection_scores

# What each measure is made of, and whether it is higher, 1, or lower, -1, for what is not known.
_MEASURES = {
    "entropy": ("entropy", 1),
    "max_probability": ("confidence", -1),
    "mutual_information": ("mutual_information", 1),
    "energy": ("energy", 1),
    "variance": ("variance", 1),
    "width": ("width", 1),
}
_BINS = 40


class Unlabelled:
    """A split whose labels are not looked at.

    Args:
        split: The examples.
        label_shape: Of what stands for a label.
        label_dtype: Likewise.
    """

    def __init__(self, split: Split, label_shape: Sequence[int], label_dtype: str) -> None:
        self._split = split
        self._label = np.zeros(tuple(label_shape), label_dtype)

    @property
    def in_memory(self) -> bool:
        """See `Split`."""
        return self._split.in_memory

    def __len__(self) -> int:
        return len(self._split)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See `Split.take`."""
        inputs = self._split.take(indices)["inputs"]
        labels = np.broadcast_to(self._label, (*np.shape(indices), *self._label.shape))
        return {"inputs": inputs, "labels": labels}


def detection(inside: Evaluation, outside: Evaluation) -> dict[str, Any]:
    """How well measures of uncertainty tell examples out of distribution from those within.

    Args:
        inside: Of a test split, of one group of members.
        outside: Of examples that are of another kind; labels do not count.

    Returns:
        `ood`: for `ensemble` and `mean_member`, for each measure (`entropy`, `max_probability`,
        `mutual_information` and `variance` of the ensemble alone, `energy`; of real targets
        `variance` and `width`) its `auroc`, `aupr` and `fpr95`, and its means within and out of
        distribution, `mean_in` and `mean_out` (entropies in nats; of the probability itself, though
        it is the lower the less is known); and `ood_interval`, the 95 % intervals of the
        ensemble's and the mean member's.

    Raises:
        UserError: If predictions are no numbers, or say nothing of their uncertainty.
    """
    if not (inside.is_sound and outside.is_sound):
        raise UserError(
            "Uncertainty is ranked where all of it are numbers. Received: a member that predicts "
            "none. Add --leave_out_broken."
        )
    weights = [
        bootstrap_weights(each.labels.shape[1], DRAWS, seed)
        for seed, each in enumerate((inside, outside))
    ]

    def told(within: np.ndarray, beyond: np.ndarray, sign: int, *drawn: Any) -> dict[str, Any]:
        means = zip(("mean_in", "mean_out"), (within, beyond), drawn or (None, None), strict=True)
        return {
            **{name: mean_of(values, of_draws) for name, values, of_draws in means},
            **detection_scores(sign * within, sign * beyond, *drawn),
        }

    scores: dict[str, Any] = {"ensemble": {}, "mean_member": {}}
    intervals: dict[str, Any] = {"ensemble": {}, "mean_member": {}}
    for measure, (name, sign) in _MEASURES.items():
        for predictor, values_in, values_out in (
            ("ensemble", inside.groups, outside.groups),
            ("mean_member", inside.sound_members, outside.sound_members),
        ):
            if name not in values_in or not len(values_in[name]):
                continue
            pairs = list(zip(values_in[name], values_out[name], strict=True))
            scores[predictor][measure] = _mean([told(*pair, sign) for pair in pairs])
            drawn = _mean([told(*pair, sign, *weights) for pair in pairs])
            intervals[predictor][measure] = {n: interval(draws) for n, draws in drawn.items()}
    if not scores["ensemble"]:
        raise UserError(
            "Uncertainty is an entropy, a variance or a width. Received: predictions that say none "
            "of them. Train several members, or with a loss that has a distribution."
        )
    return {"ood": scores, "ood_interval": intervals}


def histograms(inside: Evaluation, outside: Evaluation) -> dict[str, Any]:
    """Of the ensemble's measures, densities within and out of distribution.

    Returns:
        For each measure `edges`, and the densities `in` and `out`, a number for each bin.
    """
    drawn = {}
    for measure, (name, _) in _MEASURES.items():
        if name in inside.groups:
            within, beyond = inside.groups[name][0], outside.groups[name][0]
            both = np.concatenate([within, beyond])
            edges = np.histogram_bin_edges(both[np.isfinite(both)], _BINS)
            drawn[measure] = {
                "edges": edges.tolist(),
                "in": np.histogram(within, edges, density=True)[0].tolist(),
                "out": np.histogram(beyond, edges, density=True)[0].tolist(),
            }
    return drawn


def _mean(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    means = {name: np.mean([each[name] for each in scores], axis=0) for name in scores[0]}
    return {name: float(mean) if np.ndim(mean) == 0 else mean for name, mean in means.items()}
