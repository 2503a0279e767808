"""Out-of-bag predictions: training examples, predicted by members not trained on them."""

from collections.abc import Iterable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.data import Split
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.examples import labels_of
from dist_ens.evaluation.scores import draws_of, intervals_of, num_draws
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.randomness import EXAMPLES, member_key
from dist_ens.ground.state import State
from dist_ens.ground.types import Leaf
from dist_ens.methods import poisson_weight
from dist_ens.metrics import Rows, scores_of
from dist_ens.sampling import kfold

# Summary, labels and whether each example counts, of a part of the examples.
Part = tuple[Mapping[str, np.ndarray], np.ndarray, np.ndarray]


def examples_out_of_bag(
    member_ids: np.ndarray, num_examples: int, *, seed: int, num_folds: int | None
) -> np.ndarray:
    """Returns which examples each member's fold or bootstrap left out, bool[members, examples]."""
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
) -> Iterator[tuple[Mapping[str, np.ndarray], np.ndarray]]:
    """Yields summaries of the out-of-bag predictions, and whether a member left the example out.

    An example that no member left out is predicted by all members, with their weights in the pool.
    """
    first = 0
    weights = np.ones(len(out_of_bag)) if evaluator.weights is None else evaluator.weights
    for summaries in evaluator.member_predictions(state, split):
        size = len(next(iter(summaries.values()))[0])
        masks = out_of_bag[:, first : first + size]
        first += size
        is_held_out = np.asarray(masks.any(axis=0))
        pool = (masks | ~is_held_out[None]) * weights[:, None]
        yield evaluator.distribution.pool_summaries(summaries, pool), is_held_out


def held_out_scores(
    evaluator: Evaluator, state: State, split: Split, out_of_bag: np.ndarray
) -> JsonDict:
    """Returns `scores` of the out-of-bag predictions, their `interval`, and `not_scored`.

    `not_scored` counts the examples that no member left out. Too many rows have no `interval`.
    """
    labels = labels_of(split)

    def parts() -> Iterator[Part]:
        first = 0
        for summary, counts in held_out_predictions(evaluator, state, split, out_of_bag):
            yield summary, labels[first : first + len(counts)], counts
            first += len(counts)

    scores, intervals, _ = scores_of_summaries(evaluator, parts())
    not_scored = int((~out_of_bag.any(axis=0)).sum())
    found: JsonDict = {"scores": scores, "not_scored": not_scored}
    return found if intervals is None else found | {"interval": intervals}


def held_out_means(evaluator: Evaluator, state: State, split: Split) -> np.ndarray:
    """Returns the members' means or medians of a split, in its unit; [members, examples, ...]."""
    parts = [
        evaluator.distribution.point(summary)
        for summary in evaluator.member_predictions(state, split)
    ]
    return np.concatenate(parts, axis=1).astype(np.float64)


def scores_of_summaries(
    evaluator: Evaluator, parts: Iterable[Part]
) -> tuple[dict[str, float], dict[str, tuple[float, float]] | None, Mapping[str, np.ndarray]]:
    """Returns scores of one group in its own unit, intervals (None for many rows), and rows."""
    values: list[dict[str, np.ndarray]] = []
    classwise: Leaf = 0
    num_examples = 0
    for summary, labels, counts in parts:
        rows, sums = evaluator.values_of(summary, labels, counts)
        values.append(rows)
        classwise = classwise + sums
        num_examples += int(counts.sum())
    rows = {name: np.concatenate([each[name] for each in values]) for name in values[0]}
    num_rows = len(next(iter(rows.values())))
    metrics, unit = evaluator.metrics, evaluator.units[0]
    targets = evaluator.distribution.num_targets or 1
    scores = scores_of(metrics, Rows(rows, classwise, unit, num_targets=targets))
    if not num_draws(num_rows):
        return scores, None, rows
    draws = draws_of(np.repeat(np.arange(num_examples), num_rows // num_examples))
    drawn = scores_of(metrics, Rows(rows, classwise, unit, draws=draws, num_targets=targets))
    return scores, intervals_of(metrics, drawn, scores), rows
