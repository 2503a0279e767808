"""An ensemble of which one member fails, and the other members do not notice.

The learning rate of each member is random, and some are too high. Result: the members that fail are
started again from other seeds.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dist_ens as de


def init(key, batch):
    keys = jax.random.split(key, 3)
    weights = {
        "w": 0.3 * jax.random.normal(keys[0], (2, 32)),
        "v": 0.3 * jax.random.normal(keys[1], (32,)),
    }
    rate = 10.0 ** jax.random.uniform(keys[2], (), minval=-2.0, maxval=0.5)
    return weights, {"rate": rate}


def loss_fn(params, model_state, batch, key):
    outputs = jnp.tanh(batch["x"] @ params["w"]) @ params["v"]
    # The loss is multiplied by the rate, and so is its gradient.
    loss = (model_state["rate"] * (outputs - batch["y"]) ** 4).mean()
    return loss, (model_state, {})


def main():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(256, 2)).astype(np.float32)
    data = {"x": x, "y": 3 * np.sin(x[:, 0])}
    ensemble = de.Ensemble(
        de.as_member(init=init), optax.sgd(0.05), loss_fn, num_members=8, failures="reseed"
    )
    result = de.fit(ensemble, data, steps=100, batch_size=32, steps_per_call=5, progress=False)
    for member in result.failures:
        print(f"Member {member.member_id} failed at step {member.last_step}: {member.cause}.")
    return result


if __name__ == "__main__":
    main()
