"""Training data from an iterable of batches."""

import base64
import collections.abc
import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from typing_extensions import override

from dist_ens.callbacks import RunInfo
from dist_ens.data import calls
from dist_ens.data.class_names import are_names
from dist_ens.data.kinds import batches_in
from dist_ens.ensemble import Batches
from dist_ens.ensemble.batches import CallBatches, rows_of
from dist_ens.evaluation.label_checks import check_examples
from dist_ens.ground.errors import RunError, UserError, counted
from dist_ens.ground.json_text import Json
from dist_ens.ground.narrowing import dtype_in_jax
from dist_ens.ground.state import (
    described,
    differing,
    held_array,
    leaf_name,
    leaf_types,
    refuse_lists,
)
from dist_ens.ground.types import Batch, Data, KeyPath, Leaf, Shapes, Specs
from dist_ens.layout import (
    REPLICATED,
    Layout,
    broadcast,
    check_rows,
    global_shapes,
    specs_of_batch,
)
from dist_ens.losses import Objective
from dist_ens.processes import cluster
from dist_ens.training.data_protocol import TrainingData

# Stands for the absence of a batch, since None is a batch without arrays.
_NO_BATCH: Batch = object()
_DIGEST_NUMBERS = 4
T = TypeVar("T")


class BatchIterable(TrainingData):
    """Training data from an iterable, an iterator, or a function that returns an iterator.

    On several hosts, a batch holds the examples of the mesh columns in which the host has a device,
    `Layout.host_columns`. An iterable is started again when it ends, unless it is an iterator. The
    labels of an objective are checked in each batch.
    """

    def __init__(
        self,
        source: Data,
        layout: Layout,
        objective: Objective | None = None,
        batch_specs: Specs = "batch",
    ) -> None:
        self._source, self._layout, self._objective = source, layout, objective
        self._is_iterator = isinstance(source, collections.abc.Iterator)
        self._num_passes, self._num_batches = 0, 0
        self._has_dropped = False
        # Number of steps that the state had seen when it was given the data's first batch.
        self._began_at: int | None = None
        first = self._waiting = _read_together(self._first_of_pass)
        self._shapes = _shapes(first)
        if jax.process_count() > 1:
            _check_shapes_agree(self._shapes)
        self._specs = specs_of_batch(batch_specs, first)
        check_rows(layout, first, self._specs)
        if jax.process_count() > 1:
            _check_columns_agree(layout, first, self._specs)

    @property
    @override
    def batch(self) -> Shapes:
        return global_shapes(self._layout, self._shapes, self._specs)

    @override
    def batches(
        self, layout: Layout, run: RunInfo, steps_per_call: int, say: Callable[[str], None]
    ) -> Iterator[CallBatches]:
        if self._began_at is None:
            self._began_at = run.first_step
        self._first_step = run.first_step

        def read(steps: range) -> CallBatches:
            host_batches = _read_together(partial(self._next_of_call, steps, run.last_step, say))
            return Batches.put(layout, host_batches, self._specs)

        return map(read, calls(run.first_step, run.last_step, steps_per_call))

    @override
    def position(self, step: int) -> Json:
        # The batches of the first call may have been drawn before the run takes them.
        return (step == self._first_step and self._first_position) or self._position()

    def _position(self) -> Json:
        """Returns the position after the batches that were drawn."""
        get_state = getattr(self._iterator, "get_state", None)
        if get_state is None:
            return {"began_at": self._began_at} if self._began_at else None
        state = copy.deepcopy(get_state())
        is_bytes = isinstance(state, bytes)
        kept = {"bytes": base64.b64encode(state).decode()} if is_bytes else {"json": state}
        return {"passes": self._num_passes, **kept}

    @override
    def restore(self, position: Json, step: int, say: Callable[[str], None]) -> None:
        position = position or {}
        self._began_at = position.get("began_at", 0)
        if "passes" in position:
            is_bytes = "bytes" in position
            self._iterator.set_state(  # type: ignore[attr-defined]  # it has get_state
                base64.b64decode(position["bytes"]) if is_bytes else position["json"]
            )
            self._num_passes, self._first_position = position["passes"], position
            self._num_batches, self._waiting = step, _NO_BATCH
            return
        say(
            f"The data iterator has no state to restore (get_state and set_state): it is started "
            f"anew and advanced by {counted(step - self._began_at, 'batch')}."
        )
        _read_together(partial(self._skip, range(self._began_at, step), say))
        if step > self._began_at:
            self._first_position = self._position()

    def _next_of_call(
        self, steps: range, last_step: int, say: Callable[[str], None]
    ) -> list[Batch]:
        # A loader may fill the same buffer with each batch.
        return [jax.tree.map(np.array, self._next(step, last_step, say)) for step in steps]

    def _skip(self, steps: range, say: Callable[[str], None]) -> None:
        for step in steps:
            self._next(step, steps.stop, say)

    def _next_of_pass(self) -> Batch:
        """Returns the next batch as NumPy arrays; `_NO_BATCH` at the end of the iterator."""
        objective, name = self._objective, f"batch {self._num_batches:,}"
        try:
            batch = _as_arrays(next(self._iterator), name, objective)
        except StopIteration:
            return _NO_BATCH
        if objective is not None and isinstance(batch, Mapping) and objective.LABELS in batch:
            check_examples(objective, batch, name)
        return batch

    def _next(self, step: int, last_step: int, say: Callable[[str], None]) -> Batch:
        """Returns the batch of a step. It has the shapes of the first batch."""
        batch, self._waiting = self._waiting, _NO_BATCH
        while True:
            if batch is _NO_BATCH:
                batch = self._next_of_pass()
            if batch is _NO_BATCH and self._is_iterator:
                raise RunError(
                    f"The data iterator ended after {counted(self._num_batches, 'batch')}, and the "
                    f"run has {counted(last_step, 'step')}. Give an iterable that can be started "
                    f"again, such as a function that returns an iterator, or steps={step}."
                )
            if batch is _NO_BATCH:
                self._num_passes += 1
                batch = self._first_of_pass()
            self._num_batches += 1
            if self._fits(batch, step):
                return batch
            batch = _NO_BATCH
            if not self._has_dropped:
                self._has_dropped = True
                say("A batch shorter than the first, such as the last of a pass, is dropped.")

    def _first_of_pass(self) -> Batch:
        """Starts the iterable, or goes on with an iterator, and returns the next batch."""
        self._iterator = batches_in(self._source)
        if self._num_batches == 0:
            self._first_position = self._position()
        batch = self._next_of_pass()
        if batch is _NO_BATCH:
            again = f" when it was started again after {counted(self._num_batches, 'batch')}"
            raise UserError(
                f"The data yielded no batch{again if self._num_batches else ''}. Give an iterable "
                "of batches, which can be started often, or a function that returns an iterator."
            )
        return batch

    def _fits(self, batch: Batch, step: int) -> bool:
        """Returns whether a batch has the shapes of the first; False if it only has fewer rows."""
        shapes, rows, most = _shapes(batch), rows_of(batch), rows_of(self._shapes)
        if jax.tree.flatten(shapes) == jax.tree.flatten(self._shapes):
            return True
        # Only rows are fewer in the last batch of a pass. A smaller graph is another shape.
        if rows is not None and most is not None and rows < most:
            part = jax.tree.map(
                lambda leaf: leaf.update(shape=(rows, *leaf.shape[1:])), self._shapes
            )
            is_part = jax.tree.flatten(shapes) == jax.tree.flatten(part)
            if is_part and REPLICATED not in broadcast(self._specs, batch):
                return False
        first, found = leaf_types(self._shapes), leaf_types(shapes)
        name = next(iter(differing(first, found)), "(the whole)")
        raise UserError(
            f"Leaf {name} of the batch of step {step} is {found.get(name, 'absent')}, and that of "
            f"the first batch {first.get(name, 'absent')}. Yield batches of one shape."
        )


