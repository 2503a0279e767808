"""The order of the examples in the ways written by hand."""

import numpy as np

from benchmarks.workloads import Workload

_SEED = 0


class Order:
    """An endless order of shuffled batches, new in every epoch.

    Args:
        workload: Workload with the examples, the batch size and `own_batches`.
    """

    def __init__(self, workload: Workload) -> None:
        self._random = np.random.default_rng(_SEED)
        self._num_examples = len(workload.inputs)
        self._batch_size = workload.batch_size
        rows = workload.num_members if workload.own_batches else 1
        self._left = np.empty((rows, 0), np.int64)  # The rest of the last epoch.

    def draw(self, num_steps: int) -> np.ndarray:
        """Returns the batches of the next steps.

        Args:
            num_steps: Number of steps.

        Returns:
            Positions of examples, int64[rows, num_steps, batch]. There is one row for each member
            if `own_batches` is set, and one row otherwise.
        """
        rows, count = len(self._left), num_steps * self._batch_size
        epochs = max(0, -(-(count - self._left.shape[1]) // self._num_examples))
        # NumPy shuffles 64-bit numbers faster than 32-bit ones.
        drawn = np.tile(np.arange(self._num_examples), (rows, epochs, 1))
        self._random.permuted(drawn, axis=-1, out=drawn)
        stream = np.concatenate([self._left, drawn.reshape(rows, -1)], axis=1)
        self._left = stream[:, count:].copy()
        return stream[:, :count].reshape(rows, num_steps, self._batch_size)
