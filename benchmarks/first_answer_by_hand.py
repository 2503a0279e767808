"""README's block, written by hand with `jit(vmap)`: the same networks, steps and answers."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

x, y = load_digits(return_X_y=True)
x = x.astype(np.float32)
mlp = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(10)])
optimizer = optax.adam(1e-3)
MEMBERS, BATCH, TRAINED, STEPS = 8, 128, 1400, 500


@jax.jit
@jax.vmap
def init(key: jax.Array) -> Any:
    """Returns the parameters and the optimizer's state of a member."""
    params = mlp.init(key, x[:1])
    return params, optimizer.init(params)


def step(params: Any, opt_state: Any, inputs: jax.Array, labels: jax.Array) -> Any:
    """Returns the parameters and the optimizer's state of a member after a step, and the loss."""

    def loss_of(params: Any) -> jax.Array:
        logits = mlp.apply(params, inputs)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(gradients, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


update = jax.jit(jax.vmap(step, in_axes=(0, 0, None, None)), donate_argnums=(0, 1))

params, opt_state = init(jax.random.split(jax.random.key(0), MEMBERS))
random = np.random.default_rng(0)
order = np.concatenate([random.permutation(TRAINED) for _ in range(STEPS * BATCH // TRAINED + 1)])
for number in range(STEPS):
    at = order[number * BATCH : (number + 1) * BATCH]
    params, opt_state, loss = update(params, opt_state, x[at], y[at])
    if number % 100 == 99:
        print(f"step {number + 1} loss {loss.mean():.4f}")


@jax.jit
def predict(params: Any, inputs: jax.Array) -> Any:
    """Returns the mean probabilities, the uncertainty, and the probabilities of the members."""
    logits = jnp.asarray(jax.vmap(mlp.apply, in_axes=(0, None))(params, inputs))
    log_probs = jax.nn.log_softmax(logits)
    members = jnp.exp(log_probs)
    mean = members.mean(axis=0)
    total = -(mean * jnp.log(mean)).sum(axis=-1)
    aleatoric = -(members * log_probs).sum(axis=-1).mean(axis=0)
    return mean, total, aleatoric, total - aleatoric, members


def scores(probs: np.ndarray) -> str:
    """Returns the scores of probabilities as text."""
    confidence, correct = probs.max(axis=-1), probs.argmax(axis=-1) == labels
    bins = np.minimum((confidence * 15).astype(int), 14)
    gaps = [
        abs(confidence[bins == b].mean() - correct[bins == b].mean()) * (bins == b).mean()
        for b in np.unique(bins)
    ]
    of_label = probs[np.arange(len(labels)), labels]
    brier = np.square(probs - np.eye(10)[labels]).sum(axis=-1).mean()
    return f"{correct.mean():.4f} {-np.log(of_label).mean():.4f} {brier:.4f} {sum(gaps):.4f}"


mean, total, aleatoric, epistemic, members = map(np.asarray, predict(params, x[TRAINED:]))
labels = y[TRAINED:]
print("accuracy, NLL, Brier score, ECE of the ensemble:", scores(mean))
for number, probs in enumerate(members):
    print(f"of member {number}:", scores(probs))
