"""Your own class with `weights` and `biases`, registered as a pytree and trained.

Once JAX knows the class, an instance is differentiated, updated and stacked like other parameters.
Its gradient is an instance too, and so are the parameters of the whole ensemble.

    python examples/registered_class.py
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dist_ens import Ensemble, evaluate, fit, losses, unstack_members
from dist_ens.experiment import DataConfig, open_source
from dist_ens.members import from_pytree

NUM_MEMBERS, STEPS, BATCH_SIZE, LEARNING_RATE = 4, 401, 128, 0.2


@dataclasses.dataclass
class UnregisteredMlp:
    """An MLP for one image, without any registration."""

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
    """The same MLP as a pytree, whose arrays JAX knows."""


def apply(mlp, images):
    """Returns the logits of a batch, float[batch, classes]."""
    return jax.vmap(mlp)(images)


def main():
    source = open_source(DataConfig(source="digits"))
    batch = source.train.take(np.arange(BATCH_SIZE))
    sgd, objective = optax.sgd(LEARNING_RATE), losses.categorical(10)

    # 1. To JAX, an unregistered instance is one leaf, not an array. The error says what to do.
    try:
        network = from_pytree(UnregisteredMlp.make, apply)
        Ensemble(network, sgd, objective, num_members=NUM_MEMBERS).init(batch)
    except ValueError as error:
        unregistered_error = str(error)
        print(f"unregistered: {unregistered_error}")

    # 2. The gradient of a registered instance is an instance. So `jax.tree.map` is a step of SGD.
    network = from_pytree(Mlp.make, apply)
    ensemble = Ensemble(network, sgd, objective, num_members=NUM_MEMBERS)
    state = ensemble.init(batch)
    mlp = unstack_members(jax.device_get(state.params))[0]

    def loss(mlp):
        return losses.softmax_cross_entropy(apply(mlp, batch["inputs"]), batch["labels"]).mean()

    gradient = jax.grad(loss)(mlp)
    by_hand = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, mlp, gradient)

    # 3. All members take the same step, and then 400 more.
    state, _ = ensemble.update(state, batch)
    lifted = unstack_members(jax.device_get(state.params))[0]
    result = fit(
        ensemble,
        source,
        steps=STEPS,
        batch_size=BATCH_SIZE,
        state=state,
        steps_per_call=10,
        log_every=10,
        progress=False,
    )
    state = result.state
    training_losses = [record["train/loss"] for record in result.history]
    scores = evaluate(result.ensemble, state, source)
    weights = [w.shape for w in state.params.weights]
    print(
        f"gradient: {type(gradient).__name__}; parameters: {type(state.params).__name__} {weights}"
    )
    print(
        f"loss {training_losses[0]:.3f} to {training_losses[-1]:.3f}, test accuracy "
        f"{scores.ensemble['accuracy']:.4f}, NLL {scores.ensemble['nll']:.4f} "
        f"(mean member {scores.mean_member['nll']:.4f})"
    )
    return {
        "unregistered_error": unregistered_error,
        "gradient": gradient,
        "by_hand": by_hand,
        "lifted": lifted,
        "params": state.params,
        "losses": training_losses,
        "scores": scores,
    }


if __name__ == "__main__":
    main()
