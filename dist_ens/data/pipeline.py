"""The batches of one host, as Grain pipelines over calls and batches.

The examples of a step are a pure function of (seed, step); see `dist_ens.sampling.order`. So the
position in the data *is* the step, and there is no iterator to save.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from dist_ens.data.source import Split
from dist_ens.data.source_check import check_parts
from dist_ens.sampling import Order

Batch = dict[str, np.ndarray]


def calls(first_step: int, last_step: int, steps_per_call: int) -> list[range]:
    """The steps of each call of the update.

    Calls end at multiples of `steps_per_call` and at `last_step`, so that a run that was stopped
    anywhere goes on with the calls of one that was not.

    Args:
        first_step: Steps already taken.
        last_step: Steps of the whole run.
        steps_per_call: Steps of one call.

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
) -> Iterator[tuple[Any, np.ndarray]]:
    """Yields this host's part of the batches of each call, in order.

    Args:
        split: The training examples.
        order: In which they come.
        seed: Of the order, in [0, 2**32).
        host_rows: Positions in the global batch that this host feeds, int64[host_batch].
        calls: The steps of each.
        member_ids: Where each member has an order of its own, of those that this host feeds.

    Yields:
        Examples, a pytree with leaves [steps of the call, host_batch, ...], and their positions in
        the split, int32[steps of the call, host_batch]. With `member_ids` all of them have a
        leading axis [members].
    """

    def batches_of(steps: range) -> tuple[Any, np.ndarray]:
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
) -> Iterator[Batch]:
    """This host's part of the whole split, in order, every example exactly once.

    Args:
        split: The examples.
        global_batch_size: Examples per batch over all hosts; all batches have this size.
        host_rows: Positions in the global batch that this host feeds, int64[host_batch].
        num_groups: The split is so many equally long sets, one after the other; a batch is of all
            of them.

    Yields:
        `inputs`, `labels` and, if the split has them, `weights`, leaves [host_batch, ...], of
        several groups [groups, host_batch, ...]; and `mask`, bool[host_batch]: False where the last
        batch is filled up with copies that must not count.
    """
    length = len(split) // num_groups
    begins = np.arange(num_groups)[:, None] * length if num_groups > 1 else 0

    def batch(number: int) -> Batch:
        positions = number * global_batch_size + host_rows
        mask = positions < length
        examples = split.take(begins + np.minimum(positions, length - 1))
        check_parts("The split", examples, may_have_weights=True)
        return {**examples, "mask": mask}

    count = -(-length // global_batch_size)
    return _prefetched(range(count), batch)


def _prefetched(source: Sequence[Any], batch_of: Callable[[Any], Any]) -> Iterator[Any]:
    import grain  # takes a third of a second, and a set on the device needs it only at the end

    dataset = grain.MapDataset.source(source).map(batch_of)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))
