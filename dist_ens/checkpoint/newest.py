"""The newest checkpoint of a run, which may be training."""

import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import TypeVar

import jax

from dist_ens.checkpoint.manifest import Manifest
from dist_ens.checkpoint.reading import SavedStep
from dist_ens.checkpoint.store import FOLDER, CheckpointStore
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import ReplacedError, UserError
from dist_ens.ground.json_text import JsonDict
from dist_ens.processes import cluster

# Name of the file of a run's last checkpoint that holds the step whose state the run returned.
RESULT_FILE = "result_step"
_Result = TypeVar("_Result")


def read_newest(
    workdir: str | os.PathLike[str], step: int | None = None
) -> tuple[int, JsonDict | None]:
    """Returns the step and the record of a checkpoint; 0 and None if process 0 sees none.

    By default it is the step whose state the run returned, and the newest while the run lasts.
    """
    saved = _found(workdir, step)
    return (0, None) if saved is None else (saved.step, saved.run)


def saved_step(folder: str | os.PathLike[str], step: int | None = None) -> SavedStep:
    """Returns a checkpoint of a run, or raises a `UserError`; see `read_newest`."""
    saved = _found(folder, step)
    if saved is None:
        raise UserError(
            f"There is no checkpoint in {quoted(folder)}. Give the folder of a run, which has a "
            f"folder {FOLDER}/."
        )
    return saved


def _found(folder: str | os.PathLike[str], step: int | None) -> SavedStep | None:
    """Returns a checkpoint of a run; None if the run has none at all."""
    store = CheckpointStore(folder, read_only=True)
    newest = cluster.as_main_sees(store.latest_step() or 0)
    if not newest:
        return None
    steps = store.steps()
    if step is None:
        stored = store.at(newest).host_file(RESULT_FILE, is_shared=True)
        step = int(stored) if stored and int(stored) in steps else newest
        step = cluster.as_main_sees(step)
    if not cluster.as_main_sees(step in steps):
        raise UserError(
            f"There is no checkpoint of step {step} in {quoted(folder)}: the saved steps are "
            f"{', '.join(map(str, steps))}. Give one of them, or leave step out for the newest."
        )
    return store.at(step)


def moving_on(step: int | None, read: Callable[[], _Result]) -> _Result:
    """Returns what a function reads, and reads again if a run has replaced the newest step.

    It does not if a person asked for a step, or on several hosts, where one may have read it all.
    """
    try:
        return read()
    except ReplacedError:
        if step is not None or jax.process_count() > 1:
            raise
    return read()


def state_digest(workdir: str | os.PathLike[str], step: int) -> str | None:
    """Returns a digest of the arrays in a checkpoint, which are not read; None if it is absent."""
    try:
        leaves = Manifest.read(pathlib.Path(workdir) / FOLDER / str(step)).leaves
    except (OSError, ValueError):
        return None
    digests = [(name, leaves[name].crc32) for name in sorted(leaves)]
    return hashlib.sha256(repr(digests).encode()).hexdigest()
