"""Records of metrics. A record is a flat dict of numbers for one step."""

from collections.abc import Mapping, Sequence

import numpy as np

from dist_ens.ensemble.failures import FAILED_UPDATES, IS_FROZEN
from dist_ens.evaluation import Scores


def score_record(
    split: str, ensemble: Mapping[str, float], members: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Returns the record of an evaluation, given the scores of the ensemble and of each member.

    >>> score_record("test", {"nll": 0.1}, [{"member_id": 3, "nll": 0.2}])
    {'test/nll': 0.1, 'test/nll/member_03': 0.2}
    """
    record = {f"{split}/{name}": value for name, value in ensemble.items()}
    for member in members:
        record |= {
            f"{split}/{name}/member_{int(member['member_id']):02d}": value
            for name, value in member.items()
            if name != "member_id"
        }
    return record


def finite_scores(scores: Scores, member_score: str | None) -> dict[str, float]:
    """Returns the scores of the ensemble, or of its mean member, that are finite numbers.

    The score that `member_score` names is returned of each member, too.
    """
    values = dict(scores.ensemble or scores.mean_member)
    if member_score is not None:
        values |= {
            f"{member_score}/member_{int(member['member_id']):02d}": member[member_score]
            for member in scores.members
            if member_score in member
        }
    return {name: float(value) for name, value in values.items() if np.isfinite(value)}


def training_record(
    member_ids: Sequence[int], metrics: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Returns the means of metrics, float32[steps, members], over some steps of training.

    If updates are checked, `failed_updates` and `is_frozen` are recorded at the last step. The
    means then leave out values that are not finite, and the mean over members the frozen ones.
    """
    counts = {name: metrics[name][-1] for name in (FAILED_UPDATES, IS_FROZEN) if name in metrics}
    rest = {name: values for name, values in metrics.items() if name not in counts}
    if counts:
        means = {name: _finite_mean(values, axis=0) for name, values in rest.items()}
        active = counts[IS_FROZEN] == 0
        overall = {name: float(_finite_mean(v[active])) for name, v in means.items()}
    else:
        means = {name: values.mean(axis=0) for name, values in rest.items()}
        overall = {name: float(v.mean()) for name, v in means.items()}
    members = [
        {"member_id": member_id, **{name: float(v[k]) for name, v in (means | counts).items()}}
        for k, member_id in enumerate(member_ids)
    ]
    return score_record(
        "train", overall | {name: float(v.sum()) for name, v in counts.items()}, members
    )


def shown_loss(metrics: Mapping[str, np.ndarray]) -> float:
    """Returns the mean loss at the last of some steps, of the members that are not frozen."""
    losses = metrics["loss"][-1]
    if IS_FROZEN in metrics:
        return float(_finite_mean(losses[metrics[IS_FROZEN][-1] == 0]))
    return float(losses.mean())


def _finite_mean(values: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Returns the mean of the finite values along an axis; NaN if there are none."""
    is_finite = np.isfinite(values)
    total = np.where(is_finite, values, 0).sum(axis=axis, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        return total / is_finite.sum(axis=axis)
