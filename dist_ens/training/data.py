"""The data that `fit` takes: arrays, a source, or an iterable of batches."""

import collections.abc
import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import multihost_utils

from dist_ens.data import Source, Split, TreeSplit, calls, example_shapes_of
from dist_ens.ensemble import Batches
from dist_ens.errors import RunError, UserError
from dist_ens.feed import feed
from dist_ens.layout import BATCH, BATCHES, Layout
from dist_ens.sampling import Order
from dist_ens.state import held_array, leaf_name, leaf_type

DEFAULT_BATCH_SIZE = 128


class TrainingData(Protocol):
    """Training data of a run, in any form."""

    @property
    def batch(self) -> Any:
        """Shapes and types of a global batch, a pytree of `jax.ShapeDtypeStruct`."""
        ...

    @property
    def epoch_steps(self) -> int | None:
        """Number of steps of an epoch; None if it is not known."""
        ...

    def first_batch(self, layout: Layout) -> Any:
        """Returns a batch of real examples on the layout, leaves [batch, ...]."""
        ...

    def batches(
        self, layout: Layout, first_step: int, last_step: int, steps_per_call: int, say: Any
    ) -> Iterator[Any]:
        """Yields the batches of each call, on the layout."""
        ...

    def position(self) -> bytes | None:
        """Returns this host's position in the data; None if the step says it."""
        ...

    def restore(self, position: bytes | None, step: int, say: Callable[[str], None]) -> None:
        """Goes to a position, or to the batch after `step` batches."""
        ...


@dataclasses.dataclass(frozen=True)
class OrderedSplit:
    """Examples with random access, and the order in which members see them.

    Attributes:
        split: Training examples.
        order: Order of the examples.
        seed: Seed of the order, in [0, 2**32).
    """

    split: Split
    order: Order
    seed: int

    @property
    def batch(self) -> Any:
        """See `TrainingData`."""
        size = self.order.global_batch_size
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype),
            example_shapes_of(self.split),
        )

    @property
    def epoch_steps(self) -> int | None:
        """See `TrainingData`; a last partial batch counts, as it is filled from the next epoch."""
        return math.ceil(self.order.epoch_length / self.order.global_batch_size)

    def first_batch(self, layout: Layout) -> Any:
        """See `TrainingData`."""
        return layout.put(self.split.take(layout.host_rows(self.order.global_batch_size)), BATCH)

    def batches(
        self, layout: Layout, first_step: int, last_step: int, steps_per_call: int, say: Any
    ) -> Iterator[Any]:
        """See `TrainingData`."""
        return feed(
            self.split,
            self.order,
            layout,
            seed=self.seed,
            first_step=first_step,
            last_step=last_step,
            steps_per_call=steps_per_call,
            say=say,
        )

    def position(self) -> bytes | None:
        """See `TrainingData`: the examples of a step are a function of seed and step."""
        return None

    def restore(self, position: bytes | None, step: int, say: Callable[[str], None]) -> None:
        """See `TrainingData`."""


