"""The batches of one host, as Grain pipelines over calls and batches.

The examples of a step are a pure function of (seed, step): the stream of examples is one shuffled
epoch after another, and step `s` takes positions `s * global_batch_size` and on. So the position in
the data *is* the step, and there is no iterator to save.
"""

from collections.abc import Iterator
from functools import lru_cache

import grain
import numpy as np

from dist_ens.data.source import Split

Batch = dict[str, np.ndarray]


def training_batches(
    split: Split,
    *,
    seed: int,
    shuffle: bool,
    global_batch_size: int,
    host_rows: np.ndarray,
    first_step: int,
    last_step: int,
    steps_per_call: int,
) -> Iterator[Batch]:
    """This host's part of the batches of each call, in order.

    Calls end at multiples of `steps_per_call` and at `last_step`, so that a run that was stopped
    anywhere goes on with the calls of one that was not.

    Args:
        split: The training examples.
        seed: Of the order, in [0, 2**32).
        shuffle: A new order in every epoch; False: the order of the split.
        global_batch_size: Examples per step over all hosts.
        host_rows: Positions in the global batch that this host feeds, int64[host_batch].
        first_step: Steps already taken.
        last_step: Steps of the whole run.
        steps_per_call: Steps of one call.

    Yields:
        `inputs` and `labels`, leaves [steps of the call, host_batch, ...].
    """
    order = lru_cache(maxsize=2)(
        lambda epoch: epoch_order(seed, epoch, len(split)) if shuffle else np.arange(len(split))
    )
    first_call = first_step // steps_per_call

    def call(number: int) -> Batch:
        start = max(first_step, (first_call + number) * steps_per_call)
        stop = min(last_step, (first_call + number + 1) * steps_per_call)
        positions = np.arange(start, stop)[:, None] * global_batch_size + host_rows
        epochs, within = np.divmod(positions, len(split))
        indices = np.empty_like(positions)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            indices[here] = order(int(epoch))[within[here]]
        return split.take(indices)

    calls = -(-last_step // steps_per_call) - first_call if last_step > first_step else 0
    return iter(_prefetched(grain.MapDataset.range(calls).map(call)))


def evaluation_batches(
    split: Split, *, global_batch_size: int, host_rows: np.ndarray
) -> Iterator[Batch]:
    """This host's part of the whole split, in order, every example exactly once.

    Args:
        split: The examples.
        global_batch_size: Examples per batch over all hosts; all batches have this size.
        host_rows: Positions in the global batch that this host feeds, int64[host_batch].

    Yields:
        `inputs` and `labels`, leaves [host_batch, ...], and `mask`, bool[host_batch]: False where
        the last batch is filled up with copies that must not count.
    """

    def batch(number: int) -> Batch:
        positions = number * global_batch_size + host_rows
        mask = positions < len(split)
        return {**split.take(np.minimum(positions, len(split) - 1)), "mask": mask}

    count = -(-len(split) // global_batch_size)
    return iter(_prefetched(grain.MapDataset.range(count).map(batch)))


def epoch_order(seed: int, epoch: int, num_examples: int) -> np.ndarray:
    """The order of the examples in an epoch: a permutation, int64[num_examples].

    By NumPy's legacy generator, whose streams NumPy promises never to change (NEP 19); a whole
    epoch at a time, since Grain's own shuffle costs 10 microseconds per example.
    """
    return np.random.RandomState([seed, epoch]).permutation(num_examples)


def _prefetched(dataset: grain.MapDataset) -> grain.IterDataset:
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
