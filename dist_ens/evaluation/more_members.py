"""How much a score would gain from more members, from the scores of ensembles of fewer."""

from collections.abc import Sequence

import numpy as np

from dist_ens.ground.json_text import JsonDict
from dist_ens.metrics import interval

# A line has two numbers, so fewer sizes than this say nothing about how well it fits.
_FEWEST_SIZES = 4


def gain_of_more(
    sizes: Sequence[int], drawn: np.ndarray, scores: np.ndarray, direction: str | None
) -> JsonDict | None:
    """Estimates what a score would gain from twice as many members.

    The least squares of `score = a + b / M` over the sizes M give b. An ensemble of twice M members
    is then better by b / (2 M). The expected squared error of independent members follows this
    curve exactly. The NLL of members that differ much falls more slowly, so the gain is then too
    high. A single member is left out of the fit if at least 4 other sizes remain.

    Args:
        sizes: Numbers of members of the ensembles, ascending; the last one is that of all members.
        drawn: Scores in resamples of the examples, float64[sizes, draws].
        scores: Scores of the ensembles, float64[sizes].
        direction: Whether a "lower" or a "higher" score is better.

    Returns:
        `more`, the number of further members; `gain`, above 0 if the score becomes better; and
        `low` and `high`, the ends of its 95 % interval over the resamples. The interval does not
        hold what other members would change. None if there are fewer than 4 sizes, or scores that
        are not finite.

    >>> sizes = [1, 2, 4, 8]
    >>> scores = 0.5 + 0.8 / np.array(sizes)
    >>> drawn = scores[:, None] + np.linspace(-0.1, 0.1, 100)
    >>> round(gain_of_more(sizes, drawn, scores, "lower")["gain"], 4)  # 0.8 / 16
    0.05
    """
    if len(sizes) < _FEWEST_SIZES or direction is None:
        return None
    if not (np.isfinite(scores).all() and np.isfinite(drawn).all() and drawn.size):
        return None
    first = 1 if sizes[0] == 1 and len(sizes) > _FEWEST_SIZES else 0
    sizes, drawn, scores = sizes[first:], drawn[first:], scores[first:]
    inverse = 1 / np.asarray(sizes, np.float64)
    centred = inverse - inverse.mean()
    sign = 1 if direction == "lower" else -1
    share = sign * centred / np.square(centred).sum() * inverse[-1] / 2
    low, high = interval(share @ drawn)
    return {"more": int(sizes[-1]), "gain": float(share @ scores), "low": low, "high": high}
