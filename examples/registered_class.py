"""A class of your own with `weights` and `biases`, registered as a pytree and trained.

Once JAX knows the class, an instance is differentiated, updated and stacked like any other
parameters: its gradient is an instance too, and so are the parameters of the whole ensemble.

    python examples/registered_class.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dist_ens.config import DataConfig
from dist_ens.data import open_source
from dist_ens.ensemble import Ensemble
from dist_ens.evaluation import Evaluator
from dist_ens.layout import BATCHES, make_layout
from dist_ens.losses import softmax_cross_entropy
from dist_ens.members import from_pytree
from dist_ens.state import unstack_members

NUM_MEMBERS, CALLS, BATCH_SIZE, LEARNING_RATE = 4, 40, 128, 0.2


@dataclasses.dataclass
class UnregisteredMlp:
    """An MLP for one image, as anyone would write it."""

    weights: list[jax.Array]
    biases: list[jax.Array]

    @classmethod
    def make(cls, key, sizes=(64, 50, 10)):
        keys = jax.random.split(key, len(sizes) - 1)
        shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
        weights = [jax.random.normal(k, (m, n)) * m**-0.5 for k, m, n in shapes]
        return cls(weights, [jnp.zeros(n) for n in sizes[1:]])

    def __call__(self, image):
        x = image.ravel() / 16
        for w, b in zip(self.weights[:-1], self.biases[:-1], strict=True):
            x = jax.nn.relu(x @ w + b)
        return x @ self.weights[-1] + self.biases[-1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Mlp(UnregisteredMlp):
    """The same, and JAX knows where its arrays are."""


def apply(mlp, images):
    """Logits of a batch."""
    return jax.vmap(mlp)(images)


def main():
    source = open_source(DataConfig(source="digits"))
    layout = make_layout(num_members=NUM_MEMBERS)
    inputs = jax.ShapeDtypeStruct((2, *source.spec.input_shape), source.spec.input_dtype)
    sgd = optax.sgd(LEARNING_RATE)

    # 1. Unregistered, an instance is one leaf to JAX, and no array. The error says what to do.
    try:
        Ensemble(from_pytree(UnregisteredMlp.make, apply), sgd, layout).init(0, inputs)
    except ValueError as error:
        unregistered_error = str(error)
        print(f"unregistered: {unregistered_error}")

    # 2. Registered, one member's gradient is an instance, and a step of SGD by hand is a tree.map.
    ensemble = Ensemble(from_pytree(Mlp.make, apply), sgd, layout)
    state = ensemble.init(0, inputs)
    mlp = unstack_members(jax.device_get(state.params))[0]
    batch = source.train.take(np.arange(BATCH_SIZE))
    gradient = jax.grad(
        lambda mlp: softmax_cross_entropy(apply(mlp, batch["inputs"]), batch["labels"]).mean()
    )(mlp)
    by_hand = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, mlp, gradient)

    # 3. The same step for all members, then four hundred more.
    call = jax.tree.map(lambda leaf: leaf[None], batch)  # a call of one step: [1, batch, …]
    state, _ = ensemble.update_steps(state, layout.put(call, BATCH_SIZE, BATCHES))
    lifted = unstack_members(jax.device_get(state.params))[0]
    order, losses = np.random.default_rng(0), []
    for _ in range(CALLS):  # of ten steps each
        call = source.train.take(order.integers(len(source.train), size=(10, BATCH_SIZE)))
        state, metrics = ensemble.update_steps(state, layout.put(call, BATCH_SIZE, BATCHES))
        losses.append(np.asarray(metrics["loss"]).mean())

    scores = Evaluator(ensemble, 1000).evaluate(state, source.test).scores()
    weights = [w.shape for w in state.params.weights]
    print(
        f"gradient: {type(gradient).__name__}; parameters: {type(state.params).__name__} {weights}"
    )
    print(
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}, test accuracy "
        f"{scores.ensemble['accuracy']:.4f}, NLL {scores.ensemble['nll']:.4f} "
        f"(mean member {scores.mean_member['nll']:.4f})"
    )
    return {
        "unregistered_error": unregistered_error,
        "gradient": gradient,
        "by_hand": by_hand,
        "lifted": lifted,
        "params": state.params,
        "losses": losses,
        "scores": scores,
    }


if __name__ == "__main__":
    main()
