"""The records of a run's training metrics."""

from collections.abc import Mapping

import numpy as np

from dist_ens.callbacks.protocol import Service
from dist_ens.callbacks.records import training_record
from dist_ens.training.runner import Runner, crossed


class Recording(Service):
    """The service that records the training metrics every few steps, and at the last step."""

    def __init__(self, run: Runner, every_steps: int) -> None:
        self._run, self._every_steps, self._step = run, every_steps, run.step

    def read(self, step: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Records the metrics of a call that have arrived, if a record is due."""
        previous, self._step = self._step, step
        info = self._run.info
        if crossed(self._every_steps, previous, step) or step == info.last_step:
            self._run.write(step, training_record(info.member_ids, metrics))
