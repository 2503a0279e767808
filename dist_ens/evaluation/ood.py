"""Detection of examples out of distribution by an ensemble's uncertainty."""

import dataclasses

import jax
import numpy as np
from typing_extensions import override

from dist_ens.data import Spec, Split, convert_inputs
from dist_ens.evaluation.scores import Evaluation, mean_scores, num_draws
from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.types import Score
from dist_ens.metrics import bootstrap_weights, interval, mean_of
from dist_ens.metrics.catalogue import UNCERTAINTIES
from dist_ens.metrics.ranking import detection_scores

_BINS = 40


@dataclasses.dataclass(frozen=True)
class Unlabelled(Split):
    """A split with labels of 0, and with inputs of the type that the run's data has."""

    split: Split
    spec: Spec
    where: str

    @property
    @override
    def in_memory(self) -> bool:
        return self.split.in_memory

    @override
    def __len__(self) -> int:
        return len(self.split)

    @override
    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at some positions; raises a `UserError` if inputs do not fit."""
        inputs = self.split.take(np.ravel(indices))["inputs"]
        inputs = convert_inputs(self.spec, inputs, self.where)
        labels = np.zeros((*np.shape(indices), *self.spec.label_shape), self.spec.label_dtype)
        return {"inputs": inputs.reshape(*np.shape(indices), *inputs.shape[1:]), "labels": labels}


def detection(inside: Evaluation, outside: Evaluation) -> JsonDict:
    """Scores the detection of examples out of distribution by measures of uncertainty.

    `ood` has the `detection_scores` and means of each measure, of the `ensemble`, the `mean_member`
    and the pooled `members`. `ood_interval` has their 95 % intervals, unless there are too many
    rows.
    """
    inside.require_sound()
    outside.require_sound()
    found: JsonDict = {"ood": _detection(inside, outside)}
    if not found["ood"]["ensemble"]:
        raise UserError(
            "The predictions have no uncertainty by which examples could be detected. Train "
            "several members, or with a loss that has a distribution."
        )
    sizes = [each.labels.shape[1] for each in (inside, outside)]
    if draws := min(map(num_draws, sizes)):
        weights = (bootstrap_weights(size, draws, seed) for seed, size in enumerate(sizes))
        found["ood_interval"] = jax.tree.map(
            lambda score: interval(score) if np.ndim(score) else score,
            _detection(inside, outside, *weights),
        )
    return found


def _detection(inside: Evaluation, outside: Evaluation, *drawn: np.ndarray) -> JsonDict:
    """Returns the scores of each measure, in resamples of both sets of rows if given."""
    members_in, members_out = inside.pooled_members, outside.pooled_members
    ids = inside.member_ids[inside.is_pooled].tolist()
    scores: JsonDict = {
        "ensemble": {},
        "mean_member": {},
        "members": [{"member_id": member_id} for member_id in ids],
    }
    for measure, name, sign in UNCERTAINTIES:
        if name in inside.groups:
            pair = inside.groups[name][0], outside.groups[name][0]
            scores["ensemble"][measure] = _scored(*pair, sign, *drawn)
        if name in members_in:
            pairs = zip(members_in[name], members_out[name], strict=True)
            of_members = [_scored(*pair, sign, *drawn) for pair in pairs]
            scores["mean_member"][measure] = mean_scores(of_members)
            for member, scored in zip(scores["members"], of_members, strict=True):
                member[measure] = scored
    return scores


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