class BatchIterable:
    """Batches of the user's: a function that returns an iterator, an iterable, or an iterator.

    Args:
        source: The iterable. One that is no iterator is started anew when it ends.

    Raises:
        UserError: If it yields no batch, or one that is no pytree of arrays, or the hosts' batches
            have different shapes. Every host must call this.
    """

    def __init__(self, source: Any) -> None:
        self._source = source
        self._is_iterator = isinstance(source, collections.abc.Iterator)
        self._iterator = self._start()
        self._num_passes, self._num_batches = 0, 0
        self._has_dropped = False
        self._first = self._next_of_pass()
        if self._first is None:
            raise UserError("The data yielded no batch. Give an iterable of at least one.")
        self._shapes = _shapes(self._first)
        _check_hosts_agree(self._shapes)
        self._waiting: Any = self._first

    @property
    def batch(self) -> Any:
        """See `TrainingData`; of several hosts the parts together."""
        hosts = jax.process_count()
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] * hosts, *leaf.shape[1:]), leaf.dtype),
            self._shapes,
        )

    @property
    def epoch_steps(self) -> int | None:
        """See `TrainingData`."""
        return None

    def first_batch(self, layout: Layout) -> Any:
        """See `TrainingData`."""
        return layout.put(self._first, BATCH)

    def batches(
        self, layout: Layout, first_step: int, last_step: int, steps_per_call: int, say: Any
    ) -> Iterator[Any]:
        """See `TrainingData`."""
        for steps in calls(first_step, last_step, steps_per_call):
            host_batches = [self._next(step, last_step, say) for step in steps]
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *host_batches)
            yield Batches(layout.put(stacked, BATCHES))

    def position(self) -> bytes | None:
        """See `TrainingData`: the iterator's own state, if it has one."""
        get_state = getattr(self._iterator, "get_state", None)
        if get_state is None or self._waiting is not None:
            return None
        state = get_state()
        if isinstance(state, bytes):
            return b"bytes" + self._num_passes.to_bytes(8, "big") + state
        return b"json " + self._num_passes.to_bytes(8, "big") + json.dumps(state).encode()

    def restore(self, position: bytes | None, step: int, say: Callable[[str], None]) -> None:
        """See `TrainingData`."""
        if step == 0:
            return
        if position is not None:
            kind, passes, state = position[:5], position[5:13], position[13:]
            self._iterator.set_state(  # type: ignore[attr-defined]  # it has get_state
                state if kind == b"bytes" else json.loads(state)
            )
            self._num_passes = int.from_bytes(passes, "big")
            self._num_batches, self._waiting = step, None
            return
        say(
            f"The data iterator has no state to restore (get_state and set_state): it is started "
            f"anew and advanced by {step:,} batches."
        )
        for number in range(step):
            self._next(number, step, say)

    def _start(self) -> Iterator[Any]:
        source = self._source
        if self._is_iterator:
            return source
        return iter(source() if callable(source) and not hasattr(source, "__iter__") else source)

    def _next_of_pass(self) -> Any:
        """Returns the next batch as NumPy arrays; None where the iterator ends."""
        try:
            batch = next(self._iterator)
        except StopIteration:
            return None
        return _as_arrays(batch, self._num_batches)

    def _next(self, step: int, last_step: int, say: Any) -> Any:
        """Returns the batch of a step, of the shapes of the first."""
        batch, self._waiting = self._waiting, None
        while True:
            if batch is None:
                batch = self._next_of_pass()
            if batch is None:
                self._start_again(step, last_step)
                batch = self._next_of_pass()
                if batch is None:
                    raise RunError(
                        f"The data yielded no batch when it was started again after step {step:,}. "
                        "Give an iterable that can be started several times, or a function that "
                        "returns a new iterator."
                    )
            self._num_batches += 1
            if self._fits(batch, step, say):
                return batch
            batch = None

    def _start_again(self, step: int, last_step: int) -> None:
        if self._is_iterator:
            raise RunError(
                f"The data iterator ended after {self._num_batches:,} batches, and the run has "
                f"{last_step:,} steps. Give an iterable that can be started again (such as a list, "
                f"a loader, or a function that returns an iterator), or steps={step}."
            )
        self._iterator = self._start()
        self._num_passes += 1

    def _fits(self, batch: Any, step: int, say: Any) -> bool:
        """Returns whether a batch has the shapes of the first; False for a shorter last one."""
        structure: Any = jax.tree.structure(batch)
        expected: Any = jax.tree.structure(self._shapes)
        if structure != expected:
            raise UserError(
                f"The batch of step {step} is a pytree {structure}, and the first was {expected}. "
                "Yield batches of one structure."
            )
        named = zip(
            jax.tree_util.tree_leaves_with_path(batch), jax.tree.leaves(self._shapes), strict=True
        )
        is_shorter = False
        for (path, leaf), first in named:
            if leaf.shape == first.shape and leaf.dtype == first.dtype:
                continue
            is_part = leaf.shape[1:] == first.shape[1:] and leaf.dtype == first.dtype
            if is_part and leaf.shape[0] < first.shape[0]:
                is_shorter = True
                continue
            raise UserError(
                f"Leaf {leaf_name(path)} of the batch of step {step} is {leaf_type(leaf)}, and "
                f"that of the first batch {leaf_type(first)}. Yield batches of one shape and type."
            )
        if is_shorter and not self._has_dropped:
            self._has_dropped = True
            say("A batch shorter than the first, such as the last of a pass, is dropped.")
        return not is_shorter


