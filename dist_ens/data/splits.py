"""Splits: examples with random access."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import jax
import numpy as np

from dist_ens.ground.errors import UserError
from dist_ens.ground.narrowing import dtype_in_jax, held_dtype, narrowed
from dist_ens.ground.state import held_array
from dist_ens.ground.types import PyTree, Shapes

_AT_A_TIME = 10_000  # Number of examples that are taken at once to read a whole split.


@runtime_checkable
class Split(Protocol):
    """Examples with random access, which any class with these three members offers.

    >>> isinstance(ArraySplit(np.zeros(2), np.zeros(2)), Split)
    True
    """

    @property
    def in_memory(self) -> bool:
        """Whether the examples are in memory already, so that taking all of them is cheap."""
        ...

    def __len__(self) -> int:
        """Returns the number of examples."""
        ...

    def take(self, indices: np.ndarray) -> PyTree:
        """Returns the examples at some positions.

        Args:
            indices: Positions in the split, int64[...].

        Returns:
            Dict of `inputs`, [..., *input], and `labels`, [..., *label]. For a loss function of
            your own it may be any pytree of arrays.
        """
        ...


@dataclasses.dataclass(frozen=True)
class ArraySplit:
    """A split in memory, in the types in which JAX holds its arrays.

    Attributes:
        inputs: Inputs, [examples, ...]. A type wider than 32 bits is narrowed.
        labels: Labels, [examples, ...]. Floats are converted to float32, and other numbers to
            int32.

    Raises:
        UserError: If a value does not fit in the type to which it is converted.

    >>> split = ArraySplit(np.array([[1.5], [2.5]]), np.array([0, 1]))
    >>> split.take(np.array([1]))
    {'inputs': array([[2.5]], dtype=float32), 'labels': array([1], dtype=int32)}
    """

    in_memory: ClassVar[bool] = True
    inputs: np.ndarray
    labels: np.ndarray

    def __post_init__(self) -> None:
        inputs, labels = self.inputs, self.labels
        if held_dtype(inputs.dtype) != inputs.dtype:  # Any other type is kept, also one of keys.
            object.__setattr__(self, "inputs", narrowed(inputs, held_dtype(inputs.dtype), "inputs"))
        label_dtype = np.float32 if labels.dtype.kind == "f" else np.int32
        object.__setattr__(self, "labels", narrowed(labels, label_dtype, "labels"))

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the examples at some positions, int64[...]."""
        return {"inputs": self.inputs[indices], "labels": self.labels[indices]}


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

    >>> TreeSplit({"x": np.array([1.5, 2.5])}).take(np.array([1]))
    {'x': array([2.5], dtype=float32)}
    """

    in_memory: ClassVar[bool] = True

    def __init__(self, tree: PyTree, name: str = "the data") -> None:
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        names = [f"{name}{jax.tree_util.keystr(path)}" for path, _ in leaves]
        held = [held_array(leaf, n) for n, (_, leaf) in zip(names, leaves, strict=True)]
        self.tree = jax.tree.unflatten(structure, held)
        lengths = {leaf.shape[:1] for leaf in held}
        if len(lengths) != 1 or lengths & {(), (0,)}:
            shapes = (f"{n} {list(leaf.shape)}" for n, leaf in zip(names, held, strict=True))
            raise UserError(
                f"The arrays of {name} have different lengths, or no examples: "
                f"{', '.join(shapes) or 'no arrays'}. Give every array one row for each example, "
                "or batches without rows as a list of batches."
            )
        ((self._length,),) = lengths

    def __len__(self) -> int:
        return self._length

    def take(self, indices: np.ndarray) -> PyTree:
        """Returns the examples at some positions, int64[...], with leaves [..., *example]."""
        return jax.tree.map(lambda leaf: leaf[indices], self.tree)


@dataclasses.dataclass(frozen=True)
class PartOfSplit:
    """A subset of the examples of a split: those at some positions, int64[examples]."""

    whole: Split
    positions: np.ndarray

    @property
    def in_memory(self) -> bool:
        """Whether the examples are in memory already."""
        return self.whole.in_memory

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, indices: np.ndarray) -> PyTree:
        """Returns the examples at some positions in the subset, int64[...]."""
        return self.whole.take(self.positions[indices])


@dataclasses.dataclass(frozen=True)
class LabelScaledSplit:
    """A split of dicts whose labels, under a key, become `(label - mean) / std`.

    Mean and std are float64[], or float64[targets] for several targets.
    """

    split: Split
    key: str
    mean: np.ndarray
    std: np.ndarray

    @property
    def in_memory(self) -> bool:
        """Whether the examples are in memory already."""
        return self.split.in_memory

    def __len__(self) -> int:
        return len(self.split)

    def take(self, indices: np.ndarray) -> PyTree:
        """Returns the examples at some positions, int64[...], with standardised labels."""
        examples = self.split.take(indices)
        labels = (np.asarray(examples[self.key], np.float64) - self.mean) / self.std
        return {**examples, self.key: labels.astype(np.float32)}


def parts_of(split: Split, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the parts of all examples with some names, and takes no other parts of arrays."""
    if isinstance(split, PartOfSplit):
        whole = parts_of(split.whole, names)
        return {name: leaf[split.positions] for name, leaf in whole.items()}
    if isinstance(split, TreeSplit):
        examples = split.tree
    elif isinstance(split, ArraySplit):
        examples = {"inputs": split.inputs, "labels": split.labels}
    else:
        examples = split.take(np.arange(len(split)))
    return {name: np.asarray(examples[name]) for name in names if name in examples}


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


def batch_shapes_of(split: Split, size: int) -> Shapes:
    """Returns the shapes and types of a batch of `size` examples."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape), leaf.dtype), example_shapes_of(split)
    )


def in_blocks(split: Split, positions: np.ndarray) -> Iterator[PyTree]:
    """Yields the examples at some positions, int64[n], few of them at a time."""
    for first in range(0, len(positions), _AT_A_TIME):
        yield split.take(positions[first : first + _AT_A_TIME])
