"""Benchmark of dist_ens against other ways to train the same ensembles.

    python -m benchmarks.peers --workloads=W1,W2,W3,W4,W4x16,W5,W6 --json=FILE

All ways of a workload are prepared first, and then timed in interleaved rounds in one process. The
result of a way is its median over the rounds. The times include the data: every way draws a
shuffled batch from the whole set in each step. `benchmarks/workloads.py` defines the workloads, and
`benchmarks/peers/` has a file for each way. `pip install 'dist-ens[peers]'` installs the packages
that they need.
"""

from absl import flags
from rich.console import Console

from benchmarks.peers.compare import WAYS, compare, table_of
from benchmarks.workloads import WORKLOADS
from dist_ens.report.files import to_json
from launch import cli
from launch.path_flags import define_file

_WORKLOADS = flags.DEFINE_list("workloads", list(WORKLOADS), "Workloads to run.")
_WAYS = flags.DEFINE_list("ways", list(WAYS), "Ways to time.")
_TURNS = flags.DEFINE_integer("turns", 5, "Number of rounds.", lower_bound=1)
_JSON = define_file("json", None, "JSON file to write the results to.")


def main() -> None:
    """Prints a table for each workload, and writes the file."""
    workloads, ways = cli.names(_WORKLOADS, WORKLOADS), cli.names(_WAYS, WAYS)
    cli.check_outputs(_JSON)
    console, results = Console(highlight=False, markup=False), []
    for name in workloads:
        workload = WORKLOADS[name]()
        result, reasons = compare(workload, {way: WAYS[way] for way in ways}, _TURNS.value)
        results.append(result)
        console.print(table_of(workload.title, result))
        for way, reason in reasons.items():
            console.print(f"{way} was not timed: {reason}", soft_wrap=True)
        if _JSON.value:
            cli.write_file(_JSON, to_json({"workloads": results}, indent=2) + "\n")


if __name__ == "__main__":
    cli.run(main)
