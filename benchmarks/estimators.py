"""The estimators beside scikit-learn's own bagging of as many networks of the same size.

    python -m benchmarks.estimators --data=DIR --seeds=5

DIR is a folder with `uci/NAME.npz`. Both take 8 MLPs with two layers of 64, Adam with the same
learning rate, batch size and number of epochs, and standardised inputs. Members of both see
bootstrap samples. Each seed is a split of the data, and which of the two comes first alternates.
Seconds are those of `fit` and a prediction of the test rows, compiling included and imports not:
each fit has a process of its own.

Bagging has no predictive variance. Its interval of 90 % is that of a normal distribution with the
standard deviation of its members.
"""

import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np
from absl import app, flags
from numpy.typing import ArrayLike
from scipy.special import ndtri
from scipy.stats import t

from launch.path_flags import define_path

_DATA = define_path("data", os.environ.get("DIST_ENS_DATA"), "Folder of the data sets.")
_SEEDS = flags.DEFINE_integer("seeds", 5, "Number of splits.", lower_bound=2)
_ONE = flags.DEFINE_list("one", None, "DATA,KIND,SEED: fit one of both in this process.")

_SETS = ("digits", "diabetes", "kin8nm", "concrete")
_MEMBERS, _SIZES, _EPOCHS, _BATCH, _LEARNING_RATE = 8, (64, 64), 60, 64, 2e-3
_COVERAGE = 0.9


def main(_: list[str]) -> None:
    """Prints a row of the table for each data set."""
    if _ONE.value:
        name, kind, number = _ONE.value
        print(json.dumps(_fitted(name, kind, int(number))))
        return
    for name in _SETS:
        found: dict[str, list[dict[str, float]]] = {"bagging": [], "ensemble": []}
        for seed in range(_SEEDS.value):
            for kind in sorted(found, reverse=seed % 2 == 1):
                found[kind].append(_in_new_process(name, kind, seed))
        for score in found["bagging"][0]:
            ours, theirs = (
                np.array([each[score] for each in found[kind]]) for kind in ("ensemble", "bagging")
            )
            means = f"{ours.mean():.4g} | {theirs.mean():.4g}"
            print(f"| {name} | {score} | {means} | {_paired(ours, theirs)} |", flush=True)


def _paired(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Returns the mean difference of pairs with its 95 % interval of Student's t."""
    values = ours - theirs
    half = t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
    return f"{values.mean():+.3g} ({values.mean() - half:+.3g} to {values.mean() + half:+.3g})"


def _in_new_process(name: str, kind: str, seed: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.estimators", f"--one={name},{kind},{seed}"]
    if _DATA.value is not None:
        command.append(f"--data={_DATA.value}")
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def _rows(name: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns standardised training inputs, their labels, and both of the test rows."""
    from sklearn import datasets
    from sklearn.model_selection import train_test_split
    from sklearn.preprocessing import StandardScaler

    if name in ("digits", "diabetes"):
        x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        x, x_test, y, y_test = train_test_split(x, y, test_size=0.2, random_state=seed)
    else:
        file = np.load(_DATA.value / "uci" / f"{name}.npz")
        inputs, labels = (
            file["data"][:, file["index_features"]],
            file["data"][:, file["index_target"]],
        )
        parts = file["train_idx"][seed], file["test_idx"][seed]
        (x, x_test), (y, y_test) = ([each[rows] for rows in parts] for each in (inputs, labels))
        y, y_test = y.ravel(), y_test.ravel()
    scaler = StandardScaler().fit(x)
    return scaler.transform(x), y, scaler.transform(x_test), y_test


def _fitted(name: str, kind: str, seed: int) -> dict[str, float]:
    """Returns the scores of one fit, and its seconds."""
    x, y, x_test, y_test = _rows(name, seed)
    has_classes = name == "digits"
    model = _model(kind, has_classes, seed)
    started = time.perf_counter()
    model.fit(x, y)
    if has_classes:
        probs = model.predict_proba(x_test)
        seconds = time.perf_counter() - started
        of_label = probs[np.arange(len(y_test)), y_test].clip(1e-15)
        return {
            "accuracy": float((probs.argmax(axis=1) == y_test).mean()),
            "NLL": float(-np.log(of_label).mean()),
            "s": seconds,
        }
    if kind == "ensemble":
        mean, std = model.predict(x_test, return_std=True)
    else:
        members = np.stack([each.predict(x_test) for each in model.regressor_.estimators_])
        members = members * model.transformer_.scale_ + model.transformer_.mean_
        mean, std = members.mean(axis=0), members.std(axis=0)
    seconds = time.perf_counter() - started
    half = ndtri((1 + _COVERAGE) / 2) * std
    inside = (np.abs(y_test - mean) <= half).mean()
    return {
        "RMSE": float(np.sqrt(((mean - y_test) ** 2).mean())),
        "NLL": float(np.mean(np.log(2 * np.pi * std**2) / 2 + (y_test - mean) ** 2 / std**2 / 2)),
        "interval score": _interval_score(mean - half, mean + half, y_test),
        "coverage": float(inside),
        "s": seconds,
    }


def _interval_score(low: np.ndarray, high: np.ndarray, y: ArrayLike) -> float:
    """Returns the mean interval score at 90 %, lower is better (Gneiting and Raftery, 2007)."""
    factor = 2 / (1 - _COVERAGE)
    outside = np.maximum(low - y, 0) + np.maximum(y - high, 0)
    return float((high - low + factor * outside).mean())


def _model(kind: str, has_classes: bool, seed: int) -> Any:
    """Returns an estimator that is not fitted."""
    if kind == "ensemble":
        from dist_ens.methods import bootstrap
        from dist_ens.sklearn import EnsembleClassifier, EnsembleRegressor

        make = EnsembleClassifier if has_classes else EnsembleRegressor
        return make(
            _MEMBERS,
            model=_SIZES,
            learning_rate=_LEARNING_RATE,
            max_epochs=_EPOCHS,
            batch_size=_BATCH,
            methods=(bootstrap(),),
            random_state=seed,
        )
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.ensemble import BaggingClassifier, BaggingRegressor
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.preprocessing import StandardScaler

    options: dict[str, Any] = dict(
        hidden_layer_sizes=_SIZES,
        learning_rate_init=_LEARNING_RATE,
        max_iter=_EPOCHS,
        batch_size=_BATCH,
        alpha=0,
        n_iter_no_change=_EPOCHS,
        random_state=seed,
    )
    if has_classes:
        return BaggingClassifier(MLPClassifier(**options), _MEMBERS, n_jobs=-1, random_state=seed)
    bagging = BaggingRegressor(MLPRegressor(**options), _MEMBERS, n_jobs=-1, random_state=seed)
    return TransformedTargetRegressor(bagging, transformer=StandardScaler())


if __name__ == "__main__":
    app.run(main)
