"""The newest checkpoint of a run, which may be training."""

import logging
import os
from collections.abc import Callable
from typing import TypeVar

import jax

from dist_ens import cluster
from dist_ens.checkpoint.store import CheckpointStore
from dist_ens.errors import ReplacedError
from dist_ens.json_text import JsonDict

_Result = TypeVar("_Result")


def read_newest(
    workdir: str | os.PathLike[str], step: int | None = None
) -> tuple[int, JsonDict | None]:
    """Returns the step and the record of a checkpoint in a folder.

    Every host must call this. All hosts get the step that process 0 sees.

    Args:
        workdir: Folder of the run, which need not exist.
        step: Step of the checkpoint. Default: `CheckpointStore.result_step`.

    Returns:
        The step and the record; 0 and None if there is no checkpoint at all.

    Raises:
        UserError: If the folder has checkpoints, but none of that step.
        RunError: If the record is damaged.
    """
    store = CheckpointStore(workdir, read_only=True)
    if cluster.is_main():
        for sentence in store.unread_steps():
            logging.warning(sentence)
    if not cluster.as_main_sees(store.latest_step() or 0):
        return 0, None
    if step is None:
        step = cluster.as_main_sees(store.result_step())
    store.require_step(step)
    return step, store.restore_run(step)


def moving_on(step: int | None, read: Callable[[], _Result]) -> _Result:
    """Returns what a function reads from a checkpoint of a run.

    If a run that is training replaces the newest step meanwhile, the function is called once more
    and reads the step that is the newest then. On several hosts it is called once, since one of
    them may have read all that it needs.

    Args:
        step: Step that a person asked for; None for the newest.
        read: Function that finds the step and reads it.

    Raises:
        ReplacedError: If the step that was asked for is replaced, or the newest one twice.
    """
    try:
        return read()
    except ReplacedError:
        if step is not None or jax.process_count() > 1:
            raise
    return read()
