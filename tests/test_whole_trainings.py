"""Whole trainings, lifted: each member's script on its device, as in `jit(vmap(train))`.

The scripts `train(key) -> results` are written as PureJaxRL's are. Each makes its networks,
environment and data from the key, and runs all updates in `lax.scan`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
from marked import long
from networks import layout_on

MEMBERS, ENVIRONMENTS, HIDDEN = 8, 4, 8


def mlp_init(key, *sizes):
    keys, pairs = jax.random.split(key, len(sizes) - 1), itertools.pairwise(sizes)
    return [
        (jax.random.normal(k, (i, o)) / jnp.sqrt(i), jnp.zeros(o))
        for k, (i, o) in zip(keys, pairs, strict=True)
    ]


def mlp(layers, x):
    for w, b in layers[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


# A pole on a cart: position, speed, angle and angular speed. Action 0 pushes left, 1 right.


def cart_reset(key):
    return 0.05 * jax.random.normal(key, (4,))


def cart_step(key, state, action):
    _, speed, angle, turn = state
    push = 2.0 * action - 1
    turn_rate = (9.8 * jnp.sin(angle) - 8 * push * jnp.cos(angle)) / 0.7
    moved = state + 0.05 * jnp.stack([speed, 10 * push - 0.5 * turn_rate, turn, turn_rate])
    done = jnp.abs(moved[2]) > 0.3
    return jnp.where(done, cart_reset(key), moved), 1.0 - done, done


def rollout(policy, key, states, length):
    """Returns the last states, and observations, actions, rewards and ends [length, envs, ...]."""

    def step(states, key):
        of_action, of_env = jax.random.split(key)
        actions = jax.random.categorical(of_action, mlp(policy, states))
        keys = jax.random.split(of_env, ENVIRONMENTS)
        new, rewards, done = jax.vmap(cart_step)(keys, states, actions)
        return new, (states, actions, rewards, done)

    return jax.lax.scan(step, states, jax.random.split(key, length))


def policy_gradient(key):
    of_policy, of_env, of_updates = jax.random.split(key, 3)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5))

    def loss(policy, seen, actions, gains):
        log_probs = jax.nn.log_softmax(mlp(policy, seen))
        return -(jnp.take_along_axis(log_probs, actions[:, None], axis=1)[:, 0] * gains).mean()

    def backwards(after, step):
        reward, end = step
        return (reward + 0.95 * (1 - end) * after,) * 2

    def update(carry, key):
        policy, state, states = carry
        of_rollout, of_order = jax.random.split(key)
        states, (seen, actions, rewards, done) = rollout(policy, of_rollout, states, 8)
        last = jnp.zeros(ENVIRONMENTS)
        _, gains = jax.lax.scan(backwards, last, (rewards, done), reverse=True)
        batch = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), (seen, actions, gains))
        order = jax.random.permutation(of_order, len(batch[0])).reshape(2, -1)

        def minibatch(carry, rows):
            policy, state = carry
            value, grads = jax.value_and_grad(loss)(policy, *(leaf[rows] for leaf in batch))
            updates, state = optimizer.update(grads, state, policy)
            return (optax.apply_updates(policy, updates), state), value

        (policy, state), losses = jax.lax.scan(minibatch, (policy, state), order)
        return (policy, state, states), {"reward": rewards.mean(), "loss": losses.mean()}

    policy = mlp_init(of_policy, 4, HIDDEN, 2)
    states = jax.vmap(cart_reset)(jax.random.split(of_env, ENVIRONMENTS))
    carry = policy, optimizer.init(policy), states
    (policy, *_), metrics = jax.lax.scan(update, carry, jax.random.split(of_updates, 3))
    return {"policy": policy, "metrics": metrics}


def evolution_strategy(key):
    def score(x):
        return -jnp.square(x - jnp.arange(6.0)).sum() + jnp.cos(3 * x).sum()

    def generation(mean, key):
        noise = jax.random.normal(key, (8, 6))
        noise = jnp.concatenate([noise, -noise])
        scores = jax.vmap(score)(mean[None] + 0.3 * noise)
        ranks = jnp.argsort(jnp.argsort(scores)) / (len(scores) - 1) - 0.5
        moved = mean + 0.2 * ranks @ noise
        mean = jax.lax.cond(score(moved) > score(mean), lambda: moved, lambda: mean)
        return mean, scores.max()

    mean, best = jax.lax.scan(generation, jnp.zeros(6), jax.random.split(key, 10))
    return {"mean": mean, "best": best}


TRAININGS = [policy_gradient, evolution_strategy]


@pytest.fixture(autouse=True)
def _scripts_promote_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def keys():
    return jax.random.split(jax.random.key(0), MEMBERS)


@functools.cache
def by_hand(train):
    return jax.device_get(jax.jit(jax.vmap(train))(keys()))


@pytest.mark.parametrize(("rows", "columns"), [(8, 1), (2, 2), *long((1, 1))])
@pytest.mark.parametrize("train", TRAININGS, ids=lambda train: train.__name__)
def test_a_whole_training_is_that_of_vmap_on_every_mesh(train, rows, columns):
    lifted = de.lift(train, layout=layout_on((rows, columns), MEMBERS), in_specs=("members",))
    found = jax.device_get(lifted(keys()))

    def compare(leaf, expected):
        """Compares a leaf to 1e-6 of its largest value, and to 1e-5 on a data axis.

        There the compiler sums in another order, and Adam divides a gradient by its size, so that
        a parameter with a small gradient takes over the rounding of the sum.
        """
        atol = (1e-5 if columns > 1 else 1e-6) * np.abs(expected).max()
        np.testing.assert_allclose(leaf, expected, rtol=0, atol=atol)

    jax.tree.map(compare, found, by_hand(train))


def test_members_are_trained_apart():
    for train in TRAININGS:
        leaves = [leaf.reshape(MEMBERS, -1) for leaf in jax.tree.leaves(by_hand(train))]
        assert len(np.unique(np.concatenate(leaves, axis=1), axis=0)) == MEMBERS, train.__name__
