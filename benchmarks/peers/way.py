"""Types and numbers that all ways of training an ensemble share."""

import statistics
from collections.abc import Callable, Sequence

from benchmarks.workloads import Workload
from dist_ens.execution.timing import Candidate, step_secs_of_turns


class Absent(Exception):
    """An error of a way that does not support a workload; its message is the reason."""


MakeWay = Callable[[Workload], Candidate]


def fastest(ways: Sequence[Candidate]) -> Candidate:
    """Returns the way with the lowest median time over three interleaved rounds."""
    # The shortest turn would choose by chance between ways that are close.
    medians = [statistics.median(of_way) for of_way in step_secs_of_turns(ways, 3)]
    return ways[medians.index(min(medians))]


def spread(values: Sequence[float]) -> float:
    """Returns the range of some values, as a fraction of their median.

    >>> spread([2.0, 4.0, 5.0])
    0.75
    """
    return (max(values) - min(values)) / statistics.median(values)
