"""What members say of training examples that they were not trained on."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.data import Split
from dist_ens.ensemble import EXAMPLES, State, member_key
from dist_ens.errors import UserError
from dist_ens.evaluate.evaluator import Evaluator
from dist_ens.methods import kfold, poisson_weight


def out_of_bag(
    member_ids: np.ndarray, num_examples: int, *, seed: int, num_folds: int | None
) -> np.ndarray:
    """Which training examples each member was not trained on.

    Args:
        member_ids: Of the members, of one group.
        num_examples: Of the training split.
        seed: Of the run.
        num_folds: Of `kfold`; None: members were trained on bootstrap samples.

    Returns:
        bool[members, examples].
    """
    if num_folds is not None:
        folds = kfold.fold_of_example(seed, num_examples, num_folds)
        return folds[None] == (kfold.fold_of_member(member_ids, num_folds))[:, None]

    @jax.jit
    def left_out(member_id: jax.Array) -> jax.Array:
        key = jax.random.fold_in(member_key(np.uint32(seed), member_id), EXAMPLES)
        return poisson_weight(key, jnp.arange(num_examples)) == 0

    return np.stack([np.asarray(left_out(np.int32(i))) for i in member_ids])


def held_out_scores(
    evaluator: Evaluator, state: State, split: Split, left_out: np.ndarray
) -> tuple[dict[str, Any], int]:
    """Scores of each training example's prediction by the members that were not trained on it.

    Args:
        evaluator: Of the ensemble, of one group.
        state: Of the ensemble.
        split: The training split.
        left_out: Of `out_of_bag`, bool[members, examples].

    Returns:
        The scores, and how many examples no member left out; those are not scored.

    Raises:
        UserError: If every example is in every member's sample.
    """
    values: list[dict[str, np.ndarray]] = []
    first = 0
    for told in evaluator.member_predictions(state, split):
        size = len(next(iter(told.values()))[0])
        here = np.arange(first, first + size)
        first += size
        masks = left_out[:, here]
        scored = np.asarray(masks.any(axis=0))
        # Batches of one shape are scored by one program; the rows that nobody left out go after it.
        rows = evaluator.values_of(_pooled(told, masks | ~scored[None]), split.take(here)["labels"])
        of_example = np.repeat(scored, len(rows["prediction"]) // size)
        values.append({name: leaf[of_example] for name, leaf in rows.items()})
    missing = int((~left_out.any(axis=0)).sum())
    if missing == len(split):
        raise UserError(
            "Some member leaves out some example. Received: members that were trained on all. "
            "Train them with --config.data.examples=bootstrap or kfold."
        )
    rows = {n: np.concatenate([each[n] for each in values]) for n in values[0]}
    return evaluator.scores_of(rows), missing


def held_out_means(evaluator: Evaluator, state: State, split: Split) -> np.ndarray:
    """The members' predicted means (or medians) of a split, float64[members, examples]."""
    parts = []
    for told in evaluator.member_predictions(state, split):
        quantiles = told.get("quantiles")
        parts.append(
            told["mean"] if quantiles is None else quantiles[..., quantiles.shape[-1] // 2]
        )
    return np.concatenate(parts, axis=1).astype(np.float64)


def _pooled(told: dict[str, np.ndarray], masks: np.ndarray) -> dict[str, np.ndarray]:
    """Of each example the mean over the members that left it out."""

    def mean(values: np.ndarray) -> np.ndarray:
        weights = masks.reshape(*masks.shape, *(1,) * (values.ndim - 2))
        return np.where(weights, values, 0).sum(axis=0) / weights.sum(axis=0)

    if "variance" not in told:
        return {name: mean(values) for name, values in told.items()}
    center = mean(told["mean"])
    spread = mean(told["variance"] + np.square(told["mean"] - center[None]))
    return {"mean": center, "variance": spread}
