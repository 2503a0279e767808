"""Types that all ways of training an ensemble share."""

from collections.abc import Callable

from benchmarks.workloads import Workload
from dist_ens.execution.timing import Way


class Absent(Exception):
    """An error of a way that does not support a workload; its message is the reason."""


MakeWay = Callable[[Workload], Way]
