"""Small networks and batches that several tests train."""

from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dist_ens.ensemble import Ensemble
from dist_ens.experiment import ModelConfig, make_model
from dist_ens.layout import BATCHES, MEMBERS, Layout, copied
from dist_ens.losses import categorical
from dist_ens.members import from_linen

BATCH = 16
CLASSES = 5
SGD, ADAM = optax.sgd(0.1), optax.adam(1e-3)


class ConvNet(nn.Module):
    """A convolution with BatchNorm over the global batch."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.Conv(8, (3, 3))(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        x = nn.relu(x)
        x = nn.Conv(8, (3, 3), strides=2)(x)
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(CLASSES)(nn.relu(x).mean(axis=(1, 2)))


class Asking(nn.Module):
    """A network whose dropout is on while it is given a key."""

    num_outputs: int = CLASSES

    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(0.5, deterministic=not self.has_rng("dropout"))(nn.Dense(8)(x))
        return nn.Dense(self.num_outputs)(x)


def of_config(name, shape, dtype=jnp.float32, label_shape=(), **options):
    """A network of the config door, with the inputs and the shape of the labels of its batches."""
    member = make_model(ModelConfig(name=name, options=options), shape, CLASSES)
    return member, jax.ShapeDtypeStruct((BATCH, *shape), dtype), label_shape


def mlp():
    return of_config("mlp", (12,), hidden_sizes=(32, 32))


def convolutional():
    return from_linen(ConvNet()), jax.ShapeDtypeStruct((BATCH, 8, 8, 2), jnp.float32), ()


def transformer():
    options = {"num_blocks": 1, "width": 16, "num_heads": 2, "mlp_size": 32}
    return of_config("transformer", (6,), jnp.int32, (6,), **options)


def dropout():
    return of_config("mlp_bn_dropout", (12,), hidden_sizes=(32,), dropout_rate=0.5)


def batches_for(inputs, label_shape, steps, seed=0):
    """Random batches [steps, batch, ...] of a network's kind."""
    random = np.random.default_rng(seed)
    shape = (steps, *inputs.shape)
    if jnp.issubdtype(inputs.dtype, jnp.integer):
        values = random.integers(0, CLASSES, shape).astype(np.int32)
    else:
        values = random.normal(size=shape).astype(np.float32)
    labels = random.integers(0, CLASSES, (steps, inputs.shape[0], *label_shape)).astype(np.int32)
    return {"inputs": values, "labels": labels}


def check_member(member, inputs, output_shape=None):
    """Shapes of a traced member's parameters and state, after a look at those of its outputs."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, model_state = jax.eval_shape(member.init, key, inputs)
    if member.has_apply:
        outputs, _ = jax.eval_shape(member.evaluate, params, model_state, inputs, key)
        assert output_shape in (None, getattr(outputs, "shape", None))
    return params, model_state


def layout_on(mesh, num_members):
    """A layout with so many rows and columns of the first devices."""
    rows, columns = mesh
    devices = jax.devices()[: rows * columns]
    return Layout.make(num_members, ensemble_axis=rows, devices=devices)


def ensemble_of(member, optimizer, layout, objective=None, **options):
    """An ensemble of classifiers on a layout, vmapped unless something else is asked for."""
    options = {"execution": "vmap", "num_members": layout.num_members} | options
    return Ensemble(member, optimizer, objective or categorical(CLASSES), layout=layout, **options)


def begin(ensemble, inputs, seed=0, member_ids=None):
    """The state of an ensemble at step 0, of another seed or other members if asked."""
    if seed or member_ids is not None:
        ensemble = ensemble.replace(seed=seed, member_ids=member_ids)
    return ensemble.init({"inputs": inputs})


@cache
def born(network, optimizer, member_ids):
    """The state of a network's members at step 0, on one device."""
    member, inputs, _ = network()
    layout = Layout.make(len(member_ids), devices=jax.devices()[:1])
    return begin(ensemble_of(member, optimizer, layout), inputs, member_ids=member_ids)


def born_on(layout, network, optimizer=SGD, member_ids=None):
    """The state of a network's members at step 0, from seed 0, on a mesh.

    They are born on one device, once for all meshes: `test_lift` shows that it is no matter.
    """
    ids = tuple(range(layout.num_members)) if member_ids is None else tuple(member_ids)
    return layout.moved(copied(born(network, optimizer, ids)), MEMBERS)


def program(network, layout, steps=2, optimizer=SGD, **options):
    """An ensemble on a layout, its state at step 0, and the batches of a call."""
    member, inputs, label_shape = network()
    ensemble = ensemble_of(member, optimizer, layout, **options)
    batches = layout.put(batches_for(inputs, label_shape, steps), BATCHES)
    return ensemble, born_on(layout, network, optimizer), batches


def train(network, mesh, num_members=8, *, member_ids=None, optimizer=SGD):
    """The state and the metrics after three calls of one step, from seed 0."""
    member, inputs, label_shape = network()
    layout = layout_on(mesh, num_members)
    ensemble = ensemble_of(member, optimizer, layout)
    state = born_on(layout, network, optimizer, member_ids)
    batches = batches_for(inputs, label_shape, 3)
    metrics = []
    for step in range(3):
        batch = {name: leaf[step : step + 1] for name, leaf in batches.items()}
        state, metrics_of_step = ensemble.update_steps(state, layout.put(batch, BATCHES))
        metrics.append(jax.device_get(metrics_of_step))
    metrics = jax.tree.map(lambda *leaves: np.concatenate(leaves), *metrics)
    return jax.device_get(state), metrics


def member_of(tree, position):
    """One member's part of a tree whose leaves are [members, ...]."""
    return jax.tree.map(lambda leaf: leaf[position], tree)


def numbers(tree):
    """A tree on the host, with the words of keys in the place of keys."""

    def of_leaf(leaf):
        is_key = jnp.issubdtype(getattr(leaf, "dtype", float), jax.dtypes.prng_key)
        return jax.random.key_data(leaf) if is_key else leaf

    return jax.device_get(jax.tree.map(of_leaf, tree))


def assert_equal(found, expected):
    """Compares the bits of two trees."""
    jax.tree.map(np.testing.assert_array_equal, numbers(found), numbers(expected))


def assert_close(found, expected):
    """Compares two trees that differ by rounding."""
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, numbers(found), numbers(expected))


def assert_close_to_scale(found, expected):
    """Compares two trees, each leaf to 1e-5 of its largest value."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max())
