"""The explanation of an update for which a device has too little memory."""

import contextlib
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import jax

from dist_ens.errors import RunError, counted

if TYPE_CHECKING:
    from dist_ens.ensemble.ensemble import Ensemble

# XLA words it differently when it compiles, when it allocates, and on each platform.
_ASKED = re.compile(r"allocat\w* (\d+) bytes|(?:Used|Needs?) ([\d.]+ ?[KMGT]i?B?)\b")


@contextlib.contextmanager
def explained_memory(ensemble: "Ensemble") -> Iterator[None]:
    """Turns an error of XLA about memory into a `RunError` that says what lowers the need.

    Args:
        ensemble: Ensemble that is initialised or updated.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise RunError(_explanation(ensemble, str(error))) from error


def _explanation(ensemble: "Ensemble", error: str) -> str:
    """Returns the sentences about an error of XLA that a device has too little memory."""
    layout, found = ensemble.layout, _ASKED.search(error)
    asked = "more memory than there is"
    if found is not None:
        asked = f"{int(found[1]) / 2**20:,.0f} MiB at once" if found[1] else found[2]
    free = layout.free_bytes()
    has = f", and a device has {free / 2**20:,.0f} MiB free" if math.isfinite(free) else ""
    count = layout.members_per_device // ensemble.waves
    ways = [
        *(["a larger ensemble axis or more devices"] if count > 1 else []),
        *([f"more waves, now {ensemble.waves}"] if count > 1 else []),
        *([] if ensemble.own_step else [f"more microbatches, now {ensemble.microbatches}"]),
        "a smaller batch",
    ]
    return (
        f"The devices have too little memory for an update: XLA asked for {asked}{has}. A device "
        f"takes {counted(count, 'member')} at once. These need less memory: {', '.join(ways)}."
    )
