"""Detection of examples out of distribution by an ensemble's uncertainty."""

from collections.abc import Mapping, Sequence

import numpy as np

from dist_ens.data import Spec, Split, convert_inputs
from dist_ens.evaluation.row_scores import Evaluation, num_draws
from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.types import Score
from dist_ens.metrics import bootstrap_weights, interval, mean_of
from dist_ens.metrics.catalogue import UNCERTAINTIES
from dist_ens.metrics.ranking import detection_scores

_BINS = 40


class Unlabelled:
    """A split with labels of 0, and with inputs of the type that the run's data has."""

    def __init__(self, split: Split, spec: Spec, where: str) -> None:
        self._split, self._spec, self._where = split, spec, where
        self._label = np.zeros(spec.label_shape, spec.label_dtype)

    @property
    def in_memory(self) -> bool:
        """Whether the examples are held in memory."""
        return self._split.in_memory

    def __len__(self) -> int:
        return len(self._split)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at some positions; raises a `UserError` if inputs do not fit."""
        inputs = self._split.take(np.ravel(indices))["inputs"]
        if inputs.shape[1:] != self._spec.input_shape:
            raise UserError(
                f"{self._where} has examples of shape {list(inputs.shape[1:])}, and the members "
                f"take {list(self._spec.input_shape)}. Choose others."
            )
        inputs = convert_inputs(self._spec, inputs, self._where)
        labels = np.broadcast_to(self._label, (*np.shape(indices), *self._label.shape))
        return {"inputs": inputs.reshape(*np.shape(indices), *inputs.shape[1:]), "labels": labels}


def detection(inside: Evaluation, outside: Evaluation) -> JsonDict:
    """Scores the detection of examples out of distribution by measures of uncertainty.

    `ood` has the `detection_scores` and means of each measure, of the `ensemble`, the `mean_member`
    and the pooled `members`. `ood_interval` has their 95 % intervals, unless there are too many
    rows.
    """
    inside.require_sound()
    outside.require_sound()
    weights = _drawn_weights(inside.labels.shape[1], outside.labels.shape[1])
    ids = inside.member_ids[inside.is_pooled].tolist()
    scores: JsonDict = {"ensemble": {}, "mean_member": {}}
    intervals: JsonDict = {"ensemble": {}, "mean_member": {}}
    for each in (scores, intervals):
        each["members"] = [{"member_id": member_id} for member_id in ids]
    members_in, members_out = inside.pooled_members, outside.pooled_members
    for measure, name, sign in UNCERTAINTIES:
        if name in inside.groups:
            pair = inside.groups[name][0], outside.groups[name][0]
            scores["ensemble"][measure] = _scored(*pair, sign)
            intervals["ensemble"][measure] = _intervals(_scored(*pair, sign, *weights))
        if name in members_in:
            pairs = [*zip(members_in[name], members_out[name], strict=True)]
            of_members = [_scored(*pair, sign) for pair in pairs]
            drawn = [_scored(*pair, sign, *weights) for pair in pairs]
            for position in range(len(ids)):
                scores["members"][position][measure] = of_members[position]
                intervals["members"][position][measure] = _intervals(drawn[position])
            scores["mean_member"][measure] = _mean(of_members)
            intervals["mean_member"][measure] = _intervals(_mean(drawn))
    if not scores["ensemble"]:
        raise UserError(
            "The predictions have no uncertainty by which examples could be detected. Train "
            "several members, or with a loss that has a distribution."
        )
    return {"ood": scores, "ood_interval": intervals} if weights else {"ood": scores}


def histograms(inside: Evaluation, outside: Evaluation) -> JsonDict:
    """Returns the densities of the ensemble's measures in and out of distribution, by bin."""
    drawn = {}
    for measure, name, _ in UNCERTAINTIES:
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


def _drawn_weights(*sizes: int) -> list[np.ndarray]:
    """Returns the weights of resamples of sets of rows; none if there are too many rows."""
    draws = min(map(num_draws, sizes))
    return [bootstrap_weights(size, draws, seed) for seed, size in enumerate(sizes) if draws]


def _scored(
    within: np.ndarray, beyond: np.ndarray, sign: int, *drawn: np.ndarray
) -> dict[str, Score]:
    """Returns the scores of a measure, whose `sign` is -1 if it is lower out of distribution."""
    of_in, of_out = drawn or (None, None)
    return {
        "mean_in": mean_of(within, of_in),
        "mean_out": mean_of(beyond, of_out),
        **detection_scores(sign * within, sign * beyond, of_in, of_out),
    }


def _intervals(drawn: Mapping[str, Score]) -> dict[str, tuple[float, float]]:
    return {name: interval(draws) for name, draws in drawn.items() if np.ndim(draws)}


def _mean(scores: Sequence[Mapping[str, Score]]) -> dict[str, Score]:
    means = {name: np.mean([each[name] for each in scores], axis=0) for name in scores[0]}
    return {name: float(mean) if np.ndim(mean) == 0 else mean for name, mean in means.items()}
