"""Which examples a step takes."""

import numpy as np

from benchmarks.workloads import Workload

_SEED = 0


class Order:
    """Shuffled batches without end: one epoch after another, each in a new order.

    Args:
        workload: Whose examples, batch size and `own_batches` it has.
    """

    def __init__(self, workload: Workload) -> None:
        self._random = np.random.default_rng(_SEED)
        self._num_examples = len(workload.inputs)
        self._batch_size = workload.batch_size
        rows = workload.num_members if workload.own_batches else 1
        self._left = np.empty((rows, 0), np.int64)  # of epochs that were begun

    def draw(self, num_steps: int) -> np.ndarray:
        """The batches of the next steps.

        Returns:
            Positions of examples, int64[rows, num_steps, batch]: a row per member where each has
            batches of its own, else one.
        """
        rows, count = len(self._left), num_steps * self._batch_size
        epochs = max(0, -(-(count - self._left.shape[1]) // self._num_examples))
        # NumPy shuffles 64-bit numbers faster than 32-bit ones.
        drawn = np.tile(np.arange(self._num_examples), (rows, epochs, 1))
        self._random.permuted(drawn, axis=-1, out=drawn)
        stream = np.concatenate([self._left, drawn.reshape(rows, -1)], axis=1)
        self._left = stream[:, count:].copy()
        return stream[:, :count].reshape(rows, num_steps, self._batch_size)
