"""Data of a user's, of any kind, as examples to score."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from typing_extensions import override

from dist_ens.data import Source, Spec, Split, TreeSplit
from dist_ens.data.class_names import are_names, listed, with_class_numbers
from dist_ens.data.kinds import batches_in, is_tree_of_arrays
from dist_ens.ensemble.batches import rows_of
from dist_ens.evaluation.label_checks import check_keys
from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.narrowing import host_array
from dist_ens.ground.state import refuse_lists
from dist_ens.ground.types import Batch, Data, PyTree, Specs
from dist_ens.losses import Objective

_AT_A_TIME = 1000  # Number of examples that `of_all` reads at a time.


class Examples(NamedTuple):
    """The examples to score, their source's description, and the names of the classes of arrays."""

    split: Split
    spec: Spec | None = None
    class_names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class WholeBatches(Split):
    """Batches of one structure that hold no rows. A loss function scores one after another."""

    batches: Sequence[Batch]

    @property
    @override
    def in_memory(self) -> bool:
        return True

    @override
    def __len__(self) -> int:
        return len(self.batches)

    @override
    def take(self, indices: np.ndarray) -> Batch:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *(self.batches[i] for i in indices))


def examples_of(
    data: Data | Examples, names: Sequence[str] = (), batch_specs: Specs = "batch"
) -> Examples:
    """Returns data as examples with random access; an iterable of batches is read completely.

    `names` are those of the classes of training. `batch_specs` are as in `Ensemble`.
    """
    if isinstance(data, Source):
        if names and data.spec.class_names not in (None, tuple(names)):
            raise UserError(
                f"The classes of the source are {listed(data.spec.class_names or ())}, and those "
                f"of training {listed(names)}. Give a source of the same classes."
            )
        return Examples(data.test, data.spec)
    if isinstance(data, Examples):
        return data._replace(class_names=tuple(names)) if names else data
    if isinstance(data, Split):
        return Examples(data, class_names=tuple(names))
    if not is_tree_of_arrays(data):
        data = _batches_of(data)
        if batch_specs != "batch" or any(rows_of(batch) is None for batch in data):
            return Examples(WholeBatches(data), class_names=tuple(names))
    arrays = with_class_numbers(arrays_of(data), Objective.LABELS, names, "The data")
    return Examples(TreeSplit(arrays), class_names=tuple(names))


def arrays_of(data: Data) -> PyTree:
    """Returns a pytree of arrays [examples, ...]: the data itself, or its batches joined."""
    if is_tree_of_arrays(data):
        return data
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *_batches_of(data))


def parts_of_objective(objective: Objective, split: Split) -> Split:
    """Returns a split with the parts that an objective reads; raises if one is absent."""
    example = split.take(np.zeros(1, np.int64))
    found = example if isinstance(example, Mapping) else {}
    check_keys(objective, found)
    absent = {objective.INPUTS, objective.LABELS} - {*found}
    if absent:
        raise UserError(
            f"The objective {objective.name} takes data with the key {min(absent)!r}: got "
            f"{', '.join(map(repr, found)) or 'no dict'}. Give a dict with it."
        )
    if not isinstance(split, TreeSplit):
        return split
    # An objective reads no other part of the data.
    names = (objective.INPUTS, objective.LABELS, objective.WEIGHTS)
    return TreeSplit({name: split.tree[name] for name in names if name in split.tree})


def labels_of(split: Split) -> np.ndarray:
    """Returns the labels of all examples."""
    return of_all(split, lambda batch: np.asarray(batch[Objective.LABELS]))


def of_all(split: Split, fn: Callable[[Batch], np.ndarray]) -> np.ndarray:
    """Returns the results of a function for all examples, of which it gets some at a time."""
    rows = np.arange(len(split))
    firsts = range(0, len(split), _AT_A_TIME)
    return np.concatenate([fn(split.take(rows[at : at + _AT_A_TIME])) for at in firsts])


def _batches_of(data: Data) -> list[Batch]:
    if isinstance(data, Mapping | tuple):  # A list is an iterable of batches.
        refuse_lists(data, "the data")
    batches = []
    for number, batch in enumerate(batches_in(data)):
        refuse_lists(batch, f"batch {number} of the data", and_numbers=False)
        batches.append(jax.tree.map(host_array, batch))
        leaves = jax.tree.leaves(batches[-1])
        if any(are_names(leaf) and not leaf.ndim for leaf in leaves):
            found = ", ".join(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)
            raise UserError(
                f"The data is {kind_of(data)}, and its item {number} is no batch, but holds "
                f"{found}. Give a dict of arrays [examples, ...], or an iterable of such dicts."
            )
    if not batches:
        raise UserError("The data has no batches. Give at least one.")
    return batches
