"""Benchmark of the choice of `execution="auto"` against every execution that it can choose.

    python -m benchmarks.auto --workloads=W1,W2,W3,W4,W5,W6
    python -m benchmarks.auto --workloads=W3 --executions=map,unroll,map+single --turns=21

All executions are timed in interleaved rounds, in one process. Two ratios of median times per step
are printed. The first is the best fixed execution over the run that chose. The second is the best
fixed execution over the fixed execution that was chosen. The chosen execution runs the same program
in both, so they differ only by the state of the machine.
"""

import statistics

from absl import flags
from rich.console import Console

from benchmarks.peers.dist_ens_way import DistEns, fixed_executions
from benchmarks.peers.way import spread
from benchmarks.workloads import WORKLOADS
from dist_ens.execution.timing import Candidate, step_ms_of_turns
from launch import cli

_WORKLOADS = flags.DEFINE_list("workloads", list(WORKLOADS), "Workloads to run.")
_EXECUTIONS = flags.DEFINE_list(
    "executions", [], "Executions to time; all candidates if not given."
)
_TURNS = flags.DEFINE_integer("turns", 5, "Number of rounds.", lower_bound=1)


def main() -> None:
    """Prints a line for each execution, then the ratios."""
    console = Console(highlight=False, markup=False)
    for name in cli.names(_WORKLOADS, WORKLOADS):
        workload = WORKLOADS[name]()
        chosen = DistEns(workload)
        fixed = fixed_executions(workload)
        if _EXECUTIONS.value:
            fixed = {n: fixed.get(n) or DistEns(workload, n) for n in _EXECUTIONS.value}
        timed: dict[str, Candidate] = {"auto": chosen, **fixed}
        turns = step_ms_of_turns(timed, _TURNS.value)
        for execution, ms in turns.items():
            label = f"auto ({chosen.execution})" if execution == "auto" else execution
            console.print(f"{name} {label}: {statistics.median(ms):.3g} ms ({spread(ms):.0%})")
        medians = {execution: statistics.median(ms) for execution, ms in turns.items()}
        of_auto = medians.pop("auto")
        best = min(medians, key=medians.__getitem__)
        console.print(
            f"{name}: the best fixed, {best}, over auto: {medians[best] / of_auto:.2f}"
            + (
                f"; over {chosen.execution}, which it chose: "
                f"{medians[best] / medians[chosen.execution]:.2f}"
                if chosen.execution in medians
                else ""
            ),
            soft_wrap=True,
        )


if __name__ == "__main__":
    cli.run(main)
