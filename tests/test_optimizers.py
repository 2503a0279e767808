"""Optimizers: what one member's parameter does, worked by hand."""

import re

import jax.numpy as jnp
import optax
import pytest

from dist_ens.experiment import OptimizerConfig, make_optimizer, optimizer_options
from dist_ens.ground.errors import UserError

pytestmark = pytest.mark.quick


def made(name, **config):
    return make_optimizer(OptimizerConfig(name=name, **config))


def walk(optimizer, gradients, start=1.0):
    """A parameter after each update."""
    param = jnp.float32(start)
    state, places = optimizer.init(param), []
    for gradient in gradients:
        updates, state = optimizer.update(jnp.float32(gradient), state, param)
        param = optax.apply_updates(param, updates)
        places.append(float(param))
    return places


LINEAR, COSINE = {"schedule": "linear"}, {"schedule": "cosine"}
NESTEROV, ALL = {"options": {"nesterov": True}}, {"weight_decay": 0.5, "clip_norm": 1.0}


@pytest.mark.parametrize(
    ("name", "rate", "config", "gradients", "expected"),
    [
        # 1 - 0.1 * 2 = 0.8
        ("sgd", 0.1, {}, [2.0], [0.8]),
        # Velocities 2, then 0.9 * 2 + 2 = 3.8: 0.8, then 0.8 - 0.38 = 0.42
        ("sgd", 0.1, {"momentum": 0.9}, [2.0, 2.0], [0.8, 0.42]),
        # Nesterov: velocities 2 and 3.8, steps 0.9 * 2 + 2 = 3.8 and 0.9 * 3.8 + 2 = 5.42
        ("sgd", 0.1, NESTEROV | {"momentum": 0.9}, [2.0, 2.0], [0.62, 0.078]),
        # The penalty's gradient is 0.5 * 1: 1 - 0.1 * 0.5 = 0.95
        ("sgd", 0.1, {"weight_decay": 0.5}, [0.0], [0.95]),
        # A gradient of 4 is clipped to 1, one of 0.5 is not: 0.9, then 0.9 - 0.05
        ("sgd", 0.1, {"clip_norm": 1.0}, [4.0, 0.5], [0.9, 0.85]),
        # It is clipped before the penalty: velocities 1 + 0.5, then 1.35 + 1 + 0.5 * 0.85
        ("sgd", 0.1, ALL | {"momentum": 0.9}, [4.0, 4.0], [0.85, 0.5725]),
        # Rates 0.4, 0.3, 0.2, 0.1, 0
        ("sgd", 0.4, LINEAR | {"schedule_steps": 4}, [1.0] * 5, [0.6, 0.3, 0.1, 0.0, 0.0]),
        # 0.4 * (1 + cos(pi k / 4)) / 2 = 0.4, 0.341421, 0.2, 0.058579, 0
        ("sgd", 0.4, COSINE | {"schedule_steps": 4}, [1.0] * 5, [0.6, 0.258579, 0.058579, 0, 0]),
        # Adam's first step has the learning rate's length: 1 - 0.1 = 0.9
        ("adam", 0.1, {}, [2.0], [0.9]),
        # Decoupled: without a gradient 1 - 0.1 * 0.5 * 1 = 0.95
        ("adamw", 0.1, {"weight_decay": 0.5}, [0.0], [0.95]),
        # The first step of Adam with Nesterov momentum: 0.9 * 0.2 / 0.19 + 0.1 * 2 / 0.1 over 2
        ("nadam", 0.1, {}, [2.0], [1 - 0.1 * (0.9 * 0.2 / 0.19 + 2) / 2]),
        # The first step of Lion has the gradient's sign: 1 - 0.1 = 0.9
        ("lion", 0.1, {}, [2.0], [0.9]),
        # Decoupled: without a gradient 1 - 0.1 * 0.5 * 1 = 0.95
        ("lion", 0.1, {"weight_decay": 0.5}, [0.0], [0.95]),
        # With b1 = 0 the step is the sign of the gradient alone: 0.9, then 1.0
        ("lion", 0.1, {"options": {"b1": 0.0, "b2": 0.5}}, [2.0, -1.0], [0.9, 1.0]),
        # Signs at rates 0.4 and 0.2: 0.6, then 0.4
        ("sign_sgd", 0.4, LINEAR | {"schedule_steps": 2}, [5.0, 3.0], [0.6, 0.4]),
    ],
)
def test_an_optimizer_moves_a_parameter_as_by_hand(name, rate, config, gradients, expected):
    optimizer = made(name, learning_rate=rate, **config)
    assert walk(optimizer, gradients) == pytest.approx(expected, abs=2e-6)


def test_every_optimizer_of_optax_that_descends_is_built():
    names = """
        acprop adabelief adadelta adafactor adagrad adam adamax adamaxw adamw adan ademamix adopt
        amsgrad cocob dadapt_adamw fromage galore lamb lars lbfgs lion madgrad momo momo_adam muon
        novograd optimistic_adam optimistic_adam_v2 optimistic_gradient_descent polyak_sgd
        prodigy radam rmsprop rprop schedule_free_adamw schedule_free_sgd sgd sign_sgd signum
        simplified_ademamix sm3 sophia yogi
    """
    params = {"w": jnp.ones((2, 3))}
    for name in names.split():
        options = {k: default for k, (default, _) in optimizer_options(name).items()}
        made(name, clip_norm=1.0, options=options).init(params)


def test_no_learning_rate_is_the_one_that_optax_has_as_default():
    with_none, with_one = (
        walk(made("prodigy", learning_rate=rate), [2.0], start=0.0) for rate in (None, 1.0)
    )
    assert with_none == pytest.approx(with_one)


def test_the_options_are_the_arguments_that_a_config_can_give():
    assert optimizer_options("adafactor")["dtype_momentum"] == ("float32", str)
    assert optimizer_options("adafactor")["weight_decay_rate"] == (None, float)
    assert optimizer_options("schedule_free_sgd")["warmup_steps"] == (None, int)
    assert optimizer_options("muon")["ns_coeffs"] == ((3.4445, -4.775, 2.0315), tuple)
    assert set(optimizer_options("sgd")) == {"nesterov", "accumulator_dtype"}
    assert "muon_weight_dimension_numbers" not in optimizer_options("muon")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"name": "adm"}, "'adm' is not an optimizer of Optax. Did you mean 'adam'? Name another"),
        ({"name": "cosine_decay_schedule"}, "it does not return a gradient transformation."),
        ({"name": "lookahead"}, "it needs fast_optimizer, sync_period, slow_step_size, which"),
        ({"name": "scale_by_adam"}, "without taking a step against them. Did you mean 'adam'?"),
        ({"name": "adam", "options": {"bb1": 1}}, "Did you mean 'b1'? Its options are: b1"),
        ({"name": "adam", "options": {"b1": "x"}}, "optimizer.b1 must be float: got 'x', a str."),
        ({"name": "adam", "weight_decay": 0.1}, "optimizer.weight_decay=0.1: use adamw."),
        ({"name": "adam", "clip_norm": 0.0}, "optimizer.clip_norm must be positive"),
        ({"name": "polyak_sgd", "learning_rate": 0.1}, "takes no optimizer.learning_rate"),
    ],
)
def test_what_optax_does_not_take_is_told_in_a_sentence(config, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        made(**config)
