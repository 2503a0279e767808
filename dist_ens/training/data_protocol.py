"""The protocol between the training loop and its data."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from dist_ens.ensemble.batches import CallBatches
from dist_ens.layout import Layout
from dist_ens.types import Batch, Shapes


class TrainingData(Protocol):
    """Training data of a run, in any form."""

    @property
    def batch(self) -> Shapes:
        """Shapes and types of a global batch, a pytree of `jax.ShapeDtypeStruct`."""
        ...

    def first_batch(self, layout: Layout) -> Batch:
        """Returns a batch of real examples on the layout, leaves [batch, ...]."""
        ...

    def batches(
        self,
        layout: Layout,
        first_step: int,
        last_step: int,
        steps_per_call: int,
        member_ids: Sequence[int],
        say: Callable[[str], None],
    ) -> Iterator[CallBatches]:
        """Yields the batches of each call on the layout.

        Args:
            layout: Layout of the members and the data.
            first_step: Number of steps already taken.
            last_step: Number of steps of the whole run.
            steps_per_call: Number of steps in one call of the update.
            member_ids: Ids of the members, on which their orders may depend.
            say: Function that prints a sentence.

        Raises:
            UserError: If a batch has another structure, shape or type than the first.
            RunError: If the data ends too early and cannot be started again.
        """
        ...

    def position(self) -> bytes | None:
        """Returns this host's position in the data; None if the step determines it."""
        ...

    def restore(self, position: bytes | None, step: int, say: Callable[[str], None]) -> None:
        """Restores a position, or skips the batches of the steps before if there is none.

        Args:
            position: Position that `position` returned; None without one.
            step: Number of steps that the state has seen.
            say: Function that prints a sentence.
        """
        ...