def training_data(
    data: Any, batch_size: int | None, seed: int, layout: Layout
) -> OrderedSplit | BatchIterable:
    """Returns what `fit` was given as training data.

    Args:
        data: A pytree of arrays (a dict, a tuple or an array), a `Source`, an iterable of batches,
            or a function that returns an iterator.
        batch_size: Number of examples of a step, over all hosts. Default: 128, or all if there are
            fewer.
        seed: Seed of the order of the examples.
        layout: Layout of the members and the data.

    Raises:
        UserError: If it is none of these, or `batch_size` is given with an iterable of batches.
    """
    if isinstance(data, OrderedSplit):
        return data
    if isinstance(data, Source):
        return _ordered(data.train, batch_size, seed, layout, data.spec.num_groups)
    if is_tree_of_arrays(data):
        return _ordered(TreeSplit(data), batch_size, seed, layout)
    is_iterable = hasattr(data, "__iter__") or hasattr(data, "__next__") or callable(data)
    if not is_iterable:
        raise UserError(
            f"The data is a {type(data).__name__}. Give a dict of arrays, a source of "
            "dist_ens.data, an iterable of batches, or a function that returns an iterator."
        )
    if batch_size is not None:
        raise UserError(
            f"batch_size={batch_size} was given with an iterable, whose batches have their own "
            "size. Leave it out, or give the data as arrays."
        )
    return BatchIterable(data)


def is_tree_of_arrays(data: Any) -> bool:
    """Returns whether data is a pytree of arrays and not an iterable of batches.

    A list is an iterable of batches.
    """
    if isinstance(data, list | collections.abc.Iterator):
        return False
    leaves = jax.tree.leaves(data)
    return bool(leaves) and all(
        hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not hasattr(leaf, "__next__")
        for leaf in leaves
    )


def _ordered(
    split: Split, batch_size: int | None, seed: int, layout: Layout, num_groups: int = 1
) -> OrderedSplit:
    count = len(split) // num_groups
    if batch_size is None:
        columns = layout.data_axis
        batch_size = max(columns, min(DEFAULT_BATCH_SIZE, count) // columns * columns)
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer):
        raise UserError(f"batch_size is {batch_size!r}. Give a whole number of at least 1.")
    if not 1 <= batch_size <= count:
        raise UserError(
            f"batch_size={batch_size} is not between 1 and the {count:,} training examples."
        )
    layout.check_batch_size("batch_size", int(batch_size))
    several = num_groups > 1
    order = Order(count, int(batch_size), per_member=several, num_groups=num_groups)
    return OrderedSplit(split, order, seed)


def _as_arrays(batch: Any, number: int) -> Any:
    """Returns a batch of any library as NumPy arrays in the types in which JAX holds them."""

    def held(path: Any, leaf: Any) -> np.ndarray:
        name = f"Leaf {leaf_name(path)} of batch {number}"
        way_out = "Yield pytrees of arrays [batch, ...]."
        array = held_array(leaf, name, way_out)
        if not array.ndim:
            raise UserError(f"{name} is one number. {way_out}")
        return array

    arrays = jax.tree_util.tree_map_with_path(held, batch)
    leaves = jax.tree_util.tree_leaves_with_path(arrays)
    lengths = {len(leaf) for _, leaf in leaves}
    if len(lengths) != 1:
        listed = ", ".join(f"{jax.tree_util.keystr(p)} {list(leaf.shape)}" for p, leaf in leaves)
        raise UserError(
            f"The arrays of batch {number} have different lengths: {listed or 'there are none'}. "
            "Yield pytrees of arrays with one row for each example."
        )
    return arrays


def _shapes(batch: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)


def _check_hosts_agree(shapes: Any) -> None:
    """Raises a `UserError` on every host if the hosts' batches have different shapes."""
    if jax.process_count() == 1:
        return
    text = str(jax.tree_util.tree_leaves_with_path(shapes))
    digest = np.frombuffer(hashlib.sha256(text.encode()).digest()[:16], np.int32)
    digests = multihost_utils.process_allgather(digest)
    if (digests != digests[0]).any():
        different = [i for i, row in enumerate(digests) if (row != digests[0]).any()]
        raise UserError(
            f"The hosts yield batches of different shapes: hosts {different} differ from host 0, "
            f"and this host ({jax.process_index()}) yields {text}. Yield the same shapes on every "
            "host."
        )
