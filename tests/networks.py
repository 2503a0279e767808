"""Small networks and batches that several tests train."""

from functools import cache

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


def mlp():
    member = make_model(ModelConfig(name="mlp", options={"hidden_sizes": (32, 32)}), (12,), CLASSES)
    return member, jax.ShapeDtypeStruct((BATCH, 12), jnp.float32), ()


def convolutional():
    return from_linen(ConvNet()), jax.ShapeDtypeStruct((BATCH, 8, 8, 2), jnp.float32), ()


def transformer():
    options = {"num_blocks": 1, "width": 16, "num_heads": 2, "mlp_size": 32}
    member = make_model(ModelConfig(name="transformer", options=options), (6,), CLASSES)
    return member, jax.ShapeDtypeStruct((BATCH, 6), jnp.int32), (6,)


def dropout():
    options = {"hidden_sizes": (32,), "dropout_rate": 0.5}
    member = make_model(ModelConfig(name="mlp_bn_dropout", options=options), (12,), CLASSES)
    return member, jax.ShapeDtypeStruct((BATCH, 12), jnp.float32), ()


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


def train(
    network,
    *,
    num_members=8,
    ensemble_axis=None,
    devices=None,
    member_ids=None,
    optimizer=SGD,
    steps=3,
    execution="vmap",
):
    """The state, the metrics and the ensemble after some calls of one step, from seed 0."""
    member, inputs, label_shape = network()
    layout = Layout.make(num_members, ensemble_axis=ensemble_axis, devices=devices)
    ensemble = ensemble_of(member, optimizer, layout, execution=execution)
    state = born_on(layout, network, optimizer, member_ids)
    batches = batches_for(inputs, label_shape, steps)
    metrics = []
    for step in range(steps):
        batch = {name: leaf[step : step + 1] for name, leaf in batches.items()}
        state, metrics_of_step = ensemble.update_steps(state, layout.put(batch, BATCHES))
        metrics.append(jax.device_get(metrics_of_step))
    metrics = jax.tree.map(lambda *leaves: np.concatenate(leaves), *metrics)
    return jax.device_get(state), metrics, ensemble
