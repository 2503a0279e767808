"""A Python list of MLPs, stacked into one ensemble, trained together and averaged.

`jax.vmap` maps over an axis of arrays, and a list of networks has no such axis. Mapped over the
list, it would split every weight and bias along axis 0, and their lengths differ. `stack_members`
gives every array the axis that is needed: [members, ...].

    python examples/list_of_mlps.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dist_ens import Ensemble, fit, losses, stack_members
from dist_ens.experiment import DataConfig, open_source
from dist_ens.members import from_example_functions

NUM_MEMBERS, STEPS, BATCH_SIZE = 4, 300, 128


def make_mlp(key, sizes=(64, 50, 10)):
    """Returns a list of (weights, biases), one pair for each layer."""
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [(jax.random.normal(k, (m, n)) * m**-0.5, jnp.zeros(n)) for k, m, n in shapes]


def predict(params, image):
    """Returns the logits of one image, float[10]; the image is float[8, 8]."""
    x = image.ravel() / 16
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def main():
    source = open_source(DataConfig(source="digits"))
    test = source.test.take(np.arange(len(source.test)))
    mlps = [make_mlp(key) for key in jax.random.split(jax.random.key(0), NUM_MEMBERS)]

    # 1. The list itself cannot be mapped over.
    try:
        jax.vmap(predict, in_axes=(0, None))(mlps, test["inputs"][0])
    except ValueError as error:
        vmap_error = str(error).splitlines()[0]
        print(f"vmap over the list: {vmap_error}")

    # 2. One pytree of stacked arrays can.
    params = stack_members(mlps)
    print(f"stacked: {[(w.shape, b.shape) for w, b in params]}")
    untrained = jax.vmap(predict, in_axes=(0, None))(params, test["inputs"][0])

    # 3. The list is trained as an ensemble on all devices, in one program.
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
    print(f"training loss: from {training_losses[0]:.3f} to {training_losses[-1]:.3f}")

    # 4. The ensemble averages the members' probabilities.
    labels, rows = test["labels"], np.arange(len(source.test))
    prediction = result.ensemble.predict(result.state, test["inputs"])
    member_probs = np.asarray(prediction.members)  # [members, batch, classes]
    probs = np.asarray(prediction.mean)
    member_nll = -np.log(member_probs[:, rows, labels]).mean(axis=1)
    nll = -np.log(probs[rows, labels]).mean()
    accuracy = (probs.argmax(axis=1) == labels).mean()
    print(f"accuracy {accuracy:.4f}, NLL {nll:.4f}; the mean member's NLL {member_nll.mean():.4f}")

    # 5. A network of another architecture cannot be stacked. The error names the differing array.
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
