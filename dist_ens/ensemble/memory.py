"""Programs for which a device has too little memory: their explanation, and how to avoid them."""

import contextlib
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from dist_ens.ground.errors import RunError, counted
from dist_ens.ground.types import PyTree
from dist_ens.layout import Layout
from dist_ens.processes import cluster

if TYPE_CHECKING:
    from dist_ens.ensemble.ensemble import Ensemble

# XLA words it differently when it compiles, when it allocates, and on each platform.
_ASKED = re.compile(r"allocat\w* (\d+) bytes|(?:Used|Needs?) ([\d.]+ ?[KMGT]i?B?)\b")


@contextlib.contextmanager
def explained_memory(ensemble: "Ensemble") -> Iterator[None]:
    """Turns an error of XLA about memory into a `RunError` that says what lowers the need."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        found, free = _ASKED.search(str(error)), ensemble.layout.free_bytes()
        asked = "more memory than there is"
        if found is not None:
            asked = f"{int(found[1]) / 2**20:,.0f} MiB at once" if found[1] else found[2]
        has = f", and a device has {free / 2**20:,.0f} MiB free" if math.isfinite(free) else ""
        count = ensemble.layout.members_per_device // ensemble.waves
        raise RunError(
            f"The devices have too little memory for an update: XLA asked for {asked}{has}. A "
            f"device takes {counted(count, 'member')} at once. These need less memory: a larger "
            f"ensemble axis or more devices, more waves (now {ensemble.waves}), more microbatches "
            f"(now {ensemble.microbatches}), a smaller batch."
        ) from error


def compiled_if_small(
    program: jax.stages.Wrapped, layout: Layout, *args: PyTree, more_bytes: int = 0
) -> jax.stages.Compiled | None:
    """Returns a compiled program, or None if it needs more than half of a device's free memory.

    `more_bytes` are those of arguments that are not on the device yet.
    """
    compiled, needed = None, math.inf
    try:
        compiled = program.lower(*args).compile()
        memory: Any = compiled.memory_analysis()
        needed = memory.temp_size_in_bytes + memory.output_size_in_bytes + more_bytes
    except jax.errors.JaxRuntimeError as error:
        # The compiler of an accelerator refuses a program that is too large for it.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    return None if cluster.any_host(needed > layout.free_bytes() / 2) else compiled
