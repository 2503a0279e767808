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
    """Returns the step and the record of a checkpoint in a folder.

    Every host must call this. All hosts get the step that process 0 sees.

    Args:
        workdir: Folder of the run, which need not exist.
        step: Step of the checkpoint. Default: the step whose state the run returned, which may be
            that of its best evaluation, and the newest step while the run lasts.

    Returns:
        The step and the record; 0 and None if there is no checkpoint at all.

    Raises:
        UserError: If the folder has checkpoints, but none of that step.
        RunError: If the record is damaged.
    """
    saved = _found(workdir, step)
    return (0, None) if saved is None else (saved.step, saved.run)


def saved_step(folder: str | os.PathLike[str], step: int | None = None) -> SavedStep:
    """Returns a checkpoint of a run; see `read_newest`.

    Raises:
        UserError: If there is no checkpoint, or none of that step.
    """
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
    """Returns what a function reads from a checkpoint of a run.

    If a run that is training replaces the newest step meanwhile, the function is called once more
    and reads the step that is the newest then. That is not so if a person asked for a step, or on
    several hosts, since one of them may have read all that it needs. Then it is a `ReplacedError`.
    """
    try:
        return read()
    except ReplacedError:
        if step is not None or jax.process_count() > 1:
            raise
    return read()


def state_digest(workdir: str | os.PathLike[str], step: int) -> str | None:
    """Returns a digest of the arrays of all members in a checkpoint, which are not read.

    It has 64 hexadecimal digits. It is None if the checkpoint does not exist.
    """
    try:
        leaves = Manifest.read(pathlib.Path(workdir) / FOLDER / str(step)).leaves
    except (OSError, ValueError):
        return None
    digests = [(name, leaves[name].crc32) for name in sorted(leaves)]
    return hashlib.sha256(repr(digests).encode()).hexdigest()
