"""Ensembles whose members' outputs are a table, and outputs that know some of the labels."""

import jax
import numpy as np
import optax
from scipy.special import softmax

import dist_ens as de

ROWS, CLASSES = 60, 3


def tabled(outputs, objective=None, **options):
    """An ensemble whose members' outputs for the rows of the identity are a table, and its state.

    With `noise`, each prediction adds random numbers of this size, as dropout does.
    """
    noise = options.pop("noise", 0.0)

    def apply(params, model_state, inputs, key, train):
        found = inputs @ params["w"]
        return found + noise * jax.random.normal(key, found.shape), model_state

    network = (lambda key, inputs: ({"w": np.zeros_like(outputs[0])}, ())), apply
    objective = objective or de.losses.categorical(outputs.shape[-1])
    count = options.pop("num_members", len(outputs))
    ensemble = de.Ensemble(network, optax.sgd(0.1), objective, num_members=count, **options)
    return ensemble, ensemble.state_of([{"w": table} for table in outputs], [()] * count)


def drawn(seed, members, width=CLASSES, noise=1.5, rows=ROWS):
    """Outputs of members that know more or less of the labels, and the labels."""
    random = np.random.default_rng(seed)
    truth = random.normal(size=(rows, width))
    own = noise * (0.5 + np.arange(members) / members)
    outputs = truth + own[:, None, None] * random.normal(size=(members, rows, width))
    labels = truth.argmax(-1) if width > 1 else truth[:, 0]
    return outputs.astype(np.float32), labels


def data_of(labels):
    return {"inputs": np.eye(len(labels), dtype=np.float32), "labels": labels}


def score_of(metric, predictions, labels):
    """A lower-is-better score of a pooled prediction in float64."""
    if metric == "rmse":
        return np.sqrt(np.square(predictions - labels).mean())
    if metric == "nll":
        return -np.log(predictions[np.arange(len(labels)), labels]).mean()
    return -(predictions.argmax(-1) == labels).mean()


def members_of(outputs):
    outputs = outputs.astype(np.float64)
    return softmax(outputs, -1) if outputs.shape[-1] > 1 else outputs[..., 0]
