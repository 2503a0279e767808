"""Timing of the ways of a workload, and the table of the results."""

import importlib.util
import statistics
from typing import Any

from rich.table import Table

from benchmarks.peers.dist_ens_way import DistEns
from benchmarks.peers.flax_pmap import FlaxPmap
from benchmarks.peers.flops import MATMUL_FLOPS, Matmul, model_flops
from benchmarks.peers.jax_loop import JaxLoop
from benchmarks.peers.jax_scan import JaxScan
from benchmarks.peers.jax_vmap import JaxVmap
from benchmarks.peers.way import Absent, MakeWay, spread
from benchmarks.workloads import Workload
from dist_ens.execution.timing import Candidate, step_ms_of_turns

_DIST_ENS, _MATMUL = "dist_ens", "matmul"


def _require_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise Absent("PyTorch is not installed. Install it with pip install 'dist-ens[peers]'.")


def _torch_loop(workload: Workload) -> Candidate:
    _require_torch()
    from benchmarks.peers.torch_loop import TorchLoop

    return TorchLoop(workload)


def _torch_func(workload: Workload) -> Candidate:
    _require_torch()
    from benchmarks.peers.torch_func import TorchFunc

    return TorchFunc(workload)


WAYS: dict[str, MakeWay] = {
    _DIST_ENS: DistEns,
    "jax_loop": JaxLoop,
    "jax_scan": JaxScan,
    "jax_vmap": JaxVmap,
    "flax_pmap": FlaxPmap,
    "torch_loop": _torch_loop,
    "torch_func": _torch_func,
}


def compare(
    workload: Workload, makers: dict[str, MakeWay], num_turns: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """Times the ways of a workload.

    Args:
        workload: Workload to train.
        makers: Functions that make the ways, by name.
        num_turns: Number of rounds.

    Returns:
        The workload's entry in the file of results, and the reason of each way that does not
        support it, by its name.
    """
    ways: dict[str, Candidate] = {}
    reasons = {}
    for name, make in makers.items():
        try:
            ways[name] = make(workload)
        except Absent as reason:
            reasons[name] = str(reason)
    if workload.name == "W3":
        ways[_MATMUL] = Matmul()
    turns = step_ms_of_turns(ways, num_turns)
    medians = {name: statistics.median(ms) for name, ms in turns.items()}
    matmul_ms = medians.pop(_MATMUL, None)
    dist_ens_ms = medians.pop(_DIST_ENS, None)
    result = {
        "name": workload.name,
        "dist_ens_ms": dist_ens_ms,
        "peers_ms": medians,
        "execution": getattr(ways.get(_DIST_ENS), "execution", None),
        "spread": {name: spread(ms) for name, ms in turns.items()},
    }
    if matmul_ms is not None:
        result["matmul_gflops"] = MATMUL_FLOPS / matmul_ms / 1e6
    if matmul_ms is not None and dist_ens_ms is not None:
        share = model_flops(workload) / dist_ens_ms / (MATMUL_FLOPS / matmul_ms)
        result["model_flops_share"] = share
    return result, reasons


def table_of(title: str, result: dict[str, Any]) -> Table:
    """Returns the table of a workload's results for the terminal, the fastest way first.

    Args:
        title: Description of the workload.
        result: Entry of the workload, from `compare`.
    """
    table = Table(title=f"{result['name']}: {title}", title_justify="left")
    table.add_column("")
    for column in ("ms per ensemble step", "spread", "x dist_ens"):
        table.add_column(column, justify="right")
    dist_ens_ms = result["dist_ens_ms"]
    step_ms = dict(result["peers_ms"])
    if dist_ens_ms is not None:
        step_ms[_DIST_ENS] = dist_ens_ms
    for name in sorted(step_ms, key=step_ms.__getitem__):
        ours = name == _DIST_ENS
        table.add_row(
            f"{name} ({result['execution']})" if ours else name,
            f"{step_ms[name]:.3g}",
            f"{result['spread'][name]:.0%}",
            f"{step_ms[name] / dist_ens_ms:.2f}" if dist_ens_ms else "",
            style="bold" if ours else None,
        )
    if "model_flops_share" in result:
        table.caption = (
            f"dist_ens: {result['model_flops_share']:.0%} of a 2048 x 2048 matrix product's "
            f"{result['matmul_gflops']:.0f} GFLOP/s"
        )
    return table
