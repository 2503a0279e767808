"""State and experiment, saved and restored as one, with Orbax.

A checkpoint stands in `WORKDIR/checkpoints/STEP` and holds two items: `state`, a flat dict from the
name of a leaf (`params.layer_0.w`) to its array `[members, ...]`, so that no class of the user's is
needed to read it; and `run`, plain data that says what the state belongs to. A random key is the
numbers that it consists of, and where an array lay is not kept: `StandardCheckpointer().restore`
gives NumPy arrays, whatever devices there are.
"""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from dist_ens.errors import RunError, first_line

FOLDER = "checkpoints"


class Checkpoints:
    """The checkpoints of one workdir; a context that waits for what is being written.

    Args:
        workdir: The run's folder.
        keep: How many to keep; the oldest go first.
        read_only: Whether nothing will be saved; then unfinished writes are left alone.
    """

    def __init__(self, workdir: pathlib.Path, *, keep: int = 1, read_only: bool = False) -> None:
        self._folder = workdir.absolute() / FOLDER
        self._newest: int | None = None
        self._manager = ocp.CheckpointManager(
            self._folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                create=not read_only,
                cleanup_tmp_directories=not read_only,
                enable_async_checkpointing=True,
            ),
            item_handlers={
                # Trained weights shrink by 7 %, and trying takes half of a save's time from the
                # cores that train. To keep each array's sharding, and what its pieces are, takes
                # a quarter of a small state's, for whoever restores it says where it goes.
                "state": ocp.PyTreeCheckpointHandler(
                    use_compression=False,
                    type_handler_registry=ocp.type_handlers.create_type_handler_registry(
                        (
                            jax.Array,
                            ocp.type_handlers.ArrayHandler(enable_write_sharding_file=False),
                        )
                    ),
                ),
                "run": ocp.JsonCheckpointHandler(),
            },
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is KeyboardInterrupt:  # who asks for the end a second time will not wait
            return
        if kind is None or jax.process_count() == 1:
            with self._told_if_unwritable():
                self._manager.close()  # waits; on an error hosts that failed would wait for ever

    def latest_step(self) -> int | None:
        """Step of the newest finished checkpoint; None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        """Begins to save; training may go on at once. A step that is saved already stays.

        Args:
            step: Updates that the state has seen.
            state: A pytree of arrays.
            run: What JSON can hold.
        """
        if step == self._newest:
            return
        self._newest, named = step, _named(state)
        with self._told_if_unwritable(), jax.transfer_guard("allow"):  # saving copies to the host
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(named), run=ocp.args.JsonSave(run)
                ),
            )

    def wait(self) -> None:
        """Returns when the last save is on disk."""
        with self._told_if_unwritable():
            self._manager.wait_until_finished()

    def restore_run(self, step: int) -> dict[str, Any]:
        """What the state in a checkpoint belongs to."""
        with self._told_if_damaged(step):
            args = ocp.args.Composite(run=ocp.args.JsonRestore())
            return self._manager.restore(step, args=args).run

    def restore_state(self, step: int, abstract: Any) -> Any:
        """The state in a checkpoint, on another mesh than it was saved from if asked.

        Args:
            step: Of the checkpoint.
            abstract: Shapes, types and shardings of its leaves, such as `Ensemble.abstract_state`.

        Returns:
            The state, where `abstract` says.

        Raises:
            RunError: If the checkpoint holds other leaves, or leaves of another shape.
        """
        named = _named(abstract)
        self._newest = step
        with self._told_if_damaged(step):
            self._check_leaves(step, named)
            args = ocp.args.PyTreeRestore(
                named, restore_args=ocp.checkpoint_utils.construct_restore_args(named)
            )
            restored = self._manager.restore(step, args=ocp.args.Composite(state=args)).state
        leaves, structure = jax.tree.flatten(abstract)
        return jax.tree.unflatten(
            structure, [_as(leaf, restored[name]) for leaf, name in zip(leaves, named, strict=True)]
        )

    @contextlib.contextmanager
    def _told_if_unwritable(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Orbax tells of a full disk in a ValueError
            saved = self._manager.latest_step()
            kept = "nothing is saved yet" if saved is None else f"step {saved} is saved"
            raise RunError(
                f"A checkpoint can be written. Received: {self._folder}, where it could not: "
                f"{first_line(error)} ({kept}). Make room, and run the same command again."
            ) from error

    @contextlib.contextmanager
    def _told_if_damaged(self, step: int) -> Iterator[None]:
        try:
            yield
        except RunError:
            raise
        except Exception as error:  # Orbax has no error of its own for what it cannot read
            older = [s for s in self._manager.all_steps() if s < step]
            before = f" to go on from step {max(older)}" if older else ""
            raise RunError(
                f"A checkpoint can be read whole. Received: {self._folder / str(step)}, which is "
                f"damaged ({type(error).__name__}). Move that folder away{before}."
            ) from error

    def _check_leaves(self, step: int, named: dict[str, Any]) -> None:
        saved = self._manager.item_metadata(step).state
        for name in sorted(saved.keys() | named.keys()):
            old = _stored(saved[name]) if name in saved else "absent"
            new = _stored(named[name]) if name in named else "absent"
            if old != new:
                raise RunError(
                    "A checkpoint holds the leaves of its own network and optimizer. Received: "
                    f"leaf {name}, {old} in {self._folder / str(step)} and {new} here. The code of "
                    "the network has changed since: use the code that it was trained with, or "
                    "another workdir."
                )


def _stored(leaf: Any) -> str:
    """Type and shape of a leaf in a checkpoint."""
    return f"{np.dtype(leaf.dtype)}{list(leaf.shape)}"


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _numbers(leaf: Any) -> Any:
    """An array, or an abstract one, as it is in a checkpoint."""
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.eval_shape(jax.random.key_data, leaf).update(sharding=leaf.sharding)
    return jax.random.key_data(leaf)


def _as(abstract: Any, numbers: jax.Array) -> jax.Array:
    """The inverse of `_numbers`."""
    if not _is_key(abstract):
        return numbers
    return jax.random.wrap_key_data(numbers, dtype=abstract.dtype)


def _named(state: Any) -> dict[str, Any]:
    """What is saved of each leaf, by name, in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise RunError(
            "Every leaf of a state has a name of its own. Received: two leaves of one name among "
            f"{', '.join(named)}. Rename entries of the parameters that contain a dot."
        )
    return {name: _numbers(leaf) for name, leaf in named.items()}
