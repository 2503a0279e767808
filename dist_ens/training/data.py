"""The training data that `fit` takes: arrays, a source, an iterable of batches, or None."""

import collections.abc
import dataclasses
from collections.abc import Callable, Iterator
from fractions import Fraction

import jax
import numpy as np
from typing_extensions import override

from dist_ens.callbacks import RunInfo
from dist_ens.data import OrderRule, Source, Split, TreeSplit, calls, example_shapes_of, shared
from dist_ens.data.feed import feed
from dist_ens.ensemble import Batches, Ensemble
from dist_ens.ensemble.batches import CallBatches
from dist_ens.evaluation.label_checks import check_examples
from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.numbers import whole_number
from dist_ens.ground.types import Data, Shapes
from dist_ens.layout import BATCH, Layout
from dist_ens.losses import Objective
from dist_ens.sampling import Order
from dist_ens.training.batch_iterable import BatchIterable
from dist_ens.training.data_protocol import TrainingData

DEFAULT_BATCH_SIZE = 128
_SHARED = shared()  # The order of the members if none is given.
EPOCH = "epoch"  # Value of `eval_every` for an evaluation at the end of each epoch.


@dataclasses.dataclass(frozen=True)
class OrderedSplit(TrainingData):
    """Examples with random access, and the order in which members see them."""

    split: Split
    order: Order
    seed: int

    @property
    @override
    def batch(self) -> Shapes:
        size = self.order.global_batch_size
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype),
            example_shapes_of(self.split),
        )

    @override
    def batches(
        self, layout: Layout, run: RunInfo, steps_per_call: int, say: Callable[[str], None]
    ) -> Iterator[CallBatches]:
        return feed(
            self.split,
            self.order,
            layout,
            seed=self.seed,
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


def training_data(
    data: Data, batch_size: int | None, ensemble: Ensemble, order: OrderRule = _SHARED
) -> TrainingData:
    """Returns the data of `fit` as training data; see the arguments of `fit`."""
    seed, layout, objective = ensemble.seed, ensemble.layout, ensemble.trained_objective
    if isinstance(data, OrderedSplit):
        if objective is None or data.split.in_memory:
            return data
        return dataclasses.replace(data, split=_CheckedSplit(data.split, objective))
    if isinstance(data, Source):
        ordered = _ordered(data.train, batch_size, seed, layout, order, data.spec.num_groups)
        return training_data(ordered, None, ensemble)
    if is_tree_of_arrays(data):
        return _ordered(TreeSplit(data), batch_size, seed, layout, order)
    if order != _SHARED:
        raise UserError(
            f"order={order} needs examples with positions. Give arrays or a source, or leave order "
            "out."
        )
    is_data = data is None or hasattr(data, "__iter__") or callable(data)
    if isinstance(data, type) or not is_data:
        raise UserError(
            f"The data is {kind_of(data)}. Give a dict of arrays, an instance of a source of "
            "dist_ens.data, an iterable of batches, or a function that returns an iterator."
        )
    if batch_size is not None:
        raise UserError(
            f"batch_size={batch_size} needs data as arrays: the batches of an iterable have their "
            "own size. Leave it out."
        )
    if data is None:
        return NoData()
    return BatchIterable(data, layout, objective, ensemble.batch_specs)


def last_step_of(data: TrainingData, steps: int | None, epochs: float | None) -> int:
    """Returns the number of steps of the whole run, given `steps` and `epochs` of `fit`."""
    if epochs is None:
        return int(steps or 0)
    return _order_of(data, f"epochs={epochs}", "steps").num_steps(epochs)


def eval_steps_of(data: TrainingData, eval_every: int | str | None) -> int | Fraction | None:
    """Returns the number of steps between two evaluations, which of an epoch need not be whole."""
    if not isinstance(eval_every, str):
        return eval_every
    return _order_of(data, f"eval_every={eval_every!r}", "a number of steps").epoch_steps


def _order_of(data: TrainingData, given: str, instead: str) -> Order:
    if not isinstance(data, OrderedSplit):
        raise UserError(
            f"{given} needs data whose number of examples is known: arrays or a source. Give "
            f"{instead}."
        )
    return data.order


def is_tree_of_arrays(data: Data) -> bool:
    """Returns whether data is a pytree of arrays, and not an iterable of batches as a list is."""
    if isinstance(data, list | collections.abc.Iterator):
        return False
    leaves = jax.tree.leaves(data)
    return bool(leaves) and all(
        hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not hasattr(leaf, "__next__")
        for leaf in leaves
    )


def _ordered(
    split: Split,
    batch_size: int | None,
    seed: int,
    layout: Layout,
    order: OrderRule,
    num_groups: int = 1,
) -> OrderedSplit:
    count = len(split) // num_groups
    if batch_size is None:
        columns = layout.data_axis
        batch_size = max(columns, min(DEFAULT_BATCH_SIZE, count) // columns * columns)
    whole_number("batch_size", batch_size, least=1)
    if not 1 <= batch_size <= count:
        raise UserError(
            f"batch_size={batch_size} is not between 1 and the {count:,} training examples. Give a "
            "number in this range."
        )
    layout.check_batch_size("batch_size", int(batch_size))
    return OrderedSplit(split, order.order(count, int(batch_size), num_groups), seed)
