"""Names for what an argument is: parameters, a batch, a key.

Python cannot say which arrays a pytree has, so to a type checker most of these names mean `Any`.
They are for the reader, in the signatures of this package and of functions written for it:

>>> import jax
>>> def loss_fn(
...     params: Params, model_state: ModelState, batch: Batch, key: Key
... ) -> tuple[jax.Array, tuple[ModelState, Metrics]]:
...     return ((batch["inputs"] @ params["w"]) ** 2).mean(), (model_state, {})
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, TypeVar

import jax
import numpy as np

Tree = TypeVar("Tree")
"""A pytree that a function returns with the structure with which it was given."""

SomeArray = TypeVar("SomeArray", jax.Array, np.ndarray)
"""An array of JAX or of NumPy, of which a function returns the same kind as it was given."""

PyTree: TypeAlias = Any
"""Arrays in tuples, lists, dicts and registered classes, nested in any way, or one array."""

Leaf: TypeAlias = Any
"""A leaf of a pytree: an array of JAX or NumPy, a number, or the shape and type of an array."""

KeyPath: TypeAlias = tuple[Any, ...]
"""Path from the root of a pytree to one of its leaves, as JAX gives it."""

Structure: TypeAlias = Any
"""Structure of a pytree, as `jax.tree.structure` returns it."""

Shapes: TypeAlias = PyTree
"""A pytree of `jax.ShapeDtypeStruct`, or of arrays of which only shapes and types are used."""

Specs: TypeAlias = PyTree
"""A pytree of `jax.sharding.PartitionSpec`, or its first levels: a spec holds for all below it."""

Axes: TypeAlias = PyTree
"""A pytree of axes, as `in_axes` of `jax.vmap`: an int or None holds for all below."""

Array: TypeAlias = jax.Array | np.ndarray
"""An array of JAX or of NumPy."""

Key: TypeAlias = jax.Array
"""A key of random numbers, as `jax.random.key` makes it, []."""

Network: TypeAlias = Any
"""A network of any library, or a function that makes one; see `dist_ens.members.as_member`."""

Params: TypeAlias = PyTree
"""Parameters of a network, a pytree of floating-point arrays."""

Gradients: TypeAlias = PyTree
"""Gradients of the parameters, or their updates, a pytree of the same structure."""

ModelState: TypeAlias = PyTree
"""Other state of a network, such as running statistics, a pytree of arrays; `()` if none."""

OptState: TypeAlias = PyTree
"""State of an optimizer, a pytree of arrays."""

Batch: TypeAlias = PyTree
"""Examples of one step, a pytree of arrays [batch, ...], such as a dict of inputs and labels.

A loss function may take any pytree of arrays, such as a graph, or None."""

Inputs: TypeAlias = PyTree
"""Inputs of a network for a batch, a pytree of arrays [batch, ...]."""

Labels: TypeAlias = PyTree
"""Labels of a batch, in most cases one array: int[batch] for classes, float[batch] for numbers."""

Weights: TypeAlias = Any
"""Weights of the examples of a batch, float[batch]; None if all are 1."""

Outputs: TypeAlias = PyTree
"""Outputs of a network for a batch, in most cases one array such as logits [batch, classes]."""

Data: TypeAlias = Any
"""Examples to train on or to score: arrays [examples, ...], a source, or an iterable of batches.

None trains a loss function that draws its own examples."""

Callback: TypeAlias = Any
"""A function that is called after updates, or an object with hooks; see `dist_ens.callbacks`."""

Score: TypeAlias = Any
"""A score of predictions: a float, or float64[draws] of resamples."""

Metrics: TypeAlias = dict[str, jax.Array]
"""Metrics of a step by name, float32[] of one member, float32[members] of an ensemble."""


class Optimizer(Protocol):
    """An optimizer of one member, such as `optax.adam(1e-3)`."""

    @property
    def init(self) -> Callable[[Params], OptState]:
        """Returns the state with which it begins, `init(params)`."""

    @property
    def update(self) -> Callable[..., tuple[Gradients, OptState]]:
        """Returns updates and the new state, `update(gradients, state, params)`."""


OptimizerOfMember: TypeAlias = Optimizer | Callable[..., Optimizer]
"""An optimizer of all members, or a function `make(hyper)` of a member's settings."""
