"""Optimizers: what one member's parameter does, worked by hand."""

import jax.numpy as jnp
import optax
import pytest

from dist_ens.config import OptimizerConfig
from dist_ens.optimizers import make_optimizer

pytestmark = pytest.mark.quick


def walk(config, gradients, start=1.0):
    """A parameter after each update."""
    optimizer, param = make_optimizer(OptimizerConfig(**config)), jnp.float32(start)
    state, places = optimizer.init(param), []
    for gradient in gradients:
        updates, state = optimizer.update(jnp.float32(gradient), state, param)
        param = optax.apply_updates(param, updates)
        places.append(float(param))
    return places


@pytest.mark.parametrize(
    ("config", "gradients", "expected"),
    [
        # 1 - 0.1 * 2 = 0.8
        ({"name": "sgd", "learning_rate": 0.1}, [2.0], [0.8]),
        # Velocities 2, then 0.9 * 2 + 2 = 3.8: 0.8, then 0.8 - 0.38 = 0.42
        ({"name": "sgd", "learning_rate": 0.1, "momentum": 0.9}, [2.0, 2.0], [0.8, 0.42]),
        # The penalty's gradient is 0.5 * 1: 1 - 0.1 * 0.5 = 0.95
        ({"name": "sgd", "learning_rate": 0.1, "weight_decay": 0.5}, [0.0], [0.95]),
        # Adam's first step has the learning rate's length: 1 - 0.1 = 0.9
        ({"name": "adam", "learning_rate": 0.1}, [2.0], [0.9]),
        # Decoupled: without a gradient 1 - 0.1 * 0.5 * 1 = 0.95
        ({"name": "adamw", "learning_rate": 0.1, "weight_decay": 0.5}, [0.0], [0.95]),
        # A gradient of 4 is clipped to 1, one of 0.5 is not: 0.9, then 0.9 - 0.05
        ({"name": "sgd", "learning_rate": 0.1, "clip_norm": 1.0}, [4.0, 0.5], [0.9, 0.85]),
        # Rates 0.4, 0.3, 0.2, 0.1, 0
        (
            {"name": "sgd", "learning_rate": 0.4, "schedule": "linear", "schedule_steps": 4},
            [1.0] * 5,
            [0.6, 0.3, 0.1, 0.0, 0.0],
        ),
        # 0.4 * (1 + cos(pi k / 4)) / 2 = 0.4, 0.341421, 0.2, 0.058579, 0
        (
            {"name": "sgd", "learning_rate": 0.4, "schedule": "cosine", "schedule_steps": 4},
            [1.0] * 5,
            [0.6, 0.258579, 0.058579, 0.0, 0.0],
        ),
    ],
)
def test_an_optimizer_moves_a_parameter_as_by_hand(config, gradients, expected):
    assert walk(config, gradients) == pytest.approx(expected, abs=2e-6)
