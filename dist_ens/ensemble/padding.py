"""Padding of inputs to a few batch sizes, so that few programs are compiled."""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ensemble.batches import rows_of
from dist_ens.errors import UserError
from dist_ens.layout import BATCH, Layout
from dist_ens.state import described, refuse_lists
from dist_ens.types import Array, Inputs, Leaf, Outputs


def padded_inputs(layout: Layout, inputs: Inputs) -> tuple[Inputs, int]:
    """Puts inputs on the layout, padded to the next power of two times the data axis.

    Args:
        layout: Layout with the mesh.
        inputs: Pytree of arrays, leaves [batch, ...].

    Returns:
        The inputs on the layout, padded with copies of the last example, and the number of examples
        before padding.

    Raises:
        UserError: If there are no examples, or the leaves have different lengths.
    """
    # A call for one example takes as long as 30 calls of Python here, so the usual case is short.
    if layout.holds(inputs) and inputs.ndim and _is_whole(inputs.shape[0], layout):
        return inputs, inputs.shape[0]
    refuse_lists(inputs, "the argument inputs")
    size = rows_of(inputs)
    if not size:
        raise UserError(
            f"The inputs are {described(inputs)}. Give arrays [batch, ...] with one row for each "
            "example, and at least one."
        )
    padded_size = layout.data_axis
    while padded_size < size:
        padded_size *= 2
    if padded_size > size:
        inputs = jax.tree.map(lambda leaf: _filled_up(leaf, padded_size), inputs)
    return layout.placed(inputs, BATCH, "The inputs"), size


def _is_whole(size: int, layout: Layout) -> bool:
    """Returns whether a number of examples needs no padding."""
    per_column, rest = divmod(size, layout.data_axis)
    return rest == 0 and per_column > 0 and per_column & (per_column - 1) == 0


def _filled_up(leaf: Leaf, size: int) -> Array:
    xp: ModuleType = jnp if isinstance(leaf, jax.Array) else np
    leaf = xp.asarray(leaf)
    return xp.concatenate([leaf, xp.repeat(leaf[-1:], size - len(leaf), axis=0)])


def unpadded(outputs: Outputs, size: int | None) -> Outputs:
    """Returns outputs [members, batch, ...] of `size` examples; None if nothing was padded."""
    if size is None:
        return outputs

    def cut(leaf: jax.Array) -> jax.Array:
        return leaf if leaf.shape[1] == size else jax.lax.slice_in_dim(leaf, 0, size, axis=1)

    return jax.tree.map(cut, outputs)
