"""The checkpoints in one folder: saving, restoring and deleting them."""

import contextlib
import errno
import hashlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Self, TypeVar

import jax
import numpy as np

from dist_ens import cluster
from dist_ens.checkpoint.causes import NO_DAMAGE, explained
from dist_ens.checkpoint.host_files import check_names
from dist_ens.checkpoint.kept import Kept
from dist_ens.checkpoint.leaves import check_leaves, named_leaves, state_of
from dist_ens.checkpoint.lineage import Lineage, positions_of
from dist_ens.checkpoint.manifest import Manifest, step_of
from dist_ens.checkpoint.reading import SavedStep, is_of_first_format, open_step
from dist_ens.checkpoint.writing import (
    Leaf,
    give_up_checkpoint,
    remove_unfinished,
    set_aside,
    write_checkpoint,
)
from dist_ens.commands import quoted
from dist_ens.errors import ReplacedError, RunError, SaveError, UserError, code_of_write
from dist_ens.exit_codes import ExitCode
from dist_ens.json_text import Json, JsonDict
from dist_ens.layout import pieces_off_devices, read_onto_devices
from dist_ens.paths import utf8_path
from dist_ens.state import State
from dist_ens.types import Tree

FOLDER = "checkpoints"
# Name of the file of a run's last checkpoint that holds the step whose state the run returned.
RESULT_FILE = "result_step"
# A process writes one checkpoint at a time. An interrupted run may have left a thread that still
# writes its last one.
_WRITING = threading.Lock()
T = TypeVar("T")


class _UnwantedError(Exception):
    """A checkpoint is not to be written, as its state shows."""


