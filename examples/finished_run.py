"""A finished run: load it, predict, evaluate, and take out its networks.

    dist-ens train --config=configs/digits.py --workdir=runs/digits
    python examples/finished_run.py runs/digits

Without a folder, the script first trains a small ensemble in Python. A run that was started in
Python is loaded with `ensemble=`.

Result: an accuracy above 0.9 on digits by writers who are not in the training data.
"""

import sys
import tempfile

import flax.linen as nn
import optax
from sklearn.datasets import load_digits

import dist_ens as de


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(32)(x.reshape(len(x), -1))))


def train(folder, data):
    ensemble = de.Ensemble(MLP(), optax.adam(3e-3), de.losses.categorical(10), num_members=4)
    de.fit(ensemble, data, steps=200, checkpoints=de.Checkpoints(folder))
    return ensemble


def main(folder=None):
    x, y = load_digits().images, load_digits().target
    if folder is not None:
        run = de.load(folder)
    else:
        with tempfile.TemporaryDirectory() as folder:
            ensemble = train(folder, {"inputs": x[:1300], "labels": y[:1300]})
            run = de.load(folder, ensemble=ensemble)

    p = run.predict(x[1300:])
    scores = run.evaluate({"inputs": x[1300:], "labels": y[1300:]})
    networks = de.unstack_members(run.state.params)
    print(f"{run.ensemble.num_members} members after {run.step} steps")
    print(scores)
    print(f"Digit {p.total.argmax()} is the least certain, with {p.total.max():.2f} nats.")
    return {"run": run, "prediction": p, "scores": scores, "networks": networks}


if __name__ == "__main__":
    main(*sys.argv[1:])
