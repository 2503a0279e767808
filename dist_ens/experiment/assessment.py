"""The questions that an assessment of a finished run is asked, and its answers."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from dist_ens.evaluation import Scores
from dist_ens.ground.json_text import JsonDict
from dist_ens.metrics.catalogue import headlines, label_of

CALIBRATIONS = ("temperature", "vector", "isotonic", "variance")
CONFORMAL = ("lac", "aps", "raps", "cqr", "cv+", "jackknife+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """The options of an assessment; those of `dist-ens evaluate` describe them."""

    ood: str | None = None
    shift: bool = False
    calibration: str | None = None
    conformal: str | None = None
    level: float = 0.9
    out_of_bag: bool = False
    leave_out_broken: bool = False

    @property
    def asks_more(self) -> bool:
        """Whether anything is asked beside the scores of the test split."""
        return bool(self.ood or self.shift or self.calibration or self.conformal or self.out_of_bag)

    @property
    def needs_own_members(self) -> bool:
        """Whether the examples must be known that each member left out of its training."""
        return self.out_of_bag or self.conformal in ("cv+", "jackknife+")


@dataclasses.dataclass(frozen=True)
class Assessment:
    """The results of an assessment.

    `extras` are by their names in the JSON file, `broken` are ids, and the run keeps `answers` by
    question, such as `calibration=temperature`.
    """

    scores: Scores
    extras: JsonDict
    curves: JsonDict
    pictures: Sequence[np.ndarray]
    broken: Sequence[int] = ()
    answers: JsonDict = dataclasses.field(default_factory=dict)

    def scores_to_dict(self) -> JsonDict:
        """Returns the scores of the test split as plain data that JSON can hold."""
        return {
            "groups": len(self.scores.groups),
            **self.scores.to_dict(),
            "mean_member": self.scores.mean_member,
            "broken_members": list(self.broken),
            "left_out_members": list(self.scores.left_out),
        }

    def to_dict(self) -> JsonDict:
        """Returns the scores and the results of the options as plain data that JSON can hold."""
        return {**self.scores_to_dict(), **self.extras}

    def sentences(self) -> list[str]:
        """Returns the results as sentences, without the scores."""
        extras, told = self.extras, []
        if self.broken:
            told.append(
                told_of_broken(
                    self.broken,
                    left_out={*self.broken} <= {*self.scores.left_out},
                    num_members=len(self.scores.members),
                    num_groups=len(self.scores.groups),
                )
            )
        if self.scores.intervals is None:
            told.append("The test split has too many rows to be resampled: there are no intervals.")
        if "ood" in extras:
            listed = ", ".join(
                f"{name} {measures['auroc']:.4f}"
                for name, measures in extras["ood"]["ensemble"].items()
            )
            told.append(f"AUROC of the ensemble, out against in distribution: {listed}.")
        told += _of_shifts(extras.get("shift", {}))
        if "calibrated" in extras:
            after, before = extras["calibrated"], self.scores.ensemble
            told += [
                f"After {after['method']} calibration the ensemble's {metric.label} is "
                f"{after['test'][metric.name]:.4f} ({before[metric.name]:.4f} before)."
                for metric in headlines(after["test"])
                if metric.unit == "nats"
            ]
            told += after["warnings"]
        if "conformal" in extras:
            found = extras["conformal"]
            size = (
                f"sets of {found['mean_set_size']:.3g} classes"
                if "mean_set_size" in found
                else f"intervals of width {found['mean_width']:.4g}"
            )
            told.append(
                f"Conformal {found['method']} at {found['level']:g}: {size} on average, which hold "
                f"{found['coverage']:.4f} of the test split."
            )
        if "out_of_bag" in extras:
            found = extras["out_of_bag"]
            scored = ", ".join(
                f"{metric.name} {found['scores'][metric.name]:.4f}"
                for metric in headlines(found["scores"])[:2]
            )
            told.append(
                f"Training examples scored by members that left them out: {scored} "
                f"({found['not_scored']:,} examples no member left out)."
            )
        return told


def _of_shifts(shifts: Mapping[str, Sequence[JsonDict]]) -> list[str]:
    """Returns a sentence about the scores under each shift."""
    told = []
    for shift, strengths in shifts.items():
        for metric in headlines(strengths[0]["test"])[:1]:
            listed = ", ".join(
                f"{at['test'][metric.name]:.4f} at {at['strength']:g}" for at in strengths
            )
            told.append(f"Under {label_of(shift)} the ensemble's {metric.name} is {listed}.")
    return told


def told_of_broken(
    broken: Sequence[int], *, left_out: bool, num_members: int, num_groups: int = 1
) -> str:
    """Returns a sentence about members that predict NaN, and what to do."""
    told = f"Members {list(broken)} predict NaN"
    if left_out:
        return f"{told}; they were left out of the ensemble."
    train_again = "Train again with a lower --config.optimizer.learning_rate."
    if len(broken) == num_members:
        return f"{told}: that is all of them. {train_again}"
    if num_groups > 1:
        return f"{told}, so the ensemble of their group does too. {train_again}"
    return f"{told}, so the ensemble does too. Pass --leave_out_broken to average the others."