class CheckpointStore:
    """The checkpoints of one run, as a context that waits for the last save at its end.

    Args:
        workdir: Folder of the run. The checkpoints are in its folder `checkpoints`.
        keep: Rule for which checkpoints are kept, or the number of the newest to keep. The files
            of a deleted checkpoint stay until the next save, or until the context ends.
        read_only: Whether nothing will be saved. Unfinished checkpoints are then left alone.

    Attributes:
        workdir: Folder of the run.
        newest_step: Newest step that was saved or restored here; None if there is none.

    Raises:
        UserError: If something will be saved, and the folder `checkpoints` is a symbolic link, or
            its path is not UTF-8.
    """

    def __init__(
        self, workdir: str | os.PathLike[str], *, keep: Kept | int = 1, read_only: bool = False
    ) -> None:
        self.workdir = pathlib.Path(workdir)
        self._folder = self.workdir.resolve() / FOLDER  # TensorStore refuses a path with `..`
        self._keep = Kept(keep) if isinstance(keep, int) else keep
        self._scores: dict[int, Mapping[str, float]] = {}  # Of the saved steps, once they are read.
        self._read_only = read_only
        self.newest_step: int | None = None
        self._writing: Future[None] | None = None
        self._writing_step = 0
        self._opened: tuple[int, SavedStep] | None = None
        self._saves = 0
        with _WRITING:  # Waits for a checkpoint that an interrupted run is still writing.
            pass
        if read_only:
            return
        utf8_path(self._folder)
        self._require_no_link()
        if cluster.is_main():
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_unfinished(self._folder)
        # No host writes before the folder is ready, as all of them wait for process 0 here.
        self._token = cluster.bytes_of_main(os.urandom(4)).hex()

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
        return max(self.steps(), default=None)

    def result_step(self) -> int:
        """Returns the step whose state the run returned, which may be that of its best evaluation.

        It is the newest step while the run lasts. There must be a checkpoint.

        Raises:
            RunError: If the newest checkpoint is damaged.
        """
        newest = max(self.steps())
        stored = self.restore_host_file(newest, RESULT_FILE, is_shared=True) or b""
        step = step_of(stored.decode(errors="replace"))
        return step if step is not None and step in self.steps() else newest

    def require_step(self, step: int) -> None:
        """Raises a `UserError` on every host unless a checkpoint of a step is saved."""
        saved = self.steps()
        if not cluster.as_main_sees(step in saved):
            raise UserError(
                f"There is no checkpoint of step {step} in {quoted(self.workdir)}: the saved "
                f"steps are {', '.join(map(str, saved))}. Give one of them, or leave step "
                "out for the newest."
            )

    def save(
        self,
        step: int,
        state: State,
        record: Mapping[str, Json],
        *,
        scores: Mapping[str, float] | None = None,
        host_files: Mapping[str, bytes] | None = None,
        lineage_of: Callable[[int], Lineage] = Lineage,
        after: Callable[[], None] = lambda: None,
        late_files: Callable[[], Mapping[str, bytes]] = dict,
        is_wanted: Callable[[Mapping[str, Leaf]], bool] = lambda _: True,
        failed: Callable[[BaseException], None] = lambda _: None,
        kept_step: int | None = None,
    ) -> None:
        """Starts to save a checkpoint. Training may continue at once.

        A step that is already saved is not saved again. The caller may donate or delete the state
        right after this call: its copy to the hosts' memory is queued on the devices, and another
        thread writes the copy to disk. Every host must call this with the same step.

        Args:
            step: Number of updates that the state has seen.
            state: Pytree of arrays on a mesh, `[members, ...]`.
            record: Description of the run that the state belongs to, in types that JSON can hold.
            scores: Scores of the ensemble at this step, by name. Default: none.
            host_files: Bytes that belong to this host, by name (`[a-z_]+`), such as the position
                of its data iterator. They are saved with the state or not at all.
            lineage_of: Function that returns the lineage of the member with an id.
            after: Function that the writing thread calls before it writes. An `OSError` or a
                `SaveError` of it counts as one of writing.
            late_files: Function that returns more host files, which the writing thread calls after
                `after`.
            is_wanted: Function of the leaves by name that the writing thread calls when this host
                has copied its pieces of them. If it returns False, nothing is written. It must
                return the same on every host.
            failed: Function that the writing thread calls with an error of writing, which `wait`
                raises later.
            kept_step: Step that is kept in any case. None for none.

        Raises:
            UserError: If a name in `host_files` has other characters.
            SaveError: If the previous save could not be written. Another error of its `after`, or
                one of a device, is raised unchanged.
        """
        host_files = dict(host_files or {})
        check_names(host_files)
        self.wait()
        if step == self.newest_step:
            return
        named = named_leaves(state)
        pieces = pieces_off_devices(named)
        leaves = {name: Leaf(leaf.shape, leaf.dtype, pieces[name]) for name, leaf in named.items()}
        self._saves += 1
        token = f"{self._token}-{self._saves}"
        writing: Future[None] = Future()

        def before() -> None:
            self._require_no_link()
            after()
            host_files.update(late_files())
            jax.block_until_ready([p.array for leaf in leaves.values() for p in leaf.pieces])
            if not is_wanted(leaves):
                raise _UnwantedError

        def write() -> None:
            try:
                with _WRITING, self._unwritable_is_reported(step, failed):
                    write_checkpoint(
                        self._folder,
                        step,
                        leaves,
                        record,
                        host_files,
                        scores=scores or {},
                        token=token,
                        lineage_of=lineage_of,
                        before=before,
                    )
                    self.newest_step = step
                    if cluster.is_main():
                        self._delete_oldest(token, kept_step)
            except _UnwantedError:
                writing.set_result(None)
            except BaseException as error:  # `wait` raises it.
                writing.set_exception(error)
            else:
                writing.set_result(None)

        # Python does not wait for a daemon thread at exit, so that a second Ctrl-C ends a save.
        self._scores[step] = scores or {}
        self._writing, self._writing_step = writing, step
        threading.Thread(target=write, daemon=True).start()

    def is_best(self, step: int, scores: Mapping[str, float]) -> bool:
        """Returns whether a step is to be kept for its scores. Every host must call this.

        Args:
            step: Step that is not saved yet.
            scores: Scores at this step, by name.
        """
        if not self._keep.uses_scores:
            return False
        steps = {*self.steps(), step}
        if self._writing is not None and not self._writing.done():
            steps.add(self._writing_step)
        known = {each: self._scores_at(each) or {} for each in steps - {step}} | {step: scores}
        return bool(cluster.as_main_sees(step in self._keep.best_of(sorted(steps), known)))

    def wait(self) -> bool:
        """Waits until the last save is on disk, and returns whether there was one to wait for.

        Raises:
            SaveError: If the save could not be written; see `save`.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return False
        writing.result()
        return True

    def restore_run(self, step: int) -> JsonDict:
        """Returns the record of a checkpoint, after a check of its files.

        Args:
            step: Step of the checkpoint.

        Raises:
            RunError: If the record or a file is damaged, or the checkpoint was deleted meanwhile.
        """
        return self._saved(step).run

    def added_files(self, step: int) -> list[str]:
        """Returns the paths of files that do not belong to a checkpoint. They are not read."""
        return self._saved(step).added

    def members(self, step: int) -> tuple[Lineage, ...]:
        """Returns the lineage of each member in a checkpoint, in the order of its state.

        Args:
            step: Step of the checkpoint.

        Raises:
            RunError: If the checkpoint is damaged, or was deleted meanwhile.
        """
        saved = self._saved(step)
        return self._read(step, lambda: saved.members)

    def restore_state(
        self,
        step: int,
        abstract: Tree,
        *others: Tree,
        member_ids: Sequence[int] | None = None,
    ) -> Tree:
        """Returns the state in a checkpoint, on any mesh. Each part of it is read once.

        Args:
            step: Step of the checkpoint.
            abstract: The state's structure with shapes, types and shardings as leaves, such as
                `Ensemble.abstract_state`. The mesh may differ from the one it was saved from.
            others: Other structures that the state may have. The one with the names of the saved
                leaves is used.
            member_ids: Ids of the members to read, which must be in the checkpoint, in the order of
                the returned state. Only their bytes are read. Default: all members.

        Returns:
            The state, with the structure and the shardings of `abstract` or of one of the others.

        Raises:
            UserError: If a member is not in the checkpoint.
            RunError: If the checkpoint has other leaves, or leaves of another shape or type, is
                damaged, or was deleted meanwhile.
        """
        saved = self._saved(step)
        positions = self._positions(step, member_ids)

        def read() -> Tree:
            arrays = saved.open_arrays(positions)
            like = abstract
            for other in others:
                if named_leaves(other).keys() == arrays.keys():
                    like = other
            named = named_leaves(like)
            check_leaves(self._folder / str(step), arrays, named)
            onto = read_onto_devices(named, lambda name, index: arrays[name].read(index))
            return state_of(onto, like)

        state = self._read(step, read)
        # A member may take its state from an older step while the run goes on.
        self.newest_step = max(step, self.newest_step or 0)
        return state

    def restore_leaves(
        self, step: int, member_ids: Sequence[int] | None = None
    ) -> dict[str, np.ndarray]:
        """Returns the leaves of the state in a checkpoint by name, in this process's memory.

        Args:
            step: Step of the checkpoint.
            member_ids: Ids of the members to read; see `restore_state`.

        Raises:
            UserError: If a member is not in the checkpoint.
            RunError: If the checkpoint is damaged, or was deleted meanwhile.
        """
        saved, positions = self._saved(step), self._positions(step, member_ids)

        def read() -> dict[str, np.ndarray]:
            arrays = saved.open_arrays(positions)
            return {name: array.read_whole() for name, array in arrays.items()}

        return self._read(step, read)

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
        saved = self._saved(step)
        return self._read(step, lambda: saved.host_file(name, is_shared=is_shared))

    def set_aside(self, step: int) -> pathlib.Path:
        """Renames a damaged checkpoint, so that it is no checkpoint any more.

        Every host must call this. Process 0 renames the folder, in which nothing is changed.

        Args:
            step: Step of the checkpoint.

        Returns:
            The new path of the folder on process 0; its old path on the others.

        Raises:
            RunError: If the folder cannot be renamed.
        """
        path, error = self._folder / str(step), None
        if cluster.is_main():
            try:
                path = set_aside(path)
            except OSError as refused:
                error = refused
        if step == self.newest_step:
            self.newest_step = None
        if cluster.any_host(error is not None):
            raise RunError(
                f"The damaged checkpoint {quoted(path)} could not be renamed: "
                f"{explained(error).what}. Move it out of this folder, then run the same command "
                "again.",
                exit_code=ExitCode.DAMAGED,
            ) from error
        return path

    def steps(self) -> list[int]:
        """Returns the steps of the finished checkpoints, the oldest first."""
        return sorted(step for _, step in self._numbered() if step is not None)

    def unread_steps(self) -> list[str]:
        """Returns a sentence for each entry with a number for its name that is no checkpoint."""
        return [
            f"{quoted(path)} is not read: a checkpoint is a folder and no link, and its name is a "
            "number without leading zeros."
            for path, step in sorted(self._numbered())
            if step is None
        ]

    def _numbered(self) -> Iterator[tuple[pathlib.Path, int | None]]:
        """Yields each entry that is named like a step, with its step; None if it is none."""
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name.isdecimal():
                is_step = path.is_dir() and not path.is_symlink()
                yield path, step_of(path.name) if is_step else None

    def _saved(self, step: int) -> SavedStep:
        """Returns a checkpoint after a check of its files, which is done once."""
        if self._opened is None or self._opened[0] != step:
            utf8_path(self._folder)
            path = self._folder / str(step)
            self._opened = step, self._read(step, lambda: open_step(path))
        return self._opened[1]

    def _read(self, step: int, read: Callable[[], T]) -> T:
        """Returns what a function reads from a checkpoint; see `_damage_is_reported`.

        An input/output error may pass. It counts as damage only if a second read fails, too.
        """
        with self._damage_is_reported(step):
            try:
                return read()
            except (OSError, ValueError) as error:
                if explained(error).code != errno.EIO:
                    raise
                return read()

    def _positions(self, step: int, member_ids: Sequence[int] | None) -> list[int] | None:
        """Returns the positions of members in a checkpoint; None for all of them in order."""
        if member_ids is None:
            return None
        members = self.members(step)
        positions = positions_of(member_ids, members)
        return None if positions == [*range(len(members))] else positions

    def _delete_oldest(self, token: str, kept_step: int | None) -> None:
        """Marks the checkpoints for deletion that are not to be kept.

        Args:
            token: Token of the save that has just ended.
            kept_step: Step that is kept in any case. None for none.
        """
        steps = self.steps()
        scores = {step: self._scores_at(step) for step in steps} if self._keep.uses_scores else {}
        known = {step: at for step, at in scores.items() if at is not None}
        # A step whose scores cannot be read now may be the best one.
        unknown = scores.keys() - known.keys()
        for old in {*steps} - self._keep.of(steps, known) - unknown - {kept_step}:
            with contextlib.suppress(OSError):  # The next save tries it again.
                give_up_checkpoint(self._folder / str(old), token)

    def _scores_at(self, step: int) -> Mapping[str, float] | None:
        """Returns the scores in a checkpoint by name; None if they cannot be read."""
        if step not in self._scores:
            path = self._folder / str(step)
            try:
                is_old = is_of_first_format(path)
                self._scores[step] = {} if is_old else Manifest.read(path).scores
            except Exception:  # A checkpoint that cannot be read ends no save.
                return None
        return self._scores[step]

    def _require_no_link(self) -> None:
        """Raises a `UserError` if the folder of the checkpoints is a symbolic link or a file."""
        if self._folder.is_symlink() or self._folder.is_file():
            kind = "symbolic link" if self._folder.is_symlink() else "file"
            raise UserError(
                f"{quoted(self._folder)} is a {kind}, and nothing is saved or deleted there. Put "
                "the folder itself in its place."
            )

    @contextlib.contextmanager
    def _unwritable_is_reported(
        self, step: int, failed: Callable[[BaseException], None]
    ) -> Iterator[None]:
        """Raises an error of writing as a `SaveError` with the last saved step.

        Args:
            step: Step that is being saved.
            failed: Function that is called with the error.
        """
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise
        # TensorStore reports a full disk as a ValueError.
        except (OSError, ValueError, SaveError) as error:
            if cluster.is_main():
                remove_unfinished(self._folder)
            why = explained(error)
            failed(error)
            raise SaveError(
                f"Could not write the checkpoint of step {step} in {quoted(self.workdir)}: "
                f"{why.what}. {self.last_saved()} {why.remedy}, then run the same command again to "
                "resume.",
                exit_code=code_of_write(error),
            ) from error

    def last_saved(self) -> str:
        """Returns a sentence that says which step is the last that is saved."""
        try:
            step = self.latest_step()
        except OSError:  # The disk is gone.
            step = None
        return "No step is saved yet." if step is None else f"The last saved step is {step}."

    @contextlib.contextmanager
    def _damage_is_reported(self, step: int) -> Iterator[None]:
        """Raises an error of reading as a `RunError`, and says whether the checkpoint is damaged.

        Only damage has the exit code `DAMAGED`.
        """
        path = self._folder / str(step)
        try:
            yield
        except (RunError, MemoryError, jax.errors.JaxRuntimeError):
            raise
        except Exception as error:  # TensorStore has no special error type for damage.
            why = explained(error)
            if is_gone(path):
                raise ReplacedError(
                    f"The checkpoint {quoted(path)} does not exist any more: a run that is "
                    "training has replaced it. Run the same command again."
                ) from error
            if why.code in NO_DAMAGE:
                raise RunError(
                    f"The checkpoint {quoted(path)} cannot be read: {why.what}. {why.remedy}, then "
                    "run the same command again."
                ) from error
            older = [s for s in self.steps() if s < step]
            remedy = (
                f"Give step={older[-1]} (--step={older[-1]} on the command line) to use the step "
                "before it; training does so by itself."
                if older
                else "It is the only one: restore its files from a copy, or move it away to train "
                "anew."
            )
            raise RunError(
                f"The checkpoint {quoted(path)} is damaged: {why.what}. {remedy}",
                exit_code=ExitCode.DAMAGED,
            ) from error


def is_gone(path: pathlib.Path) -> bool:
    """Returns whether a file or a folder does not exist, as far as the system can tell."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:  # The disk cannot be read now.
        return False
    return False


def state_digest(workdir: str | os.PathLike[str], step: int) -> str | None:
    """Returns a digest of the arrays of all members in a checkpoint, which are not read.

    Args:
        workdir: Folder of the run.
        step: Step of the checkpoint.

    Returns:
        64 hexadecimal digits. None if the checkpoint does not exist or has no digests.
    """
    try:
        leaves = Manifest.read(pathlib.Path(workdir) / FOLDER / str(step)).leaves
    except (OSError, ValueError):
        return None
    digests = [(name, leaves[name].digests) for name in sorted(leaves)]
    return hashlib.sha256(repr(digests).encode()).hexdigest()
