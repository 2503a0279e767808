"""TabM against multilayer perceptrons on the prices of 53,940 diamonds.

    pip install plotnine && python -m benchmarks.tabm_diamonds

The table is the one that comes with plotnine. Its three categories become one-hot, numbers and the
logarithm of the price are standardised, and a fixed fifth of the rows is the test set, a tenth of
the others the validation set. All networks have three hidden layers of 128 units and are trained
with AdamW, learning rate 0.002 and weight decay 0.0003 (those of TabM's authors), on batches of
256. They are scored after every second epoch. Each line takes the epoch with the lowest validation
RMSE, and gives the RMSE of the test set there, in units of the logarithm of the price: the mean
over five seeds, and their range. Of five MLPs and of the heads of TabM, the mean prediction is
scored.
"""

from typing import Any

import numpy as np
import optax

import dist_ens as de
from dist_ens.data.order_rule import OrderRule
from dist_ens.losses import Objective
from dist_ens.members import Member
from launch import cli

_SEEDS, _POOL, _HEADS = 5, 5, 16
_HIDDEN, _BATCH, _EPOCHS, _EVERY = (128, 128, 128), 256, 50, 2


def main() -> None:
    """Prints the line of each predictor."""
    splits, std = _splits()
    inputs = splits["train"]["inputs"].shape[1:]
    mlp = de.models.mlp(inputs, 1, hidden_sizes=_HIDDEN, init="fan_in_uniform")
    tabm = de.models.tabm(mlp, heads=_HEADS)
    print("| predictor | test RMSE | range of 5 seeds | epoch |", flush=True)
    print("| --- | --- | --- | --- |", flush=True)
    for batches, order in (
        ("the same batches", de.data.shared()),
        ("their own batches", de.data.permuted()),
    ):
        members = _curves(mlp, de.losses.squared_error(), _SEEDS * _POOL, splits, order=order)
        if batches == "the same batches":
            _print("1 MLP", members[:, :_SEEDS, None], splits, std)
        pools = members.reshape(len(members), _SEEDS, _POOL, -1)
        _print(f"5 MLPs with {batches}", pools, splits, std)
    objective = de.losses.of_heads(de.losses.squared_error())
    heads = _curves(tabm, objective, _SEEDS, splits, order=de.data.shared())
    _print(f"TabM, {_HEADS} heads", heads.reshape(len(heads), _SEEDS, _HEADS, -1), splits, std)


def _splits() -> tuple[dict[str, dict[str, np.ndarray]], float]:
    """Returns the three parts of the table, and the deviation of the logarithm of the price."""
    from plotnine.data import diamonds

    price = np.log(diamonds["price"].to_numpy(np.float64))
    numbers = diamonds[["carat", "depth", "table", "x", "y", "z"]].to_numpy(np.float64)
    categories = [diamonds[name].cat.codes.to_numpy() for name in ("cut", "color", "clarity")]
    rows = np.random.default_rng(0).permutation(len(price))
    begin, end = len(rows) // 5, len(rows) // 5 + len(rows) * 4 // 50
    parts = {"test": rows[:begin], "valid": rows[begin:end], "train": rows[end:]}
    train = parts["train"]
    numbers = (numbers - numbers[train].mean(axis=0)) / numbers[train].std(axis=0)
    one_hot = [np.eye(codes.max() + 1)[codes] for codes in categories]
    inputs = np.concatenate([numbers, *one_hot], axis=1).astype(np.float32)
    mean, std = price[train].mean(), price[train].std()
    labels = ((price - mean) / std).astype(np.float32)
    return {
        name: {"inputs": inputs[part], "labels": labels[part]} for name, part in parts.items()
    }, float(std)


def _curves(
    member: Member, objective: Objective, num_members: int, splits: Any, *, order: OrderRule
) -> np.ndarray:
    """Returns predictions of validation and test rows, [epochs, predictors, rows]."""
    optimizer = optax.adamw(2e-3, weight_decay=3e-4)
    ensemble = de.Ensemble(member, optimizer, objective, num_members=num_members)
    inputs = np.concatenate([splits[name]["inputs"] for name in ("valid", "test")])
    steps = len(splits["train"]["labels"]) // _BATCH * _EVERY
    state, found = None, []
    for number in range(1, _EPOCHS // _EVERY + 1):
        result = de.fit(
            ensemble,
            splits["train"],
            steps=number * steps,
            batch_size=_BATCH,
            order=order,
            state=state,
            progress=False,
        )
        ensemble, state = result.ensemble, result.state
        parts = np.array_split(inputs, 16)
        outputs = [np.asarray(ensemble.apply(state, part))[..., 0] for part in parts]
        found.append(np.concatenate(outputs, axis=1))
    return np.stack(found)


def _print(name: str, predictions: np.ndarray, splits: Any, std: float) -> None:
    """Prints the line of predictors, [epochs, seeds, pooled, rows]."""
    pooled = predictions.mean(axis=2)
    count = len(splits["valid"]["labels"])
    valid, test = (
        np.sqrt(((pooled[..., part] - splits[split]["labels"]) ** 2).mean(axis=-1)) * std
        for split, part in (("valid", slice(count)), ("test", slice(count, None)))
    )
    best = valid.mean(axis=1).argmin()
    scores = test[best]
    span = f"{scores.min():.5f} to {scores.max():.5f}"
    print(f"| {name} | {scores.mean():.5f} | {span} | {_EVERY * (best + 1)} |", flush=True)


if __name__ == "__main__":
    cli.run(main)
