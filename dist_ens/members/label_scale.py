"""Standardisation of labels, by a mean and a standard deviation in every member's model state."""

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.layout import MEMBERS, Layout, to_host
from dist_ens.members.member import Member, with_forward
from dist_ens.members.modes import Apply
from dist_ens.state import State
from dist_ens.types import Inputs, Key, ModelState, Outputs, Params

_NETWORK, _MEAN, _STD = "network", "label_mean", "label_std"


def with_label_scale(member: Member) -> Member:
    """Returns a member whose model state also holds the labels' mean and standard deviation.

    The mean is 0 and the standard deviation 1 until `set_label_scale` sets them.
    """

    def init(key: Key, inputs: Inputs) -> tuple[Params, ModelState]:
        params, model_state = member.init(key, inputs)
        return params, {_NETWORK: model_state, _MEAN: jnp.float32(0), _STD: jnp.float32(1)}

    def beside_scale(apply: Apply) -> Apply:
        def forward(
            params: Params, model_state: ModelState, inputs: Inputs, key: Key | None, train: bool
        ) -> tuple[Outputs, ModelState]:
            outputs, of_network = apply(params, model_state[_NETWORK], inputs, key, train)
            return outputs, {**model_state, _NETWORK: of_network}

        return forward

    def parts_of(params: Params, model_state: ModelState) -> tuple[Params, ModelState]:
        params, of_network = member.parts_of(params, model_state[_NETWORK])
        return params, {**model_state, _NETWORK: of_network}

    return with_forward(member, beside_scale, init=init, parts_of=parts_of)


def standardized(labels: jax.Array, model_state: ModelState) -> jax.Array:
    """Returns labels minus their mean, divided by their standard deviation, float[...]."""
    return (labels - model_state[_MEAN]) / model_state[_STD]


def has_label_scale(model_state: ModelState) -> bool:
    """Returns whether a model state holds a scale of labels; see `with_label_scale`."""
    return isinstance(model_state, dict) and model_state.keys() == {_NETWORK, _MEAN, _STD}


def begin_label_scale(layout: Layout, state: State) -> State:
    """Returns a state whose model state also holds a scale of labels, its own if it has one."""
    given = state.model_state
    if has_label_scale(given):
        return state
    return state._replace(model_state={_NETWORK: given, **_held(layout, 0.0, 1.0)})


def set_label_scale(layout: Layout, state: State, labels: np.ndarray) -> State:
    """Returns a state that standardises labels by the statistics of the training labels.

    Args:
        layout: Layout of the state.
        state: State of the ensemble.
        labels: All training labels, float[examples, ...], not all equal.
    """
    values = np.asarray(labels, np.float64)
    held = _held(layout, float(values.mean()), float(values.std()))
    return state._replace(model_state={**state.model_state, **held})


def _held(layout: Layout, mean: float, std: float) -> dict[str, jax.Array]:
    """Returns the mean and the standard deviation as every member holds them, float32[members]."""
    return {
        name: layout.put(np.full(layout.num_members, number, np.float32), MEMBERS)
        for name, number in ((_MEAN, mean), (_STD, std))
    }


def label_scale(state: State) -> tuple[float, float]:
    """Returns the labels' mean and standard deviation that a state holds, as Python numbers."""
    mean, std = to_host((state.model_state[_MEAN], state.model_state[_STD]))
    return float(mean[0]), float(std[0])


def member_label_scale(state: State) -> tuple[jax.Array, jax.Array]:
    """Returns the labels' mean and standard deviation as arrays on the devices, float32[]."""
    return state.model_state[_MEAN][0], state.model_state[_STD][0]
