"""An ensemble of GANs: two networks with two optimizers, in a step of your own.

Result: the energy distance between generated points and those of a ring falls by more than 5.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dist_ens as de

OPTIMIZER = optax.adam(4e-3, b1=0.5)
softplus = jax.nn.softplus


def network(key, *sizes):
    shapes = zip(jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True)
    layers = [(jax.random.normal(k, (m, n)) / m**0.5, jnp.zeros(n)) for k, m, n in shapes]
    return layers, OPTIMIZER.init(layers)


def outputs(layers, x):
    for w, b in layers[:-1]:
        x = jnp.tanh(x @ w + b)
    return x @ layers[-1][0] + layers[-1][1]


def init(key, batch):
    return {"g": network(key, 4, 32, 32, 2), "d": network(key, 2, 64, 64, 1)}


def updated(loss_of, params, opt_state):
    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state)
    return (optax.apply_updates(params, updates), opt_state), loss


def step(state, x, key):
    z = jax.random.normal(key, (len(x), 4))
    y = outputs(state["g"][0], z)
    d, d_loss = updated(
        lambda d: (softplus(-outputs(d, x)) + softplus(outputs(d, y))).mean(), *state["d"]
    )
    g, g_loss = updated(lambda g: softplus(-outputs(d[0], outputs(g, z))).mean(), *state["g"])
    return {"g": g, "d": d}, {"critic": d_loss, "generator": g_loss}


def energy_distance(state, x, key):
    y = outputs(state["g"][0], jax.random.normal(key, (len(x), 4)))
    far = [jnp.sqrt(((a[:, None] - b) ** 2).sum(-1)).mean() for a, b in ((x, y), (x, x), (y, y))]
    return 2 * far[0] - far[1] - far[2], {}


angles = np.random.default_rng(0).uniform(0, 2 * np.pi, 2000)
x = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
gans = de.Ensemble.from_step(init=init, step=step, eval_loss=energy_distance, num_members=4)
before = de.evaluate(gans, gans.init(x), x[:500])
result = de.fit(gans, x, steps=1000, batch_size=100, eval_data=x[:500])
print("Energy distance:", before.mean_member["loss"], "->", result.scores.mean_member["loss"])
