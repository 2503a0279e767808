"""The protocol between the training loop and its data."""

import abc
from collections.abc import Callable, Iterator

from dist_ens.callbacks.protocol import RunInfo, Service
from dist_ens.ensemble.batches import CallBatches
from dist_ens.ground.json_text import Json
from dist_ens.ground.types import Shapes
from dist_ens.layout import Layout


class TrainingData(Service, abc.ABC):
    """Training data of a run, in any form. Its state is the position of this host in the data."""

    @property
    @abc.abstractmethod
    def batch(self) -> Shapes:
        """Shapes and types of a global batch, a pytree of `jax.ShapeDtypeStruct`."""

    @abc.abstractmethod
    def batches(
        self, layout: Layout, run: RunInfo, steps_per_call: int, say: Callable[[str], None]
    ) -> Iterator[CallBatches]:
        """Yields the batches of each call of a run on a layout."""

    def state(self) -> Json:
        """Returns the position of this host in the data; None if the step determines it."""
        return None

    def restore(self, position: Json, step: int, say: Callable[[str], None]) -> None:
        """Restores a position, or skips the batches before a step if there is none."""
