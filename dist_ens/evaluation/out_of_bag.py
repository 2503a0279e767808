"""What members say of training examples that they were not trained on."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.data import Split
from dist_ens.errors import UserError
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.methods import poisson_weight
from dist_ens.randomness import EXAMPLES, member_key
from dist_ens.sampling import kfold
from dist_ens.state import State


def examples_out_of_bag(
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


def held_out_predictions(
    evaluator: Evaluator, state: State, split: Split, out_of_bag: np.ndarray
) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
    """Of each training example the prediction by the members that were not trained on it.

    Args:
        evaluator: Of the ensemble, of one group.
        state: Of the ensemble.
        split: The training split.
        out_of_bag: Of `examples_out_of_bag`, bool[members, examples].

    Yields:
        A batch at a time, in the split's order: predictions in the form of
        `Evaluator.pooled_predictions`, without its leading axis, and whether some member left an
        example out, bool[batch]. Where none did, the prediction is that of all members.

    Raises:
        UserError: If every example is in every member's sample.
    """
    if not out_of_bag.any():
        raise UserError(
            "Some member leaves out some example. Received: members that were trained on all. "
            "Train them with --config.data.examples=bootstrap or kfold."
        )
    first = 0
    for told in evaluator.member_predictions(state, split):
        size = len(next(iter(told.values()))[0])
        masks = out_of_bag[:, first : first + size]
        first += size
        is_held_out = np.asarray(masks.any(axis=0))
        yield _pooled(told, masks | ~is_held_out[None]), is_held_out


def held_out_scores(
    evaluator: Evaluator, state: State, split: Split, out_of_bag: np.ndarray
) -> dict[str, Any]:
    """Scores of each training example's prediction by the members that were not trained on it.

    Args, Raises: As `held_out_predictions`.

    Returns:
        `scores`, `interval` (none of too many rows), and `not_scored`, how many examples no member
        left out.
    """

    def parts() -> Iterator[tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]]:
        first = 0
        for told, counts in held_out_predictions(evaluator, state, split, out_of_bag):
            here = np.arange(first, first + len(counts))
            first += len(counts)
            yield told, split.take(here)["labels"], counts

    scores, intervals = evaluator.scores_of(parts())
    not_scored = int((~out_of_bag.any(axis=0)).sum())
    found: dict[str, Any] = {"scores": scores, "not_scored": not_scored}
    return found if intervals is None else found | {"interval": intervals}


def held_out_means(evaluator: Evaluator, state: State, split: Split) -> np.ndarray:
    """Returns the members' predicted means (or medians) of a split, in the source's unit.

    float64[members, examples].
    """
    parts = []
    for told in evaluator.member_predictions(state, split):
        quantiles = told.get("quantiles")
        parts.append(
            told["mean"] if quantiles is None else quantiles[..., quantiles.shape[-1] // 2]
        )
    return np.concatenate(parts, axis=1).astype(np.float64)


def _pooled(told: dict[str, np.ndarray], masks: np.ndarray) -> dict[str, np.ndarray]:
    """Returns for each example the mean over the members that left it out, in float64."""
    told = {name: values.astype(np.float64) for name, values in told.items()}

    def mean(values: np.ndarray) -> np.ndarray:
        weights = masks.reshape(*masks.shape, *(1,) * (values.ndim - 2))
        return np.where(weights, values, 0).sum(axis=0) / weights.sum(axis=0)

    if "log_probs" in told:
        # A probability may be too small for any float, its logarithm is not.
        counted = masks.reshape(*masks.shape, *(1,) * (told["log_probs"].ndim - 2))
        added = np.logaddexp.reduce(np.where(counted, told["log_probs"], -np.inf), axis=0)
        return {"log_probs": added - np.log(counted.sum(axis=0))}
    if "variance" not in told:
        return {name: mean(values) for name, values in told.items()}
    center = mean(told["mean"])
    spread = mean(told["variance"] + np.square(told["mean"] - center[None]))
    return {"mean": center, "variance": spread}
