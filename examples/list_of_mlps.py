"""A Python list of MLPs becomes one ensemble: stacked, trained together, averaged.

`jax.vmap` maps over an axis of arrays. A list of networks has no such axis, so mapping over the
list takes axis 0 of every weight and bias apart, and those lengths do not agree. `stack_members`
gives every array the axis that was meant: [members, ...].

    python examples/list_of_mlps.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dist_ens import Ensemble, fit, losses, stack_members
from dist_ens.config import DataConfig
from dist_ens.data import open_source
from dist_ens.members import from_example_functions

NUM_MEMBERS, STEPS, BATCH_SIZE = 4, 300, 128


def make_mlp(key, sizes=(64, 50, 10)):
    """A list of (weights, biases), one pair for each layer."""
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [(jax.random.normal(k, (m, n)) * m**-0.5, jnp.zeros(n)) for k, m, n in shapes]


def predict(params, image):
    """One image float[8, 8] to its logits float[10]."""
    x = image.ravel() / 16
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def main():
    source = open_source(DataConfig(source="digits"))
    test = source.test.take(np.arange(len(source.test)))
    mlps = [make_mlp(key) for key in jax.random.split(jax.random.key(0), NUM_MEMBERS)]

    # 1. What does not work: the list as it is.
    try:
        jax.vmap(predict, in_axes=(0, None))(mlps, test["inputs"][0])
    except ValueError as error:
        vmap_error = str(error).splitlines()[0]
        print(f"vmap over the list: {vmap_error}")

    # 2. What does: one pytree of arrays, which is mapped over as it was meant.
    params = stack_members(mlps)
    print(f"stacked: {[(w.shape, b.shape) for w, b in params]}")
    untrained = jax.vmap(predict, in_axes=(0, None))(params, test["inputs"][0])

    # 3. The list as an ensemble on the devices at hand, trained as one program.
    network = from_example_functions(make_mlp, predict)
    ensemble = Ensemble(network, optax.adam(2e-3), losses.categorical(10), num_members=NUM_MEMBERS)
    result = fit(
        ensemble,
        source,
        steps=STEPS,
        batch_size=BATCH_SIZE,
        state=ensemble.state_of(mlps),
        steps_per_call=10,
        log_every=10,
        progress=False,
    )
    training_losses = [record["train/loss"] for record in result.history]
    print(f"loss {training_losses[0]:.3f} to {training_losses[-1]:.3f}")

    # 4. Their probabilities, averaged.
    labels, rows = test["labels"], np.arange(len(source.test))
    prediction = result.ensemble.predict(result.state, test["inputs"])
    member_probs = np.asarray(prediction.members)  # [members, batch, classes]
    probs = np.asarray(prediction.mean)
    member_nll = -np.log(member_probs[:, rows, labels]).mean(axis=1)
    nll = -np.log(probs[rows, labels]).mean()
    accuracy = (probs.argmax(axis=1) == labels).mean()
    print(f"accuracy {accuracy:.4f}, NLL {nll:.4f}; the mean member's NLL {member_nll.mean():.4f}")

    # 5. A network of another architecture cannot join them, and is told which array is to blame.
    try:
        stack_members([*mlps, make_mlp(jax.random.key(1), sizes=(64, 40, 10))])
    except ValueError as error:
        stack_error = str(error)
        print(f"stack_members: {stack_error}")

    return {
        "vmap_error": vmap_error,
        "stack_error": stack_error,
        "untrained": np.asarray(untrained),
        "untrained_one_by_one": np.stack([predict(mlp, test["inputs"][0]) for mlp in mlps]),
        "losses": training_losses,
        "accuracy": accuracy,
        "nll": nll,
        "member_nll": member_nll,
        "probs": probs,
        "member_probs": member_probs,
    }


if __name__ == "__main__":
    main()
