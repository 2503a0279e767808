"""The checkpoints in one folder: saving, restoring and deleting them."""

import contextlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Self

import jax
import numpy as np
import tensorstore as ts
from numpy.typing import DTypeLike

from dist_ens import cluster
from dist_ens.checkpoint.host_files import check_names, read_host_file
from dist_ens.checkpoint.leaves import named_leaves, state_of
from dist_ens.checkpoint.reading import open_arrays, read_arrays, read_run
from dist_ens.checkpoint.writing import (
    RUN,
    STATE,
    Leaf,
    give_up_checkpoint,
    remove_unfinished,
    write_checkpoint,
)
from dist_ens.commands import quoted
from dist_ens.errors import RunError, UserError, code_of_write, first_line
from dist_ens.exit_codes import ExitCode
from dist_ens.json_text import Json, JsonDict
from dist_ens.layout import pieces_off_devices
from dist_ens.state import State
from dist_ens.types import Tree

FOLDER = "checkpoints"
# A process writes one checkpoint at a time. An interrupted run may have left a thread that still
# writes its last one.
_WRITING = threading.Lock()


class CheckpointStore:
    """The checkpoints of one run, as a context that waits for the last save at its end.

    Args:
        workdir: Folder of the run. The checkpoints are in its folder `checkpoints`.
        keep: Number of checkpoints to keep, at least 1. The oldest are deleted first. The files of
            a deleted checkpoint stay until the next save, or until the context ends.
        read_only: Whether nothing will be saved. Unfinished checkpoints are then left alone.
    """

    def __init__(
        self, workdir: str | os.PathLike[str], *, keep: int = 1, read_only: bool = False
    ) -> None:
        self._workdir = pathlib.Path(workdir)
        self._folder = self._workdir.resolve() / FOLDER  # TensorStore refuses a path with `..`
        self._keep = keep
        self._read_only = read_only
        self._newest: int | None = None
        self._writing: Future[None] | None = None
        with _WRITING:  # Waits for a checkpoint that an interrupted run is still writing.
            pass
        if read_only:
            return
        if cluster.is_main():
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._folder)
        cluster.as_main_sees(True)  # No host writes before the folder is ready.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:  # A second Ctrl-C must end the process at once.
            return
        if kind is None or jax.process_count() == 1:
            # After an error of one host alone, the other hosts never finish their part of a save,
            # so that waiting for it would not end.
            self.wait()
            if cluster.is_main() and not self._read_only:
                remove_unfinished(self._folder)

    def latest_step(self) -> int | None:
        """Returns the step of the newest finished checkpoint, or None if there is none."""
        return max(self._steps(), default=None)

    def require_step(self, step: int) -> None:
        """Raises a `UserError` on every host unless a checkpoint of a step is saved."""
        saved = self._steps()
        if not cluster.as_main_sees(step in saved):
            raise UserError(
                f"There is no checkpoint of step {step} in {quoted(self._workdir)}: the saved "
                f"steps are {', '.join(map(str, sorted(saved)))}. Give one of them, or leave step "
                "out for the newest."
            )

    def save(
        self,
        step: int,
        state: State,
        record: Mapping[str, Json],
        *,
        host_files: Mapping[str, bytes] | None = None,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to save a checkpoint. Training may continue at once.

        A step that is already saved is not saved again. The caller may donate or delete the state
        right after this call: its copy to the hosts' memory is queued on the devices, and another
        thread writes the copy to disk. Every host must call this with the same step.

        Args:
            step: Number of updates that the state has seen.
            state: Pytree of arrays on a mesh, `[members, ...]`.
            record: Description of the run that the state belongs to, in types that JSON can hold.
            host_files: Bytes that belong to this host, by name (`[a-z_]+`), such as the position
                of its data iterator. They are saved with the state or not at all.
            after: Function that the writing thread calls before it writes.

        Raises:
            UserError: If a name in `host_files` has other characters.
            RunError: If the previous save could not be written. An error of its `after`, or of a
                device, is raised unchanged.
        """
        host_files = dict(host_files or {})
        check_names(host_files)
        self.wait()
        if step == self._newest:
            return
        named = named_leaves(state)
        pieces = pieces_off_devices(named)
        leaves = {name: Leaf(leaf.shape, leaf.dtype, pieces[name]) for name, leaf in named.items()}
        writing: Future[None] = Future()

        def write() -> None:
            try:
                with _WRITING:
                    after()
                    jax.block_until_ready(
                        [p.array for leaf in leaves.values() for p in leaf.pieces]
                    )
                    with self._unwritable_is_reported(step):
                        if cluster.is_main():
                            remove_unfinished(self._folder, apart_from=step)
                        write_checkpoint(self._folder, step, leaves, record, host_files)
                    self._newest = step
                    if cluster.is_main():
                        for old in sorted(self._steps())[: -self._keep]:
                            with contextlib.suppress(OSError):  # The next save tries it again.
                                give_up_checkpoint(self._folder / str(old))
            except BaseException as error:  # `wait` raises it.
                writing.set_exception(error)
            else:
                writing.set_result(None)

        # Python does not wait for a daemon thread at exit, so that a second Ctrl-C ends a save.
        threading.Thread(target=write, daemon=True).start()
        self._writing = writing

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises:
            RunError: If the save could not be written; see `save`.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def restore_run(self, step: int) -> JsonDict:
        """Returns the record of a checkpoint.

        Args:
            step: Step of the checkpoint.

        Raises:
            RunError: If the record is damaged, or the checkpoint was deleted meanwhile.
        """
        with self._damage_is_reported(step):
            return read_run(self._folder / str(step) / RUN / "metadata")

    def restore_state(self, step: int, abstract: Tree) -> Tree:
        """Returns the state in a checkpoint, on any mesh.

        Args:
            step: Step of the checkpoint.
            abstract: The state's structure with shapes, types and shardings as leaves, such as
                `Ensemble.abstract_state`. The mesh may differ from the one it was saved from.

        Returns:
            The state, with the structure and the shardings of `abstract`.

        Raises:
            RunError: If the checkpoint has other leaves, or leaves of another shape or type, is
                damaged, or was deleted meanwhile.
        """
        named, path = named_leaves(abstract), self._folder / str(step)
        self._newest = step
        with self._damage_is_reported(step):
            saved = open_arrays(path / STATE)
            _check_leaves(path, saved, named)
            return state_of(read_arrays(saved, named), abstract)

    def has_leaves(self, step: int, prefix: str) -> bool:
        """Returns whether the state in a checkpoint has leaves whose names begin with a text.

        Args:
            step: Step of the checkpoint.
            prefix: Start of the names, such as `failures.`.

        Raises:
            RunError: If the checkpoint is damaged, or was deleted meanwhile.
        """
        with self._damage_is_reported(step):
            saved = open_arrays(self._folder / str(step) / STATE)
        return any(name.startswith(prefix) for name in saved)

    def restore_before(self, step: int, abstract: Tree) -> tuple[Tree, int] | None:
        """Returns the newest state of an earlier step, with its step; None without one.

        It waits for the last save. Every host must call it.

        Args:
            step: Step that is too late.
            abstract: The state's structure; see `restore_state`.

        Raises:
            RunError: If the last save could not be written, or the checkpoint cannot be read.
        """
        self.wait()
        newest = self._newest
        before = max((saved for saved in self._steps() if saved < step), default=-1)
        before = cluster.as_main_sees(before)
        if before < 0:
            return None
        state = self.restore_state(before, abstract)
        self._newest = newest  # A run that goes on must not save its newest step again.
        return state, before

    def restore_host_file(self, step: int, name: str, *, is_shared: bool = False) -> bytes | None:
        """Returns the bytes that this host saved under a name in a checkpoint.

        Args:
            step: Step of the checkpoint.
            name: Key in the `host_files` of `save`.
            is_shared: Whether every host saved bytes that fit any host; see `read_host_file`.

        Returns:
            The bytes; None if this host saved nothing under that name.

        Raises:
            RunError: If the file is damaged, or another number of hosts wrote the checkpoint and
                saved something under that name that is not shared.
        """
        with self._damage_is_reported(step):
            return read_host_file(self._folder / str(step), name, is_shared=is_shared)

    def _steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, in any order."""
        if not self._folder.is_dir():
            return []
        return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]

    @contextlib.contextmanager
    def _unwritable_is_reported(self, step: int) -> Iterator[None]:
        """Raises an error of writing as a `RunError` with the last saved step."""
        try:
            yield
        except Exception as error:  # TensorStore reports a full disk as a ValueError.
            saved = self.latest_step()
            kept = "No step is saved yet." if saved is None else f"The last saved step is {saved}."
            raise RunError(
                f"Could not write the checkpoint of step {step} in {quoted(self._workdir)}: "
                f"{first_line(error)} {kept} Free some space there or make the folder writable, "
                "then run the same command again to resume.",
                exit_code=code_of_write(error),
            ) from error

    @contextlib.contextmanager
    def _damage_is_reported(self, step: int) -> Iterator[None]:
        """Raises an error of reading as a `RunError` about a damaged or deleted checkpoint."""
        try:
            yield
        except (RunError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # TensorStore has no special error type for damage.
            path = self._folder / str(step)
            if not path.exists():
                raise RunError(
                    f"The checkpoint {quoted(path)} does not exist any more: a run that is "
                    "training has replaced it. Run the same command again."
                ) from error
            older = [s for s in self._steps() if s < step]
            resume = f" to resume from step {max(older)}" if older else ""
            raise RunError(
                f"The checkpoint {quoted(path)} is damaged, or this user may not read it "
                f"({type(error).__name__}: {first_line(error).rstrip('.')}). Give permission "
                f"to read it, or move that folder away{resume}.",
                exit_code=ExitCode.DAMAGED,
            ) from error


def read_newest(workdir: str | os.PathLike[str]) -> tuple[int, JsonDict | None]:
    """Returns the step and the record of the newest checkpoint in a folder.

    Every host must call this. All hosts get the step that process 0 sees.

    Args:
        workdir: Folder of the run, which need not exist.

    Returns:
        The step and the record; 0 and None if there is no checkpoint.

    Raises:
        RunError: If the record is damaged.
    """
    if not cluster.as_main_sees((pathlib.Path(workdir) / FOLDER).is_dir()):
        return 0, None
    store = CheckpointStore(workdir, read_only=True)
    step = cluster.as_main_sees(store.latest_step() or 0)
    return step, store.restore_run(step) if step else None


def _check_leaves(
    path: pathlib.Path, saved: Mapping[str, ts.TensorStore], named: Mapping[str, Leaf]
) -> None:
    """Checks that the saved leaves have the names, shapes and types of those asked for.

    Args:
        path: Folder of the checkpoint, for the message.
        saved: Arrays of the checkpoint, by name.
        named: Leaves that are asked for, by name.

    Raises:
        RunError: If a leaf differs.
    """
    there = {name: _shape_of(array.dtype.numpy_dtype, array.shape) for name, array in saved.items()}
    asked = {name: _shape_of(leaf.dtype, leaf.shape) for name, leaf in named.items()}
    for name in sorted(there.keys() | asked.keys()):
        old, new = there.get(name, "absent"), asked.get(name, "absent")
        if old != new:
            precision = {old.replace("64", "32"), new.replace("64", "32")}
            remedy = (
                "JAX_ENABLE_X64 was set in only one of the two runs. Set it as it was set when "
                "the run was trained."
                if len(precision) == 1
                else "The network or the optimizer has changed since. Use those that the run was "
                "trained with, or choose another folder."
            )
            raise RunError(
                f"Leaf {name} of the state is {old} in {quoted(path)} and {new} here. {remedy}"
            )


def _shape_of(dtype: DTypeLike, shape: Sequence[int]) -> str:
    """Returns a type and a shape as a text for messages, such as `float32[4, 3]`."""
    return f"{np.dtype(dtype)}{list(shape)}"
