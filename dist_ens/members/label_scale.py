"""Standardisation of labels, by a mean and a standard deviation in every member's model state."""

import jax
import jax.numpy as jnp

from dist_ens.ground.state import State
from dist_ens.ground.types import Inputs, Key, ModelState, Outputs, Params
from dist_ens.members.member import Member, with_forward
from dist_ens.members.modes import Apply

NETWORK, MEAN, STD = "network", "label_mean", "label_std"


def with_label_scale(member: Member) -> Member:
    """Returns a member whose model state also holds the labels' scale, first mean 0 and std 1."""

    def init(key: Key, inputs: Inputs) -> tuple[Params, ModelState]:
        params, model_state = member.init(key, inputs)
        return params, {NETWORK: model_state, MEAN: jnp.float32(0), STD: jnp.float32(1)}

    def beside_scale(apply: Apply) -> Apply:
        def forward(
            params: Params, model_state: ModelState, inputs: Inputs, key: Key | None, train: bool
        ) -> tuple[Outputs, ModelState]:
            outputs, of_network = apply(params, model_state[NETWORK], inputs, key, train)
            return outputs, {**model_state, NETWORK: of_network}

        return forward

    def parts_of(params: Params, model_state: ModelState) -> tuple[Params, ModelState]:
        params, of_network = member.parts_of(params, model_state[NETWORK])
        return params, {**model_state, NETWORK: of_network}

    return with_forward(member, beside_scale, init=init, parts_of=parts_of)


def standardized(labels: jax.Array, model_state: ModelState) -> jax.Array:
    """Returns labels minus their mean, divided by their standard deviation, float[...]."""
    return (labels - model_state[MEAN]) / model_state[STD]


def has_label_scale(model_state: ModelState) -> bool:
    """Returns whether a model state holds a scale of labels; see `with_label_scale`."""
    return isinstance(model_state, dict) and model_state.keys() == {NETWORK, MEAN, STD}


def member_label_scale(state: State) -> tuple[jax.Array, jax.Array]:
    """Returns the labels' mean and standard deviation as arrays on the devices, float32[]."""
    return state.model_state[MEAN][0], state.model_state[STD][0]
