"""Examples in memory, as a pytree of arrays."""

from typing import ClassVar

import jax
import numpy as np

from dist_ens.data import Split
from dist_ens.errors import UserError
from dist_ens.host_keys import dtype_in_jax
from dist_ens.state import held_array
from dist_ens.types import KeyPath, Leaf, PyTree, Shapes


class TreeSplit:
    """A split in memory: any pytree of arrays with one row for each example.

    Arrays are kept in the types in which JAX holds them: float64 becomes float32, and int64 becomes
    int32.

    Args:
        tree: Pytree of arrays, leaves [examples, ...].
        name: Name of the data in error messages.

    Attributes:
        tree: Pytree of NumPy arrays, leaves [examples, ...].

    Raises:
        UserError: If a leaf holds no numbers, or a number that does not fit in 32 bits. Also if the
            leaves have different lengths, or there are no examples.
    """

    in_memory: ClassVar[bool] = True

    def __init__(self, tree: PyTree, name: str = "the data") -> None:
        def held(path: KeyPath, leaf: Leaf) -> np.ndarray:
            return held_array(leaf, f"{name}{jax.tree_util.keystr(path)}")

        self.tree = jax.tree_util.tree_map_with_path(held, tree)
        lengths = {
            f"{name}{jax.tree_util.keystr(path)}": list(leaf.shape)
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.tree)
        }
        firsts = {tuple(shape[:1]) for shape in lengths.values()}
        if len(firsts) != 1 or () in firsts:
            listed = ", ".join(f"{name} {shape}" for name, shape in lengths.items()) or "no arrays"
            raise UserError(
                f"The arrays of {name} have different lengths: {listed}. Give every array one row "
                "for each example, or batches without rows as a list of batches."
            )
        self._length = firsts.pop()[0]
        if not self._length:
            raise UserError(f"{name} has no examples. Give at least one.")

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> PyTree:
        """Returns the examples at some positions, int64[...], with leaves [..., *example]."""
        return jax.tree.map(lambda leaf: leaf[indices], self.tree)


class LabelScaledSplit:
    """A split of dicts whose labels are standardised, `(label - mean) / std`.

    Args:
        split: Split of dicts with labels in the original unit.
        key: Key of the labels.
        mean: Mean that is subtracted from the labels.
        std: Standard deviation by which the labels are then divided.
    """

    def __init__(self, split: Split, key: str, mean: float, std: float) -> None:
        self._split, self._key, self._mean, self._std = split, key, mean, std

    @property
    def in_memory(self) -> bool:
        """Whether the examples are in memory already."""
        return self._split.in_memory

    def __len__(self) -> int:
        return len(self._split)

    def take(self, indices: np.ndarray) -> PyTree:
        """Returns the examples at some positions, int64[...], with standardised labels."""
        examples = self._split.take(indices)
        labels = (np.asarray(examples[self._key], np.float64) - self._mean) / self._std
        return {**examples, self._key: labels.astype(np.float32)}


def example_bytes_of(split: Split) -> int:
    """Returns the number of bytes of one example of a split, over all its leaves."""
    example = split.take(np.zeros(1, np.int64))
    return sum(int(np.asarray(leaf).nbytes) for leaf in jax.tree.leaves(example))


def example_shapes_of(split: Split) -> Shapes:
    """Returns the shapes and types of one example, as a pytree of `jax.ShapeDtypeStruct`."""
    example = split.take(np.zeros(1, np.int64))
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], dtype_in_jax(leaf.dtype)), example
    )