def _as_arrays(batch: Batch, name: str, objective: Objective | None) -> Batch:
    """Returns a batch of any library as NumPy arrays of types that JAX holds."""

    def held(path: KeyPath, leaf: Leaf) -> np.ndarray:
        way_out = "Yield pytrees of arrays [batch, ...]."
        if are_names(leaf):
            way_out += " Convert names with numpy.searchsorted(sorted_names, labels)."
        return held_array(leaf, f"Leaf {leaf_name(path)} of {name}", way_out)

    refuse_lists(batch, name, and_numbers=False)
    arrays = jax.tree_util.tree_map_with_path(held, batch)
    if objective is not None and rows_of(arrays) is None:
        raise UserError(
            f"The arrays of {name} have different lengths: {described(arrays)}. "
            "Yield pytrees of arrays with one row for each example."
        )
    return arrays


def _shapes(batch: Batch) -> Shapes:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype_in_jax(leaf.dtype)), batch
    )


def _read_together(read: Callable[[], T]) -> T:
    """Returns what a function reads on this host. If it fails on one host, it fails on all.

    Otherwise the other hosts would wait for that host in the next step. Every host must call this.
    """
    if jax.process_count() == 1:
        return read()
    error: Exception | None = None
    try:
        result = read()
    except Exception as raised:  # The iterator of a user may raise anything.
        error = raised
    failed = cluster.hosts_with(error is not None)
    if error is not None:
        raise error
    if failed:
        raise RunError(
            f"Process {failed[0]} has no batch for the next step. Its output says why. Correct its "
            "data, then run the same command again."
        )
    return result


