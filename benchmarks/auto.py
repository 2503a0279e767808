"""What `execution="auto"` chooses, beside every execution that it could have chosen.

    python -m benchmarks.auto --workloads=W1,W2,W3,W4,W5,W6

All take turns in one process. The figure is the ratio of medians: the best fixed execution's
milliseconds per step over those of the one chosen.
"""

import statistics
from functools import partial

import jax
from absl import flags
from rich.console import Console

from benchmarks.peers.dist_ens_way import DistEns, layout_of, make_ensemble
from benchmarks.workloads import WORKLOADS, Workload
from dist_ens import cluster
from dist_ens.ensemble import Drawn
from dist_ens.ensemble.choice import candidates
from dist_ens.turns import Way, spread, step_ms_of_turns
from launch import front

_WORKLOADS = flags.DEFINE_list("workloads", list(WORKLOADS), "Which to run.")
_TURNS = flags.DEFINE_integer("turns", 5, "Turns of each.", lower_bound=1)


def main() -> None:
    """An execution a line, then the ratio."""
    console = Console(highlight=False, markup=False)
    for name in _WORKLOADS.value:
        workload = WORKLOADS[name]()
        chosen = DistEns(workload)
        ways: dict[str, Way] = {"auto": chosen, **fixed_ways(workload)}
        turns = step_ms_of_turns(ways, _TURNS.value)
        for way, ms in turns.items():
            label = f"auto ({chosen.execution})" if way == "auto" else way
            console.print(f"{name} {label}: {statistics.median(ms):.3g} ms ({spread(ms):.0%})")
        medians = {way: statistics.median(ms) for way, ms in turns.items()}
        of_auto = medians.pop("auto")
        best = min(medians, key=medians.__getitem__)
        console.print(f"{name}: the best fixed, {best}, over auto: {medians[best] / of_auto:.2f}")


def fixed_ways(workload: Workload) -> dict[str, Way]:
    """Every candidate, on all devices and, where those are the cores of a CPU, on one."""
    layout = layout_of(workload)
    ensemble = make_ensemble(workload, layout, "vmap")
    steps, members = workload.steps_per_call, workload.num_members
    indices = (members, steps) if workload.own_batches else (steps,)
    split = jax.eval_shape(lambda: {"inputs": workload.inputs, "labels": workload.labels})
    batches = Drawn(split, jax.ShapeDtypeStruct((*indices, workload.batch_size), "int32"))
    state = ensemble.abstract_state(workload.batch_of_inputs)
    names = candidates(ensemble, ensemble.traced_update(state, batches), steps)
    make = partial(DistEns, workload)
    ways: dict[str, Way] = {name: make(name, layout) for name in names}
    if cluster.cores_are_devices() and layout.mesh.size > 1:
        alone = layout.on_one_device()
        ways |= {f"{name} on one device": make(name, alone) for name in names}
    return ways


if __name__ == "__main__":
    front.run(main)
