"""Whole trainings `train(key) -> results` of one member, as scripts like PureJaxRL's are written.

Each makes its networks, environment and data from the key, and runs all updates in `lax.scan`.
"""

import jax
import jax.numpy as jnp
import optax

ENVIRONMENTS, HIDDEN = 4, 8


def mlp_init(key, *sizes):
    keys = jax.random.split(key, len(sizes) - 1)
    return [
        (jax.random.normal(k, (i, o)) / jnp.sqrt(i), jnp.zeros(o))
        for k, i, o in zip(keys, sizes, sizes[1:], strict=False)
    ]


def mlp(layers, x):
    for w, b in layers[:-1]:
        x = jnp.tanh(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


def updated(optimizer, loss, params, state, *args):
    """Returns parameters and state of the optimizer after an update, and the loss before it."""
    value, grads = jax.value_and_grad(loss)(params, *args)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def picked(values, actions):
    return jnp.take_along_axis(values, actions[..., None], axis=-1)[..., 0]


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


def first_states(key):
    return jax.vmap(cart_reset)(jax.random.split(key, ENVIRONMENTS))


def returns(rewards, done, last, discount=0.95):
    def back(after, step):
        reward, end = step
        total = reward + discount * (1 - end) * after
        return total, total

    return jax.lax.scan(back, last, (rewards, done), reverse=True)[1]


def ppo(key):
    key, of_policy, of_value, of_env = jax.random.split(key, 4)
    params = {
        "policy": mlp_init(of_policy, 4, HIDDEN, 2),
        "value": mlp_init(of_value, 4, HIDDEN, 1),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5))

    def loss(params, batch):
        seen, actions, old, advantages, targets = batch
        log_probs = jax.nn.log_softmax(mlp(params["policy"], seen))
        ratio = jnp.exp(picked(log_probs, actions) - old)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).mean()
        entropy = -(jnp.exp(log_probs) * log_probs).sum(axis=-1).mean()
        errors = jnp.square(mlp(params["value"], seen)[:, 0] - targets)
        return 0.5 * errors.mean() - gain - 0.01 * entropy

    def update(carry, key):
        params, state, states = carry
        of_rollout, of_order = jax.random.split(key)
        states, (seen, actions, rewards, done) = rollout(params["policy"], of_rollout, states, 8)
        values = mlp(params["value"], jnp.concatenate([seen, states[None]]))[..., 0]
        errors = rewards + 0.95 * (1 - done) * values[1:] - values[:-1]
        advantages = returns(errors, done, jnp.zeros(ENVIRONMENTS), 0.95 * 0.9)
        log_probs = jax.nn.log_softmax(mlp(params["policy"], seen))
        batch = (seen, actions, picked(log_probs, actions), advantages, advantages + values[:-1])
        batch = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)

        def epoch(carry, key):
            order = jax.random.permutation(key, len(batch[0])).reshape(2, -1)

            def minibatch(carry, rows):
                *carry, value = updated(
                    optimizer, loss, *carry, jax.tree.map(lambda leaf: leaf[rows], batch)
                )
                return tuple(carry), value

            return jax.lax.scan(minibatch, carry, order)

        (params, state), losses = jax.lax.scan(epoch, (params, state), jax.random.split(of_order))
        return (params, state, states), {"reward": rewards.mean(), "loss": losses.mean()}

    carry = params, optimizer.init(params), first_states(of_env)
    (params, *_), metrics = jax.lax.scan(update, carry, jax.random.split(key, 3))
    return {"params": params, "metrics": metrics}


def dqn(key):
    key, of_net, of_env = jax.random.split(key, 3)
    net, optimizer = mlp_init(of_net, 4, HIDDEN, 2), optax.adam(3e-3, eps=1e-4)
    size = 16
    buffer = {
        "seen": jnp.zeros((size, 4)),
        "next": jnp.zeros((size, 4)),
        "action": jnp.zeros(size, jnp.int32),
        "reward": jnp.zeros(size),
        "done": jnp.zeros(size),
    }

    def loss(net, target, batch):
        best = mlp(target, batch["next"]).max(axis=1)
        wanted = batch["reward"] + 0.9 * (1 - batch["done"]) * best
        return optax.huber_loss(picked(mlp(net, batch["seen"]), batch["action"]), wanted).mean()

    def step(carry, inputs):
        net, target, state, buffer, seen = carry
        number, key = inputs
        of_coin, of_action, of_env, of_rows = jax.random.split(key, 4)
        explores = jax.random.bernoulli(of_coin, 0.5)
        action = jnp.where(
            explores, jax.random.randint(of_action, (), 0, 2), mlp(net, seen).argmax()
        )
        new, reward, done = cart_step(of_env, seen, action)
        row = {"seen": seen, "next": new, "action": action, "reward": reward, "done": done}
        buffer = jax.tree.map(lambda held, one: held.at[number % size].set(one), buffer, row)
        rows = jax.random.randint(of_rows, (8,), 0, jnp.minimum(number + 1, size))
        batch = jax.tree.map(lambda held: held[rows], buffer)
        net, state, value = updated(optimizer, loss, net, state, target, batch)
        target = jax.lax.cond(number % 5 == 0, lambda: net, lambda: target)
        return (net, target, state, buffer, new), value

    carry = net, net, optimizer.init(net), buffer, cart_reset(of_env)
    inputs = jnp.arange(20), jax.random.split(key, 20)
    (net, target, _, buffer, _), losses = jax.lax.scan(step, carry, inputs)
    return {"net": net, "target": target, "losses": losses, "buffer": buffer}


def evolution_strategy(key):
    def score(x):
        return -jnp.square(x - jnp.arange(6.0)).sum() + jnp.cos(3 * x).sum()

    def generation(mean, key):
        noise = jax.random.normal(key, (8, 6))
        noise = jnp.concatenate([noise, -noise])
        scores = jax.vmap(score)(mean[None] + 0.3 * noise)
        ranks = jnp.argsort(jnp.argsort(scores)) / (len(scores) - 1) - 0.5
        return mean + 0.2 * ranks @ noise, scores.max()

    mean, best = jax.lax.scan(generation, jnp.zeros(6), jax.random.split(key, 10))
    return {"mean": mean, "best": best}


TRAININGS = [ppo, dqn, evolution_strategy]
