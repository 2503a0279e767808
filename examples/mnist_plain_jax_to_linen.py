"""Two ensembles: an MLP in plain JAX with SGD, and a flax.linen MLP with BatchNorm and dropout.

The same `fit` trains both. At the end, each linen member becomes a flax `TrainState`. This shows
which field of `State` holds each field of a `TrainState`.

    python examples/mnist_plain_jax_to_linen.py                     # scikit-learn's digits
    python examples/mnist_plain_jax_to_linen.py --data=idx:DIR      # the four files of MNIST
"""

import argparse
import math
import sys
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import dist_ens
from dist_ens import Ensemble, losses, unstack_members
from dist_ens.experiment import DataConfig, open_source
from dist_ens.members import as_member, from_example_functions, with_normalized_inputs

NUM_MEMBERS, STEPS, BATCH_SIZE = 4, 300, 128


def plain_mlp(sizes):
    """Returns a member made from two functions of one image. The adapter maps over the batch."""

    def init(key):
        keys = jax.random.split(key, len(sizes) - 1)
        shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
        return [(jax.random.normal(k, (m, n)) * m**-0.5, jnp.zeros(n)) for k, m, n in shapes]

    def apply(params, image):
        x = image.ravel()
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        w, b = params[-1]
        return x @ w + b

    return from_example_functions(init, apply)


class LinenMlp(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, images, train):
        x = nn.Dense(128, use_bias=False)(images.reshape(len(images), -1))
        x = nn.relu(nn.BatchNorm(not train, momentum=0.9)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


def fit(name, member, optimizer, source, std):
    """Trains an ensemble, and returns it, its state, and its scores on the test split."""
    member = with_normalized_inputs(as_member(member), 0.0, std)
    objective = losses.categorical(source.spec.num_classes)
    ensemble = Ensemble(member, optimizer, objective, num_members=NUM_MEMBERS)
    result = dist_ens.fit(
        ensemble, source, steps=STEPS, batch_size=BATCH_SIZE, eval_data=source, progress=False
    )
    loss, scores = result.history[-2]["train/loss"], result.scores
    print(
        f"{name}: last loss {loss:.3f}, test accuracy {scores.ensemble['accuracy']:.4f}, NLL "
        f"{scores.ensemble['nll']:.4f} (mean member {scores.mean_member['nll']:.4f})"
    )
    return result.ensemble, result.state, scores


class TrainState(train_state.TrainState):
    batch_stats: Any


def as_train_states(module, ensemble, state):
    """Returns a flax `TrainState` for each member. `State` has a members axis in every leaf."""
    return [
        TrainState(
            step=member.step,
            apply_fn=module.apply,
            params=member.params,
            tx=ensemble.optimizer,
            opt_state=member.opt_state,
            batch_stats=member.model_state["batch_stats"],
        )
        for member in unstack_members(state)
    ]


def main(argv=()):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", default="digits", help="digits (default), or idx:DIR")
    data = parser.parse_args(argv).data
    source = open_source(DataConfig(source=data))
    std = 16.0 if data == "digits" else 255.0

    sizes = (math.prod(source.spec.input_shape), 128, source.spec.num_classes)
    _, _, plain = fit("plain JAX, SGD", plain_mlp(sizes), optax.sgd(0.1), source, std)

    module = LinenMlp(source.spec.num_classes)
    schedule = optax.cosine_decay_schedule(2e-3, decay_steps=STEPS)
    ensemble, state, linen = fit("linen, Adam", module, optax.adam(schedule), source, std)

    # As an ordinary TrainState, a member makes the same predictions as inside the ensemble.
    test = source.test.take(np.arange(len(source.test)))
    train_states = as_train_states(module, ensemble, state)
    accuracies = []
    for member in train_states:
        variables = {"params": member.params, "batch_stats": member.batch_stats}
        logits = member.apply_fn(variables, test["inputs"] / std, train=False)
        accuracies.append(float((logits.argmax(axis=-1) == test["labels"]).mean()))
    print(f"as TrainStates, accuracy: {', '.join(f'{a:.4f}' for a in accuracies)}")
    return {
        "plain": plain,
        "linen": linen,
        "train_states": train_states,
        "train_state_accuracies": accuracies,
    }


if __name__ == "__main__":
    main(sys.argv[1:])
