"""Inputs of predictions, padded to a few batch sizes so that few programs are compiled."""

from contextlib import AbstractContextManager
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ensemble.batches import rows_of
from dist_ens.ground.errors import UserError
from dist_ens.ground.narrowing import check_finite_inputs
from dist_ens.ground.state import State, described, refuse_lists, require_state
from dist_ens.ground.types import Array, Inputs, Leaf, Outputs
from dist_ens.layout import BATCH, REPLICATED, Layout
from dist_ens.losses import Prediction
from dist_ens.members.member import explained_network

if TYPE_CHECKING:
    from dist_ens.ensemble.ensemble import Ensemble


class AppliedCalibration(Protocol):
    """A calibration of predictions, such as `dist_ens.Calibration`."""

    def applied(
        self,
        prediction: Prediction,
        ensemble: "Ensemble",
        state: State,
        inputs: Inputs,
        weights: np.ndarray | None,
    ) -> Prediction:
        """Returns the calibrated prediction of members with these weights, of sum 1."""


def placed_inputs(
    ensemble: "Ensemble", state: State, inputs: Inputs
) -> tuple["Ensemble", State, Inputs, int | None]:
    """Returns ensemble, needed state and inputs on one layout, and the number of examples.

    The number is None if the inputs hold no rows, and are therefore not padded.
    """
    if not ensemble.member.has_apply:
        raise UserError(
            "This ensemble cannot predict: its member has no apply. Give one to as_member or "
            "Ensemble.from_step, or call the network yourself with state.params."
        )
    require_state(state)
    if ensemble.objective is not None:  # A loss function may take inputs that are missing.
        check_finite_inputs("The argument inputs", inputs)
    here, state = ensemble.at(state)
    size: int | None = None
    has_rows = ensemble.batch_specs == "batch" and rows_of(inputs) is not None
    if ensemble.objective is None and not has_rows:
        refuse_lists(inputs, "the argument inputs", and_numbers=False)
        placed = here.layout.placed(inputs, REPLICATED, "The inputs")
    else:
        placed, size = padded_inputs(here.layout, inputs)
    return here, here.programs.needed(state), placed, size


def padded_inputs(layout: Layout, inputs: Inputs) -> tuple[Inputs, int]:
    """Returns inputs filled up with the last example, and the number of examples."""
    # A call for one example takes as long as 30 calls of Python here, so the usual case is short.
    holds = layout.holds(inputs) and inputs.ndim > 0
    if holds and inputs.shape[0] == _padded_size(inputs.shape[0], layout.data_axis):
        return inputs, inputs.shape[0]
    refuse_lists(inputs, "the argument inputs")
    size = rows_of(inputs)
    if not size:
        raise UserError(
            f"The inputs are {described(inputs)}. Give arrays [batch, ...] with one row for each "
            "example, and at least one."
        )
    padded_size = _padded_size(size, layout.data_axis)
    if padded_size > size:
        inputs = jax.tree.map(lambda leaf: _filled_up(leaf, padded_size), inputs)
    return layout.placed(inputs, BATCH, "The inputs"), size


def _padded_size(size: int, columns: int) -> int:
    return columns << (-(-size // columns) - 1).bit_length()


def _filled_up(leaf: Leaf, size: int) -> Array:
    xp: ModuleType = jnp if isinstance(leaf, jax.Array) else np
    leaf = xp.asarray(leaf)
    return xp.concatenate([leaf, xp.repeat(leaf[-1:], size - len(leaf), axis=0)])


def explained_inputs(inputs: Inputs) -> AbstractContextManager[None]:
    """Returns a context that turns what a network raises for inputs into a `UserError`."""
    advice = "Give inputs like those of the training data, a single example as [1, ...]."
    return explained_network("The network does not take the inputs", inputs, advice)


def unpadded(outputs: Outputs, size: int | None) -> Outputs:
    """Returns outputs [members, batch, ...] of `size` examples; None if nothing was padded."""
    if size is None:
        return outputs

    def cut(leaf: jax.Array) -> jax.Array:
        return leaf if leaf.shape[1] == size else jax.lax.slice_in_dim(leaf, 0, size, axis=1)

    return jax.tree.map(cut, outputs)
