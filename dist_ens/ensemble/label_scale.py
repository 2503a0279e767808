"""The scale of the labels in the state of an ensemble."""

import jax
import numpy as np

from dist_ens.ground.state import State
from dist_ens.layout import MEMBERS, Layout, to_host
from dist_ens.members.member import MEAN, NETWORK, STD, has_label_scale


def begin_label_scale(layout: Layout, state: State) -> State:
    """Returns a state whose model state also holds a scale of labels, its own if it has one."""
    given = state.model_state
    if has_label_scale(given):
        return state
    return state._replace(model_state={NETWORK: given, **_held(layout, 0.0, 1.0)})


def set_label_scale(layout: Layout, state: State, labels: np.ndarray) -> State:
    """Returns a state that standardises labels by the statistics of all training labels."""
    values = np.asarray(labels, np.float64)
    held = _held(layout, float(values.mean()), float(values.std()))
    return state._replace(model_state={**state.model_state, **held})


def _held(layout: Layout, mean: float, std: float) -> dict[str, jax.Array]:
    """Returns the mean and the standard deviation as every member holds them, float32[members]."""
    return {
        name: layout.put(np.full(layout.num_members, number, np.float32), MEMBERS)
        for name, number in ((MEAN, mean), (STD, std))
    }


def label_scale(state: State) -> tuple[float, float]:
    """Returns the labels' mean and standard deviation that a state holds, as Python numbers."""
    mean, std = to_host((state.model_state[MEAN], state.model_state[STD]))
    return float(mean[0]), float(std[0])
