"""How much a score would gain from more members, from the scores of ensembles of fewer."""

from collections.abc import Sequence

import numpy as np

from dist_ens.ground.json_text import JsonDict
from dist_ens.metrics import interval

# A line has two numbers, so fewer sizes than this say nothing about how well it fits.
_FEWEST_SIZES = 4
_T = 2.36  # The 97.5 % quantile of Student's t for 8 random orders of the members.


def gain_of_more(
    sizes: Sequence[int],
    scores: Sequence[float],
    drawn: Sequence[np.ndarray],
    by_order: np.ndarray,
    direction: str | None,
) -> JsonDict | None:
    """Estimates what a score would gain from twice as many members.

    The least squares of `score = a + b / M` over the sizes M give b. An ensemble of twice M members
    is then better by b / (2 M). The expected squared error of independent members follows this
    curve exactly. The NLL of members that differ much falls more slowly, so the gain is then too
    high.

    The interval combines two errors that do not depend on each other: of the examples, whose
    bootstrap gives other gains, and of the members, whose random orders do.

    Args:
        sizes: Numbers of members of the ensembles, ascending; the last one is that of all members.
        scores: Score of each size, the mean over the orders.
        drawn: Scores of each size in resamples of the examples, float64[draws] each.
        by_order: Scores in each random order of the members, float64[orders, sizes].
        direction: Whether a "lower" or a "higher" score is better.

    Returns:
        `more`, the number of further members; `gain`, above 0 if the score becomes better; and
        `low` and `high`, the ends of its 95 % interval. None if there are fewer than 4 sizes, or
        scores that are not finite.

    >>> sizes = [1, 2, 4, 8]
    >>> scores = 0.5 + 0.8 / np.array(sizes)
    >>> drawn = scores[:, None] + np.linspace(-0.1, 0.1, 100)
    >>> found = gain_of_more(sizes, scores, drawn, np.stack([scores] * 8), "lower")
    >>> found["more"], round(found["gain"], 4)  # 0.8 / 16
    (8, 0.05)
    """
    if len(sizes) < _FEWEST_SIZES or len(drawn) < len(sizes) or direction is None:
        return None
    if not all(np.isfinite(each).all() for each in (scores, drawn, by_order)):
        return None
    inverse = 1 / np.asarray(sizes, np.float64)
    centred = inverse - inverse.mean()
    sign = 1 if direction == "lower" else -1
    share = sign * centred / np.square(centred).sum() * inverse[-1] / 2
    low, high = interval(share @ np.asarray(drawn))
    gains = by_order @ share
    # The orders are a sample of the orders of these members, and the members one of all members.
    of_members = _T * gains.std(ddof=1) * np.sqrt(1 / len(gains) + 1 / sizes[-1])
    half = float(np.hypot((high - low) / 2, of_members))
    gain = float(share @ np.asarray(scores))
    return {"more": int(sizes[-1]), "gain": gain, "low": gain - half, "high": gain + half}
