"""Your own training loop, around a step that is written for one member in plain JAX.

The step sees the whole batch. The compiler divides it over the devices that share it.
Result: the mean member has an accuracy above 0.95 on two half moons.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import make_moons

import dist_ens as de

NUM_MEMBERS, STEPS = 64, 300
optimizer = optax.adam(1e-2)


def init_of_one_member(key):
    w1, w2 = jax.random.normal(key, (2, 32, 2))
    params = {"w1": w1.T, "b1": jnp.zeros(32), "w2": w2 / 6}
    return params, optimizer.init(params)


def logits_of(params, x):
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def step_of_one_member(member, batch, key):
    params, opt_state = member
    x = batch["x"] + 0.1 * jax.random.normal(key, (2,))  # Random shifts augment the data.

    def loss_of(params):
        logits = logits_of(params, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), {"loss": loss}


def main():
    x, y = make_moons(1000, noise=0.1, random_state=0)
    rows = np.random.default_rng(0).integers(800, size=(STEPS, 64))
    loader = ({"x": x[batch], "y": y[batch]} for batch in rows)
    layout = de.Layout.make(num_members=NUM_MEMBERS)
    members = layout.init(init_of_one_member, jax.random.key(0))
    in_specs = ("members", "batch", "shared")
    step = de.lift(step_of_one_member, layout=layout, in_specs=in_specs, donate_argnums=0)
    for batch, key in zip(loader, jax.random.split(jax.random.key(1), STEPS), strict=True):
        members, metrics = step(members, layout.put(batch), key)

    logits = de.lift(logits_of, layout=layout, in_specs=("members", "shared"))(members[0], x[800:])
    accuracy = float((logits.argmax(axis=-1) == y[800:]).mean())
    print(f"Loss {metrics['loss'].mean():.3f}; accuracy of the mean member {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
