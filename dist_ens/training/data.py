"""The training data that `fit` takes: arrays, a source, an iterable of batches, or None."""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

from dist_ens.callbacks import RunInfo
from dist_ens.data import Source, Split, TreeSplit, batch_shapes_of, calls, shared
from dist_ens.data.feed import feed
from dist_ens.data.kinds import is_tree_of_arrays
from dist_ens.ensemble import Batches
from dist_ens.ensemble.batches import CallBatches
from dist_ens.evaluation.examples import parts_of_objective
from dist_ens.evaluation.label_checks import check_examples
from dist_ens.ground.numbers import whole_number
from dist_ens.ground.types import Data, Shapes
from dist_ens.layout import BATCH, Layout
from dist_ens.losses import Objective
from dist_ens.sampling import Order
from dist_ens.training.arguments import FitArguments
from dist_ens.training.batch_iterable import BatchIterable
from dist_ens.training.data_protocol import TrainingData

_DEFAULT_BATCH_SIZE = 128


class OrderedSplit(TrainingData):
    """Examples with random access, and the order in which members see them."""

    def __init__(self, split: Split, order: Order, seed: int) -> None:
        self.split: Split = split
        self.order: Order = order
        self._seed = seed

    @property
    @override
    def batch(self) -> Shapes:
        return batch_shapes_of(self.split, self.order.global_batch_size)

    @property
    @override
    def index(self) -> Shapes:
        return jax.ShapeDtypeStruct((self.order.global_batch_size,), jnp.int32)

    @override
    def batches(
        self, layout: Layout, run: RunInfo, steps_per_call: int, say: Callable[[str], None]
    ) -> Iterator[CallBatches]:
        return feed(
            self.split,
            self.order,
            layout,
            seed=self._seed,
            first_step=run.first_step,
            last_step=run.last_step,
            steps_per_call=steps_per_call,
            member_ids=run.member_ids,
            say=say,
        )


class NoData(TrainingData):
    """The training data of a loss that draws its own examples from its key: empty batches."""

    batch: Shapes = None

    @override
    def batches(
        self, layout: Layout, run: RunInfo, steps_per_call: int, say: Callable[[str], None]
    ) -> Iterator[CallBatches]:
        for steps in calls(run.first_step, run.last_step, steps_per_call):
            yield Batches.put(layout, [None] * len(steps), BATCH)


@dataclasses.dataclass(frozen=True)
class _CheckedSplit(Split):
    """A split that is not in memory, whose labels are checked when they are read."""

    whole: Split
    objective: Objective

    @property
    @override
    def in_memory(self) -> bool:
        return False

    @override
    def __len__(self) -> int:
        return len(self.whole)

    @override
    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        examples = self.whole.take(indices)
        if self.objective.LABELS in examples:
            rows = {
                name: leaf.reshape(-1, *leaf.shape[indices.ndim :])
                for name, leaf in examples.items()
                if name in (self.objective.LABELS, self.objective.WEIGHTS)
            }
            check_examples(self.objective, rows, "the training data")
        return examples


def training_data(given: FitArguments, data: Data) -> TrainingData:
    """Returns the training data of a run, given the arguments of `fit` and the data to train on."""
    ensemble, layout = given.ensemble, given.ensemble.layout
    objective = ensemble.trained_objective
    if isinstance(data, Source):
        split, num_groups = data.train, data.spec.num_groups
    elif is_tree_of_arrays(data):
        split, num_groups = TreeSplit(data), 1
    elif data is None:
        return NoData()
    else:
        return BatchIterable(data, layout, objective, ensemble.batch_specs)
    if objective is not None:
        read = parts_of_objective(objective, split)
        # A method of the user's may read any key.
        split = split if ensemble.methods else read
    count, size, rule = len(split) // num_groups, given.batch_size, given.order or shared()
    if size is None:
        columns, length = layout.data_axis, rule.order(count, 0, num_groups).epoch_length
        size = max(columns, min(_DEFAULT_BATCH_SIZE, length) // columns * columns)
    size = whole_number("batch_size", size, least=1)
    layout.check_batch_size("batch_size", size)
    order = rule.order(count, size, num_groups)
    if objective is not None and not split.in_memory:
        split = _CheckedSplit(split, objective)
    return OrderedSplit(split, order, ensemble.seed)