def _check_shapes_agree(shapes: Shapes) -> None:
    """Raises a `UserError` on every host if the hosts' batches have different shapes."""
    text = str(jax.tree_util.tree_leaves_with_path(shapes)).encode()
    of_hosts = multihost_utils.process_allgather(_digest([np.frombuffer(text, np.uint8)]))
    different = np.flatnonzero((of_hosts != of_hosts[:1]).any(axis=1)).tolist()
    if different:
        raise UserError(
            f"The hosts yield batches of different shapes: hosts {different} differ from host 0, "
            f"and this host ({jax.process_index()}) yields {described(shapes)}. Yield the "
            "same shapes on every host."
        )


def _digests_of_hosts(layout: Layout, batch: Batch, specs: Specs) -> np.ndarray:
    """Returns hashes of the rows of each column and of the shared leaves, [hosts, columns + 1, n].

    The rows of this host's part divide over its columns. The hash of other columns is 0.
    """
    parts = len(layout.host_columns)
    digests = np.zeros((layout.data_axis + 1, _DIGEST_NUMBERS), np.int32)
    leaves = list(zip(jax.tree.leaves(batch), broadcast(specs, batch), strict=True))
    rows = [leaf for leaf, spec in leaves if spec != REPLICATED]
    for number, column in enumerate(layout.host_columns):
        digests[column] = _digest(np.split(x, parts)[number] if parts > 1 else x for x in rows)
    digests[-1] = _digest(leaf for leaf, spec in leaves if spec == REPLICATED)
    return multihost_utils.process_allgather(digests)


def _check_columns_agree(layout: Layout, batch: Batch, specs: Specs) -> None:
    """Raises a `UserError` on every host if hosts yield different arrays where they should agree.

    A shared leaf of the first batch is the same on all hosts, any other on the hosts that feed the
    same column.
    """
    of_hosts = _digests_of_hosts(layout, batch, specs)
    for column in range(layout.data_axis):
        feeding = np.flatnonzero(of_hosts[:, column].any(axis=1))
        if (of_hosts[feeding, column] != of_hosts[feeding[:1], column]).any():
            raise UserError(
                f"Hosts {feeding.tolist()} feed column {column} of the mesh {layout}, and yield "
                "different examples for it. Yield the same examples on hosts that share columns "
                "(layout.host_columns), or give each host columns of its own with "
                "Layout.make(num_members, ensemble_axis=1)."
            )
    if (of_hosts[:, -1] != of_hosts[:1, -1]).any():
        raise UserError(
            "The hosts yield different values of the leaves that batch_specs calls shared. Yield "
            "the same values on every host."
        )


def _digest(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Returns a hash of the bytes of arrays, int32[_DIGEST_NUMBERS]."""
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()
    return np.frombuffer(digest[: 4 * _DIGEST_NUMBERS], np.int32)
