"""dist_ens and its peers side by side, in one run.

    python -m benchmarks.peers --workloads=W1,W2,W3,W4,W4x16,W5,W6 --json=FILE

Each way of a workload is made ready, then all take turns in one process, and a way's figure is the
median of its turns. Data are included: every way draws a shuffled batch per step from the whole
set, and pays for it. `benchmarks/workloads.py` says what is trained, `benchmarks/peers/` holds a
file per way; `pip install 'dist-ens[peers]'` brings what they need.
"""

from absl import flags
from rich.console import Console

from benchmarks.peers.compare import WAYS, compare, table_of
from benchmarks.workloads import WORKLOADS
from dist_ens.report import write_scores
from launch import cli
from launch.path_flags import define_path

_WORKLOADS = flags.DEFINE_list("workloads", list(WORKLOADS), "Which to run.")
_WAYS = flags.DEFINE_list("ways", list(WAYS), "Which to time.")
_TURNS = flags.DEFINE_integer("turns", 5, "Turns of each way.", lower_bound=1)
_JSON = define_path("json", None, "File for the figures.")


def main() -> None:
    """A table per workload on the screen, and the file."""
    workloads, ways = cli.names(_WORKLOADS, WORKLOADS), cli.names(_WAYS, WAYS)
    cli.check_outputs(_JSON)
    console, results = Console(highlight=False, markup=False), []
    for name in workloads:
        workload = WORKLOADS[name]()
        result, reasons = compare(workload, {way: WAYS[way] for way in ways}, _TURNS.value)
        results.append(result)
        console.print(table_of(workload.title, result))
        for way, reason in reasons.items():
            console.print(f"{way} is absent: {reason}", soft_wrap=True)
        if _JSON.value:
            cli.write_file(_JSON, lambda path: write_scores(path, {"workloads": results}))


if __name__ == "__main__":
    cli.run(main)
