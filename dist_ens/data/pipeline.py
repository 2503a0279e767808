"""The batches of one host, which threads read ahead.

The examples of a step are a pure function of the seed and the step, see `dist_ens.sampling.order`.
So the position in the data *is* the step, and there is no iterator to save.
"""

import collections
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from dist_ens.data.splits import Split
from dist_ens.ground.types import PyTree
from dist_ens.sampling import Order

# Threads that read, and the number of calls or batches that they read ahead.
_NUM_THREADS, _NUM_AHEAD = 2, 4
_Wanted = TypeVar("_Wanted")
_Read = TypeVar("_Read")


def calls(first_step: int, last_step: int, steps_per_call: int) -> list[range]:
    """Returns the steps of each call of the update.

    Calls end at multiples of `steps_per_call` and at `last_step`. So a resumed run has the same
    calls as a run that was never stopped.

    >>> calls(7, 12, steps_per_call=4)
    [range(7, 8), range(8, 12)]
    """
    ends = range((first_step // steps_per_call + 1) * steps_per_call, last_step, steps_per_call)
    edges = [first_step, *ends, last_step] if first_step < last_step else []
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def training_batches(
    split: Split,
    order: Order,
    *,
    seed: int,
    host_rows: np.ndarray,
    calls: Sequence[range],
    member_ids: Sequence[int] = (),
) -> Iterator[tuple[PyTree, np.ndarray]]:
    """Yields this host's part of the batches of each call, in order.

    Args:
        split: Training examples.
        order: Order of the examples.
        seed: Seed of the order, in [0, 2**32).
        host_rows: Positions in the global batch that this host feeds, int64[host_batch].
        calls: Steps of each call.
        member_ids: Ids of the members that this host feeds, if each has an order of its own.

    Yields:
        Examples, a pytree with leaves [steps of the call, host_batch, ...], and their positions in
        the split, int32[steps of the call, host_batch]. If `order.per_member` is True, all of these
        have a leading axis [members].
    """

    def batches_of(steps: range) -> tuple[PyTree, np.ndarray]:
        cursor = order.cursor(seed, steps)
        if order.per_member:
            own = [order.indices(cursor, host_rows, np.array([i], np.int32)) for i in member_ids]
            index = np.stack(own)
        else:
            index = order.indices(cursor, host_rows)
        return split.take(index), index

    return _prefetched(calls, batches_of)


def evaluation_batches(
    split: Split, *, global_batch_size: int, host_rows: np.ndarray, num_groups: int = 1
) -> Iterator[dict[str, np.ndarray]]:
    """Yields this host's part of the whole split, in order, with every example exactly once.

    Args:
        split: Examples. Those of several groups are equally many and follow each other.
        global_batch_size: Number of examples of a group in a batch, over all hosts.
        host_rows: Positions in the global batch that this host feeds, int64[host_batch]. Positions
            from `global_batch_size` on only fill the batch up.
        num_groups: Number of groups. A batch has examples of every group.

    Yields:
        The parts of the split, [host_batch, ...], or [groups, host_batch, ...] for several groups,
        and `mask`, bool[host_batch], which is False for the copies that fill a batch up.
    """
    length = len(split) // num_groups
    begins = np.arange(num_groups)[:, None] * length if num_groups > 1 else 0

    def batch(number: int) -> dict[str, np.ndarray]:
        positions = number * global_batch_size + host_rows
        mask = (host_rows < global_batch_size) & (positions < length)
        return {**split.take(begins + np.minimum(positions, length - 1)), "mask": mask}

    numbers = range(-(-length // global_batch_size))
    # Threads would hide nothing.
    return map(batch, numbers) if split.in_memory else _prefetched(numbers, batch)


def _prefetched(source: Sequence[_Wanted], batch_of: Callable[[_Wanted], _Read]) -> Iterator[_Read]:
    """Yields the batches in order, while threads read the next ones."""
    pool = ThreadPoolExecutor(_NUM_THREADS)
    ahead: collections.deque[Future[_Read]] = collections.deque()
    try:
        for wanted in source:
            ahead.append(pool.submit(batch_of, wanted))
            if len(ahead) > _NUM_AHEAD:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
