"""How the messages of `dist_ens.members` are provoked."""

import dataclasses
import sys

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from dist_ens.members import as_member, from_equinox, from_haiku, from_linen, member
from provocations._parts import CLASSES, FEATURES, apply, init, network, raises

_INPUTS = jax.ShapeDtypeStruct((8, FEATURES), "float32")


class Net(nn.Module):
    """A network of flax.linen."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(x)


class Noisy(nn.Module):
    """A network that always draws from the stream of dropout."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES)(x + jax.random.normal(self.make_rng("dropout"), x.shape))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    """A network of a class of one's own."""

    w: jax.Array

    def __call__(self, x):
        return x @ self.w


def a_number_in_place_of_a_network():
    as_member(3)


def an_instance_of_a_class_of_ones_own():
    as_member(Plain(jnp.zeros((FEATURES, CLASSES))))


def an_instance_of_nnx():
    as_member(nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(0)))


def an_instance_of_equinox():
    as_member(eqx.nn.Linear(FEATURES, CLASSES, key=jax.random.key(0)))


def a_class_of_linen():
    as_member(Net)


def no_network():
    as_member()


def apply_without_init():
    as_member(apply=apply)


def a_network_and_functions():
    as_member(Net(), init=init)


def a_function_that_makes_no_network():
    def make(key):
        raises()

    as_member(make)


def a_function_that_makes_a_network_or_not():
    def make(seed):
        raises()

    as_member(make)


def a_function_that_makes_linen():
    def make(key):
        return Net()

    as_member(make)


def a_function_that_makes_parameters():
    as_member(init)


def a_function_that_makes_nnx_from_a_key():
    def make(key):
        return nnx.Linear(FEATURES, CLASSES, rngs=nnx.Rngs(key))

    as_member(make)


def a_function_that_needs_more_than_a_key():
    def make(key, width):
        return init(key)

    as_member(make)


def a_function_without_a_key():
    def make():
        return Plain(jnp.zeros((FEATURES, CLASSES)))

    as_member(make)


def equinox_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "equinox", None)
    from_equinox(init)


def haiku_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "haiku", None)
    from_haiku(init)


def _full_init(key, inputs):
    return init(key), ()


def a_short_apply_with_a_full_init():
    as_member(init=_full_init, apply=apply)


def a_full_apply_with_a_short_init():
    as_member(init=init, apply=lambda params, model_state, inputs, key, train: (inputs, ()))


def an_init_with_other_parameters():
    as_member(init=lambda key, inputs, width: ({}, ()), apply=apply)


def outputs_of_a_network_without_apply():
    as_member(init=init).apply({}, (), jnp.zeros((8, FEATURES)), None, False)


def an_init_that_forgets_the_model_state():
    def init(key, inputs):
        return {"w": jnp.zeros(3)}

    member = as_member(
        init=init, apply=lambda params, model_state, inputs, key, train: (inputs, ())
    )
    member.init(jax.random.key(0), _INPUTS)


def _applied(module, train):
    member = from_linen(module)
    variables = Net().init(jax.random.key(0), jnp.zeros((8, FEATURES)))
    key = jax.random.key(1) if train else None
    member.apply(variables["params"], {}, jnp.zeros((8, FEATURES)), key, train)


def dropout_in_evaluation():
    _applied(Noisy(), False)


def a_module_in_place_of_a_member():
    member.require_member(Net())


def whole_numbers_as_parameters():
    member.require_parameters({"w": jnp.zeros(3, int)})


def no_parameters():
    member.require_parameters({})


def inputs_that_are_too_small():
    empty = as_member(init=lambda key: {"w": jnp.zeros((0, 3))}, apply=apply)
    member.check_member(dataclasses.replace(empty, apply=lambda p, s, x, k, t: (x, s)), _INPUTS)


def a_network_that_does_not_take_the_inputs():
    member.check_member(network(raises), _INPUTS)


def a_network_with_other_outputs():
    member.check_member(network(), _INPUTS, (8, CLASSES + 1))


def an_apply_that_adds_to_the_model_state():
    grown = dataclasses.replace(network(), apply=lambda p, s, x, key, train: (x, {"mean": x}))
    member.check_member(grown, _INPUTS)
