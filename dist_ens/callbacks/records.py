"""Records of metrics. A record is a flat dict of numbers for one step."""

from collections.abc import Mapping, Sequence

import numpy as np


def score_record(
    split: str, ensemble: Mapping[str, float], members: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Returns the record of an evaluation.

    Args:
        split: Name of the split, such as `test`.
        ensemble: Scores of the ensemble by name.
        members: Scores of each member by name, with its `member_id`.

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


def training_record(
    member_ids: Sequence[int], metrics: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Returns the record of some steps of training.

    Args:
        member_ids: Ids of the members.
        metrics: Metrics by name, float32[steps, members]; their means over the steps are recorded.
    """
    means = {name: values.mean(axis=0) for name, values in metrics.items()}
    members = [
        {"member_id": member_id, **{name: float(v[k]) for name, v in means.items()}}
        for k, member_id in enumerate(member_ids)
    ]
    return score_record("train", {name: float(v.mean()) for name, v in means.items()}, members)
