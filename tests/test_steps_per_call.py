"""The number of steps in one call of the update, where nobody gives it."""

import jax
import jax.numpy as jnp
import optax
import pytest

import networks
from dist_ens.ensemble import Batches
from dist_ens.layout import Layout
from dist_ens.losses import categorical
from dist_ens.members import from_functions
from dist_ens.training.beginning import choose_steps_per_call

pytestmark = pytest.mark.quick


def traced(width, batch_size, num_members):
    """A layout of one device, and the traced step of linear networks without a bias."""
    member = from_functions(lambda key: {"w": jnp.zeros((width, width))}, lambda p, x: x @ p["w"])
    layout = Layout.make(num_members, devices=jax.devices()[:1])
    ensemble = networks.ensemble_of(member, optax.sgd(0.1), layout, categorical(width))
    inputs = jax.ShapeDtypeStruct((batch_size, width), jnp.float32)
    state = ensemble.abstract_state({"inputs": inputs})
    return layout, ensemble.traced_update(state, Batches(networks.batches_for(inputs, (), 1)))


# A product of [1000, 1000] x [1000, 1000] takes 2e9 operations. A step has two for each member,
# the outputs and the gradient of the weights: 4e9, 0.04 s at 1e11 a second. A call takes 0.5 s.
@pytest.mark.parametrize(
    ("num_members", "multiples", "expected"),
    [(1, (), 12), (4, (), 3), (20, (), 1), (1, (100,), 10), (1, (100, 30), 10), (1, (7,), 7)],
)
def test_a_call_takes_half_a_second_by_the_operations_of_its_products(
    num_members, multiples, expected
):
    layout, program = traced(1000, 1000, num_members)
    assert choose_steps_per_call(layout, program, *multiples) == expected


def test_a_call_takes_64_steps_at_most():
    assert choose_steps_per_call(*traced(4, 8, 1)) == 64
