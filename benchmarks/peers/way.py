"""What every way of training an ensemble has in common."""

from collections.abc import Callable

from benchmarks.workloads import Workload
from dist_ens.execution.timing import Way


class Absent(Exception):
    """A way that cannot do a workload; its message is the reason, as a sentence."""


MakeWay = Callable[[Workload], Way]
