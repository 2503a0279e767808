"""`Checkpoints`: the folder of a run and the times at which it is saved."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping

import jax

from dist_ens.checkpoint.opened import OpenCheckpoints
from dist_ens.checkpoint.record import LOOP_RECORD, RESUMES, notes_on_resuming
from dist_ens.checkpoint.retention import Retention
from dist_ens.checkpoint.run_folder import locked
from dist_ens.checkpoint.snapshot import Snapshot, leaves_off_devices
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import Json, JsonDict
from dist_ens.ground.numbers import require_coefficient, require_one_of, whole_number
from dist_ens.ground.state import described
from dist_ens.ground.types import PyTree, Tree
from dist_ens.layout import MEMBERS, Layout, check_lengths
from dist_ens.storage import place_of


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The folder of a run and the times at which it is saved.

    A run that is given a folder with checkpoints resumes from the newest one. The last step is
    always saved. With neither `every_secs` nor `every_steps`, only the last step is saved, and the
    best evaluation where `keep_best` or a callback such as `EarlyStopping` asks for it.

    Attributes:
        folder: Folder of the run, made if it does not exist. On several hosts all of them must see
            the same folder. One run at a time may use it.
        every_secs: Seconds between saves, positive. None for no saves by the clock.
        every_steps: Number of steps between saves, at least 1. A save happens at the first call
            that reaches a multiple of it, or when a longer save ends. None for no saves by steps.
        keep: Number of the newest checkpoints to keep, at least 1. With 1, a run has no older step
            to resume from if the newest is damaged. While a run lasts, the disk holds the files of
            one more.
        keep_every_steps: Number of steps, at least 1. The first checkpoint at or after each
            multiple of it is kept for ever. None for none.
        keep_best: Name of a score of the evaluation data, such as "nll". An evaluation in which the
            ensemble has its best value so far is saved, and the best checkpoint is kept. None for
            none.
        keep_best_of_members: Name of a score of the evaluation data. An evaluation in which a
            member has its best value so far is saved, and each member's best checkpoint is kept.
            None for none.
        resume: Rule for a folder that holds a run. "same" refuses to resume a run whose parts
            differ from those given, and "anyway" resumes it. A damaged newest checkpoint is set
            aside, and the one before it is resumed. "strict" is "same", and refuses damage, too.

    Raises:
        UserError: If a field has a value that it cannot have.

    >>> Checkpoints("runs/digits", every_steps=500).every_secs
    60.0
    """

    folder: str | os.PathLike[str]
    _: dataclasses.KW_ONLY
    every_secs: float | None = 60.0
    every_steps: int | None = None
    keep: int = 2
    keep_every_steps: int | None = None
    keep_best: str | None = None
    keep_best_of_members: str | None = None
    resume: str = "same"

    def __post_init__(self) -> None:
        checked: dict[str, object] = {"folder": str(place_of(self.folder, "folder"))}
        for name in ("keep", "every_steps", "keep_every_steps"):
            value = getattr(self, name)
            if name == "keep" or value is not None:
                checked[name] = whole_number(name, value, least=1)
        if self.every_secs is not None:
            require_coefficient("every_secs", self.every_secs, "Give seconds, or None.")
            checked["every_secs"] = float(self.every_secs)
        require_one_of("resume", str(self.resume), RESUMES)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def save(self, step: int, state: PyTree) -> None:
        """Saves the members of a loop of your own, and waits until they are on disk.

        The checkpoint is complete or not there at all, also after a kill. The newest `keep` are
        kept. The times of `every_secs` and `every_steps` are those of `fit`. Every host must call
        this.

        Args:
            step: Number of steps that the members have taken, larger than that of any checkpoint in
                the folder.
            state: Members, any pytree of arrays [members, ...] on a layout, as `layout.init` or a
                lifted function returns them.

        Raises:
            UserError: If the folder holds this step or a later one, or something else than such
                members. Also if a leaf is no such array.
            RunError: If the checkpoint cannot be written.
        """
        step = whole_number("step", step, least=1)
        leaves = jax.tree.leaves(state)
        lengths = {leaf.shape[:1] if isinstance(leaf, jax.Array) else () for leaf in leaves}
        if len(lengths) != 1 or lengths == {()}:
            raise UserError(
                f"The state is {described(state)[:300]}, and each leaf must be a JAX array "
                "[members, ...]. Give what layout.init or a lifted function returned, or "
                "layout.put(state, 'members')."
            )
        with self.open(LOOP_RECORD) as opened:
            if step <= opened.saved_step:
                raise UserError(
                    f"{quoted(self.folder)} holds step {opened.saved_step} already, and step "
                    f"{step} is not after it. Begin with restore to continue, or choose another "
                    "folder."
                )
            opened.save(Snapshot(step, leaves_off_devices(state), LOOP_RECORD), is_last=True)

    def restore(self, layout: Layout, like: Tree) -> tuple[int, Tree]:
        """Returns the newest step of a loop of your own, and its members on a layout.

        Every byte is compared with what was saved. A damaged checkpoint is set aside, and the one
        before it is used, unless `resume` is "strict". Every host must call this.

        Args:
            layout: Layout of the members. It may differ from the one they were saved from.
            like: Pytree with the structure, shapes and types of the members, such as
                `layout.init(...)`, or their `jax.ShapeDtypeStruct`.

        Returns:
            The step and the members. 0 and `like` if the folder has no checkpoint.

        Raises:
            UserError: If the folder holds a run of `fit`, or `like` has another number of members
                than the layout.
            RunError: If the saved members have another structure, shape or type, or all checkpoints
                are damaged.

        >>> import tempfile
        >>> layout = Layout.make(4, ensemble_axis=1, devices=jax.devices()[:1])
        >>> members = layout.init(lambda key: {"w": jax.random.normal(key)}, jax.random.key(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     Checkpoints(folder).save(10, members)
        ...     step, restored = Checkpoints(folder).restore(layout, members)
        >>> step, bool((restored["w"] == members["w"]).all())
        (10, True)
        """
        check_lengths(layout, like, MEMBERS, "The argument like")
        leaves, structure = jax.tree.flatten(like)
        shardings = map(layout.sharding, layout.leaf_specs(MEMBERS, like))
        abstract = jax.tree.unflatten(
            structure,
            [
                jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
                for leaf, sharding in zip(leaves, shardings, strict=True)
            ],
        )
        with self.open(LOOP_RECORD) as opened:
            while opened.saved_step:
                state = opened.restore_state(abstract)
                if state is not None:
                    return opened.saved_step, state
                # The checkpoint is damaged, and `opened` is at an older one.
        return 0, like

    @contextlib.contextmanager
    def open(
        self,
        record: Mapping[str, Json],
        *,
        check: Callable[[JsonDict], None] = lambda _: None,
        say: Callable[[str], None] = logging.warning,
        directions: Mapping[str, str | None] | None = None,
    ) -> Iterator[OpenCheckpoints]:
        """Locks the folder, and finds its newest checkpoint.

        Every host must enter and leave this context. At its end it waits for the last save. It does
        not wait after a KeyboardInterrupt. On several hosts it waits after no error at all, since
        an error of one host alone would make the others wait forever.

        `check` raises an error if the run must not resume the one of a saved record. `directions`
        has "lower" or "higher" for each score of the run, whichever is better, or None.
        """
        run = place_of(self.folder, "folder")
        best = self._higher_is_better(directions or {})
        keep = Retention(
            self.keep, self.keep_every_steps, self.keep_best, self.keep_best_of_members, best
        )

        def notes_on(saved_record: JsonDict) -> list[str]:
            check(saved_record)
            return notes_on_resuming(record, saved_record, self.folder, self.resume)

        with (
            locked(run, say) as (renew, is_lost),
            OpenCheckpoints(
                run,
                record,
                keep=keep,
                notes_on=notes_on,
                resume=self.resume,
                say=say,
                renew=renew,
                is_lost=is_lost,
            ) as opened,
        ):
            yield opened

    def _higher_is_better(self, directions: Mapping[str, str | None]) -> frozenset[str]:
        """Returns the scores of `keep_best…` of which a higher value is better."""
        names = [each for each in (self.keep_best, self.keep_best_of_members) if each is not None]
        for name in names:
            if directions.get(name) is None:
                known = sorted(each for each, better in directions.items() if better is not None)
                raise UserError(
                    f"The best checkpoint is to be kept by {repr(name)[:200]}, and this run has "
                    f"the scores {', '.join(known) or '(none)'}. Give one of them, or evaluation "
                    "data."
                )
        return frozenset(name for name in names if directions[name] == "higher")
