"""The checkpoints of one workdir."""

import contextlib
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

import jax
import numpy as np
import tensorstore as ts

from dist_ens import cluster
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
from dist_ens.errors import RunError, first_line
from dist_ens.layout import pieces_off_devices

FOLDER = "checkpoints"
# One save at a time in a process: an interrupted run may have left one that is still being written.
_WRITING = threading.Lock()


class Checkpoints:
    """The checkpoints of one workdir; a context that waits for what is being written.

    Args:
        workdir: The run's folder.
        keep: How many to keep; the oldest go first. One that went leaves its files until the next
            is written, or the end.
        read_only: Whether nothing will be saved; then unfinished writes are left alone.
    """

    def __init__(self, workdir: pathlib.Path, *, keep: int = 1, read_only: bool = False) -> None:
        self._folder = workdir.resolve() / FOLDER  # TensorStore takes no path with `..` in it
        self._keep = keep
        self._read_only = read_only
        self._newest: int | None = None
        self._writing: Future[None] | None = None
        with _WRITING:  # what an interrupted run began is there, or it is not
            pass
        if read_only:
            return
        if cluster.is_main():
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._folder)
        cluster.as_main_sees(True)  # none writes before that is done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:  # who asks for the end a second time will not wait
            return
        if kind is None or jax.process_count() == 1:
            self.wait()  # on an error of one host the others do not come to the end of a save
            if cluster.is_main() and not self._read_only:
                remove_unfinished(self._folder)

    def latest_step(self) -> int | None:
        """Step of the newest finished checkpoint; None where there is none."""
        return max(self._steps(), default=None)

    def save(
        self,
        step: int,
        state: Any,
        run: dict[str, Any],
        *,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins to save; training may go on at once. A step that is saved already stays.

        The state may be used up: its devices are not waited for, nor do they wait. It is copied to
        the memory of the hosts when they come to it, and written from there by another thread.

        Args:
            step: Updates that the state has seen.
            state: A pytree of arrays on a mesh, [members, ...].
            run: What JSON can hold.
            after: What that thread does first.

        Raises:
            RunError: If the save before this one could not be written. What its `after` or its
                devices raised is raised as it is.
        """
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
                    with self._told_if_unwritable():
                        if cluster.is_main():
                            remove_unfinished(self._folder, apart_from=step)
                        write_checkpoint(self._folder, step, leaves, run)
                    self._newest = step
                    if cluster.is_main():
                        for old in sorted(self._steps())[: -self._keep]:
                            with contextlib.suppress(OSError):  # the next save tries it again
                                give_up_checkpoint(self._folder / str(old))
            except BaseException as error:  # told to whoever waits
                writing.set_exception(error)
            else:
                writing.set_result(None)

        # Not one that Python waits for when it ends: who interrupts a save will not.
        threading.Thread(target=write, daemon=True).start()
        self._writing = writing

    def wait(self) -> None:
        """Returns when the last save is on disk.

        Raises:
            RunError: If it could not be written; see `save`.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def restore_run(self, step: int) -> dict[str, Any]:
        """What the state in a checkpoint belongs to.

        Raises:
            RunError: If it is damaged, or was replaced meanwhile.
        """
        with self._told_if_damaged(step):
            return read_run(self._folder / str(step) / RUN / "metadata")

    def restore_state(self, step: int, abstract: Any) -> Any:
        """The state in a checkpoint, on another mesh than it was saved from if asked.

        Args:
            step: Of the checkpoint.
            abstract: Shapes, types and shardings of its leaves, such as `Ensemble.abstract_state`.

        Returns:
            The state, where `abstract` says.

        Raises:
            RunError: If the checkpoint holds other leaves, or leaves of another shape; if it is
                damaged, or was replaced meanwhile.
        """
        named, path = named_leaves(abstract), self._folder / str(step)
        self._newest = step
        with self._told_if_damaged(step):
            saved = open_arrays(path / STATE)
            _check_leaves(path, saved, named)
            return state_of(read_arrays(saved, named), abstract)

    def _steps(self) -> list[int]:
        if not self._folder.is_dir():
            return []
        return [int(path.name) for path in self._folder.iterdir() if path.name.isdecimal()]

    @contextlib.contextmanager
    def _told_if_unwritable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # TensorStore tells of a full disk in a ValueError
            saved = self.latest_step()
            kept = "nothing is saved yet" if saved is None else f"step {saved} is saved"
            raise RunError(
                f"A checkpoint can be written. Received: {self._folder}, where it could not: "
                f"{first_line(error)} ({kept}). Make room, and run the same command again."
            ) from error

    @contextlib.contextmanager
    def _told_if_damaged(self, step: int) -> Iterator[None]:
        try:
            yield
        except (RunError, MemoryError, jax.errors.JaxRuntimeError):  # the last: of the devices
            raise
        except Exception as error:  # TensorStore has no error of its own for damage
            path = self._folder / str(step)
            if not path.exists():
                raise RunError(
                    f"A checkpoint is read while it is there. Received: {path}, which a run that "
                    "is training has replaced meanwhile. Run the same command again."
                ) from error
            older = [s for s in self._steps() if s < step]
            before = f" to go on from step {max(older)}" if older else ""
            raise RunError(
                f"A checkpoint can be read whole. Received: {path}, which is damaged or not "
                f"readable by this user ({type(error).__name__}: {first_line(error)}). Give "
                f"permission to read it, or move that folder away{before}."
            ) from error


def _check_leaves(
    path: pathlib.Path, saved: Mapping[str, ts.TensorStore], named: Mapping[str, Any]
) -> None:
    there = {name: _stored(array.dtype.numpy_dtype, array.shape) for name, array in saved.items()}
    asked = {name: _stored(leaf.dtype, leaf.shape) for name, leaf in named.items()}
    for name in sorted(there.keys() | asked.keys()):
        old, new = there.get(name, "absent"), asked.get(name, "absent")
        if old != new:
            precision = {old.replace("64", "32"), new.replace("64", "32")}
            remedy = (
                "JAX_ENABLE_X64 was set in one of the two: set it as when the run was trained."
                if len(precision) == 1
                else "The code of the network has changed since: use the code that it was trained "
                "with, or another workdir."
            )
            raise RunError(
                f"Leaf {name} of the network or its optimizer is {old} in {path} and {new} here. "
                f"{remedy}"
            )


def _stored(dtype: Any, shape: Sequence[int]) -> str:
    """Type and shape of a leaf in a checkpoint."""
    return f"{np.dtype(dtype)}{list(shape)}"
