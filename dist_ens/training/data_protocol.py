"""The protocol between the training loop and its data."""

import abc
from collections.abc import Callable, Iterator

from dist_ens.callbacks.protocol import RunInfo, Service
from dist_ens.data import Split
from dist_ens.ensemble.batches import CallBatches
from dist_ens.ground.json_text import Json
from dist_ens.ground.types import Shapes
from dist_ens.layout import Layout
from dist_ens.sampling import Order


class TrainingData(Service, abc.ABC):
    """Training data of a run, in any form.

    Attributes:
        split: Examples with positions; None if the data yields batches.
        order: Order in which members see the examples; None with `split`.
    """

    split: Split | None = None
    order: Order | None = None

    @property
    @abc.abstractmethod
    def batch(self) -> Shapes:
        """Shapes and types of a global batch, a pytree of `jax.ShapeDtypeStruct`."""

    @property
    def index(self) -> Shapes:
        """Shape and type of the positions of a batch's examples; None if they have none."""
        return None

    @abc.abstractmethod
    def batches(
        self, layout: Layout, run: RunInfo, steps_per_call: int, say: Callable[[str], None]
    ) -> Iterator[CallBatches]:
        """Yields the batches of each call of a run on a layout."""

    def position(self, step: int) -> Json:
        """Returns the position of this host at a step of the run; None if the step is enough."""
        return None

    def restore(self, position: Json, step: int, say: Callable[[str], None]) -> None:
        """Restores a position, or skips the batches before a step if there is none."""
