"""A function of one image, applied to a whole batch by a whole ensemble without changing it.

First `jax.vmap` does this by hand: `in_axes` and `out_axes` give the position of the axis in every
argument and in the result. Then dist_ens lifts the function. The results are equal.

    python examples/one_image_function.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dist_ens import Ensemble, losses
from dist_ens.experiment import DataConfig, open_source
from dist_ens.members import from_example_functions

NUM_MEMBERS, BATCH_SIZE = 4, 32


def init(key):
    """Returns the parameters of one member."""
    hidden_key, out_key = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(hidden_key, (64, 20)) / 8, "b": jnp.zeros(20)},
        "out": {"w": jax.random.normal(out_key, (20, 10)) / 4, "b": jnp.zeros(10)},
    }


def predict(params, image):
    """Returns the logits of one image, float[10]. There is no batch axis and no members axis."""
    x = jnp.tanh(image.ravel() / 16 @ params["hidden"]["w"] + params["hidden"]["b"])
    return x @ params["out"]["w"] + params["out"]["b"]


@jax.jit
def predict_by_hand(params, images):
    """Returns logits [batch, members, classes] from parameters [..., members] and a batch."""
    # All images have the same parameters. The members are the last axis of every parameter.
    of_batch = jax.vmap(predict, in_axes=(None, 0))
    of_members = jax.vmap(of_batch, in_axes=(-1, None), out_axes=1)
    return of_members(params, images)


def main():
    images = open_source(DataConfig(source="digits")).test.take(np.arange(BATCH_SIZE))["inputs"]
    members = [init(key) for key in jax.random.split(jax.random.key(0), NUM_MEMBERS)]

    # By hand, the parameters have the members axis last.
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=-1), *members)
    by_hand = predict_by_hand(params, images)

    # Lifted, the function runs on all devices, and the logits are [members, batch, classes].
    network = from_example_functions(init, predict)
    ensemble = Ensemble(network, optax.sgd(0.1), losses.categorical(10), num_members=NUM_MEMBERS)
    lifted = ensemble.apply(ensemble.state_of(members), images)

    # Without vmap, the function is called for every image and every member.
    one_by_one = np.array([[predict(member, image) for member in members] for image in images])

    equal = np.allclose(by_hand, one_by_one, atol=1e-5) and np.allclose(
        np.moveaxis(np.asarray(lifted), 0, 1), one_by_one, atol=1e-5
    )
    print(f"by hand {by_hand.shape}, lifted {lifted.shape}; the same numbers: {equal}")
    return {
        "by_hand": np.asarray(by_hand),
        "lifted": np.asarray(lifted),
        "one_by_one": one_by_one,
        "equal": equal,
    }


if __name__ == "__main__":
    main()
