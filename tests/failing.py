"""Runs in which one member of eight really fails, for the tests of its failure."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dist_ens as de
from dist_ens.losses import batch_mean
from dist_ens.training import Door, FitArguments, run_fit
from networks import layout_on

MEMBERS, CLASSES, BATCH = 8, 3, 4
OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-2),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
}
FAILING = 3
OTHERS = [position for position in range(MEMBERS) if position != FAILING]


class Batches:
    """An iterable of the batches of a run. The last input of every example is the step's number.

    Args:
        fails_at: Steps at which the input before the last is `value`. Elsewhere it is 0.
        value: Number by which `failing` raises the loss of the failing member.
        count: Number of batches.
    """

    def __init__(self, fails_at=(), value=np.nan, count=200):
        self._fails_at, self._value, self._count = fails_at, value, count

    def __iter__(self):
        for step in range(1, self._count + 1):
            random = np.random.default_rng(step)
            inputs = random.normal(size=(BATCH, 6)).astype(np.float32)
            inputs[:, 4:] = (self._value if step in self._fails_at else 0, step)
            labels = random.integers(0, CLASSES, BATCH).astype(np.int32)
            yield {"inputs": inputs, "labels": labels}


def init_of(width):
    def init(key, inputs):
        v = jax.random.normal(key, (width, CLASSES))
        return {"w": jax.random.normal(key, (4, width)), "v": v}, {"seen": jnp.float32(0)}

    return init


def apply(params, model_state, inputs, key, train):
    outputs = jnp.tanh(inputs[:, :4] @ params["w"]) @ params["v"]
    return outputs, {"seen": model_state["seen"] + train}


def failing(loss):
    """A method that multiplies the loss of member 3 by 1 plus the value in the batch."""

    def multiplied(params, model_state, batch, info):
        value, rest = loss(params, model_state, batch, info)
        return value * (1 + jnp.where(info.member_id == FAILING, batch["inputs"][0, 4], 0)), rest

    return multiplied


def own_loss(params, model_state, batch, key, train):
    outputs, model_state = apply(params, model_state, batch["inputs"], key, train)
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch["labels"])
    return batch_mean(losses), (model_state, {"largest": outputs.max()})


@functools.cache  # A test that trains it again does not compile again.
def ensemble(
    policy,
    execution="vmap",
    *,
    own=False,
    rows=2,
    columns=1,
    waves=1,
    seed=0,
    optimizer="adam",
    width=5,
):
    """Returns the ensemble, whose member 3 can be made to fail by its batches."""
    layout = layout_on((rows, columns), MEMBERS)
    parts = (init_of(width), apply), OPTIMIZERS[optimizer]
    loss = own_loss if own else de.losses.categorical(CLASSES)
    how = {"layout": layout, "execution": execution, "waves": waves, "seed": seed}
    how |= {"methods": (failing,), "failure_policy": policy}
    return de.Ensemble(*parts, loss, num_members=MEMBERS, **how)


def fit(made, data, *, say=None, **options):
    """Trains without progress, and passes what `fit` says to a function."""
    options = {"progress": False} | options
    return run_fit(FitArguments(ensemble=made, data=data, **options), Door(say=say))


def trained(made, fails_at=(), *, value=np.nan, steps=10, steps_per_call=1, **options):
    """Trains on batches of which some make member 3 fail, and returns the result of `fit`."""
    batches = Batches(fails_at, value)
    return fit(made, batches, steps=steps, steps_per_call=steps_per_call, **options)


def parts(state):
    """Returns what an update changes in a state, as NumPy arrays."""
    return jax.device_get((state.params, state.model_state, state.opt_state))


def members_equal(a, b, positions):
    """Returns whether members have the same bits in two states."""
    return all(
        np.array_equal(x[positions], y[positions])
        for x, y in zip(jax.tree.leaves(parts(a)), jax.tree.leaves(parts(b)), strict=True)
    )
