"""What every way of training an ensemble has in common."""

from collections.abc import Callable
from typing import Protocol

from benchmarks.workloads import Workload


class Way(Protocol):
    """A way to train an ensemble. What it compiles it does when it first runs."""

    def run(self, num_steps: int) -> None:
        """Trains every member for some steps more, and waits for the last."""


class Absent(Exception):
    """A way that cannot do a workload; its message is the reason, as a sentence."""


MakeWay = Callable[[Workload], Way]
