"""What a member minimises, as a function that methods wrap: the first kind of method."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from dist_ens.losses import Loss

Batch = Mapping[str, jax.Array]
# Of inputs [batch, ...] and a key: the network's outputs and its model state.
Forward = Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]]


class Learnt(NamedTuple):
    """What a member is trained by, and what came of its forward pass.

    Attributes:
        losses: Per example, float[batch, ...].
        outputs: float[batch, ..., outputs].
        model_state: As the network left it.
    """

    losses: jax.Array
    outputs: jax.Array
    model_state: Any


# Of a forward pass, a batch (`inputs`, `labels`), a key and the member's id.
ExampleLoss = Callable[[Forward, Batch, jax.Array, jax.Array], Learnt]
Method = Callable[[ExampleLoss], ExampleLoss]


def of_outputs(loss: Loss) -> ExampleLoss:
    """The loss of the network's outputs, nothing done to the examples."""

    def learn(forward: Forward, batch: Batch, key: jax.Array, member_id: jax.Array) -> Learnt:
        outputs, model_state = forward(batch["inputs"], key)
        return Learnt(loss(outputs, batch["labels"]), outputs, model_state)

    return learn
