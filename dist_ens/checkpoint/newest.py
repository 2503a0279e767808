"""The newest checkpoint of a run, which may be training."""

import hashlib
from collections.abc import Callable
from typing import TypeVar

import jax

from dist_ens.checkpoint.manifest import Manifest, steps_in
from dist_ens.checkpoint.reading import SavedStep
from dist_ens.checkpoint.writing import FOLDER, wait_for_writing
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import ReplacedError, UserError
from dist_ens.processes import cluster
from dist_ens.storage import Folder, Place, not_readable, place_of

# Name of the file of a run's last checkpoint that holds the step whose state the run returned.
RESULT_FILE = "result_step"
_Result = TypeVar("_Result")


def checkpoints_of(workdir: Folder) -> Place:
    """Returns the folder of the checkpoints of a run."""
    return place_of(workdir, "folder") / FOLDER


def saved_steps(workdir: Folder) -> list[int]:
    """Returns the steps of the finished checkpoints of a run, the oldest first."""
    wait_for_writing()
    checkpoints = checkpoints_of(workdir)
    try:
        return steps_in(checkpoints)
    except OSError as error:
        raise not_readable(checkpoints, error) from error


def saved_step(folder: Folder, step: int | None = None) -> SavedStep:
    """Returns a checkpoint of a run; a `UserError` says that process 0 sees none.

    By default it is the step whose state the run returned, and the newest while the run lasts.
    """
    steps, checkpoints = saved_steps(folder), checkpoints_of(folder)
    newest = cluster.as_main_sees(max(steps, default=0))
    saved = None
    if step is None and newest:
        saved = SavedStep(checkpoints / str(newest))
        stored = saved.host_file(RESULT_FILE, is_shared=True)
        step = cluster.as_main_sees(int(stored) if stored and int(stored) in steps else newest)
    if not cluster.as_main_sees(step in steps):
        what = "checkpoint" if step is None else f"checkpoint of step {step}"
        raise UserError(
            f"There is no {what} in {quoted(folder)}: the saved steps are "
            f"{', '.join(map(str, steps)) or '(none)'}. Give one of them, or another folder."
        )
    return saved if saved and saved.step == step else SavedStep(checkpoints / str(step))


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


def state_digest(workdir: Folder, step: int) -> str | None:
    """Returns a digest of the arrays in a checkpoint, which are not read; None if it is absent."""
    try:
        leaves = Manifest.read(checkpoints_of(workdir) / str(step)).leaves
    except (OSError, ValueError):
        return None
    digests = [(name, leaves[name].crc32) for name in sorted(leaves)]
    return hashlib.sha256(repr(digests).encode()).hexdigest()
