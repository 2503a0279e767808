"""Ids of the predictors of an ensemble: its members, or the heads of members that have several."""

import math
from collections.abc import Sequence

import numpy as np

from dist_ens.ground.json_text import JsonDict


def predictor_ids(member_ids: np.ndarray, heads: int | None) -> np.ndarray:
    """Returns the ids of the predictors, in the order of their outputs.

    Those of heads are texts, the id of the member and the number of the head.

    >>> predictor_ids(np.array([0, 3]), None).tolist()
    [0, 3]
    >>> predictor_ids(np.array([0, 3]), 2).tolist()
    ['0.0', '0.1', '3.0', '3.1']
    """
    if heads is None:
        return member_ids
    return np.array([f"{each}.{head}" for each in member_ids.tolist() for head in range(heads)])


def member_of(predictor_id: int | str) -> int:
    """Returns the id of the member that a predictor is, or that a head belongs to.

    >>> member_of(3), member_of("3.1")
    (3, 3)
    """
    return int(str(predictor_id).partition(".")[0])


def scores_by_member(members: Sequence[JsonDict], name: str) -> dict[int, float]:
    """Returns a score of each member by its id, of heads their mean; NaN where it is absent.

    >>> heads = [{"member_id": "3.0", "nll": 1.0}, {"member_id": "3.1", "nll": 2.0}]
    >>> scores_by_member(heads, "nll")
    {3: 1.5}
    """
    found: dict[int, list[float]] = {}
    for each in members:
        found.setdefault(member_of(each["member_id"]), []).append(each.get(name, math.nan))
    return {member_id: float(np.mean(values)) for member_id, values in found.items()}


def padded(predictor_id: int | str) -> str:
    """Returns an id as it is part of the name of a metric.

    >>> padded(3), padded("3.1")
    ('03', '03.1')
    """
    member, dot, head = str(predictor_id).partition(".")
    return f"{int(member):02d}{dot}{head}"
