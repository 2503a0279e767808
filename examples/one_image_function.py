"""One function of one image, for a whole batch and a whole ensemble, without rewriting it.

By hand with `jax.vmap`, whose `in_axes` and `out_axes` say where the axis is in every argument and
in the result; and lifted by dist_ens, with the same numbers.

    python examples/one_image_function.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dist_ens import Ensemble, losses
from dist_ens.config import DataConfig
from dist_ens.data import open_source
from dist_ens.members import from_example_functions

NUM_MEMBERS, BATCH_SIZE = 4, 32


def init(key):
    """The parameters of one member."""
    hidden_key, out_key = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(hidden_key, (64, 20)) / 8, "b": jnp.zeros(20)},
        "out": {"w": jax.random.normal(out_key, (20, 10)) / 4, "b": jnp.zeros(10)},
    }


def predict(params, image):
    """One image float[8, 8] to its logits float[10]: neither a batch nor members anywhere."""
    x = jnp.tanh(image.ravel() / 16 @ params["hidden"]["w"] + params["hidden"]["b"])
    return x @ params["out"]["w"] + params["out"]["b"]


@jax.jit
def predict_by_hand(params, images):
    """Parameters [..., members] and images [batch, 8, 8] to logits [batch, members, classes]."""
    of_batch = jax.vmap(predict, in_axes=(None, 0))  # every image, the same parameters
    of_members = jax.vmap(of_batch, in_axes=(-1, None), out_axes=1)  # the last axis of every leaf
    return of_members(params, images)


def main():
    images = open_source(DataConfig(source="digits")).test.take(np.arange(BATCH_SIZE))["inputs"]
    members = [init(key) for key in jax.random.split(jax.random.key(0), NUM_MEMBERS)]

    # By hand, on parameters that came with their members axis last.
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=-1), *members)
    by_hand = predict_by_hand(params, images)

    # Lifted, on the devices at hand: the logits are [members, batch, classes].
    network = from_example_functions(init, predict)
    ensemble = Ensemble(network, optax.sgd(0.1), losses.categorical(10), num_members=NUM_MEMBERS)
    lifted = ensemble.apply(ensemble.state_of(members), images)

    # Without any vmap: every image and member by itself.
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
