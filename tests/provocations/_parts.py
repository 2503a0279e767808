"""Small networks, ensembles and data that several rooms need."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dist_ens.data import source_of_arrays
from dist_ens.ensemble import Ensemble
from dist_ens.layout import Layout
from dist_ens.losses import categorical
from dist_ens.members import as_member

CLASSES = 3
FEATURES = 4


class ForeignError(Exception):
    """What a library or a user's function raises."""


def raises(*_, **__):
    """Stands for a function of a user, or of a library, that does not work."""
    raise ForeignError("the layer Dense_0 takes float32[8, 5]")


def init(key):
    return {"w": jax.random.normal(key, (FEATURES, CLASSES))}


def apply(params, inputs):
    return inputs @ params["w"]


def network(apply=apply):
    """A linear classifier, or another function of its parameters and inputs."""
    return as_member(init=init, apply=apply)


def layout(num_members=2, num_devices=1):
    return Layout.make(num_members, devices=jax.devices()[:num_devices])


def ensemble(loss=None, member=None, optimizer=None, *, num_members=2, num_devices=1, **options):
    """An ensemble of linear classifiers, on one device unless more are asked for."""
    return Ensemble(
        member or network(),
        optimizer or optax.sgd(0.1),
        categorical(CLASSES) if loss is None else loss,
        num_members=num_members,
        **{"execution": "vmap", "layout": layout(num_members, num_devices)} | options,
    )


def examples(count=8, features=FEATURES):
    """Inputs [count, features] and labels of all classes."""
    inputs = np.linspace(-1, 1, count * features, dtype=np.float32).reshape(count, features)
    return inputs, np.arange(count, dtype=np.int32) % CLASSES


def batch(count=8):
    inputs, labels = examples(count)
    return {"inputs": jnp.asarray(inputs), "labels": jnp.asarray(labels)}


def source(count=8):
    return source_of_arrays(examples(count), examples(count))
