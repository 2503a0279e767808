"""Out-of-bag predictions: training examples, predicted by members not trained on them."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.data import Split
from dist_ens.errors import UserError
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.json_text import JsonDict
from dist_ens.methods import poisson_weight
from dist_ens.randomness import EXAMPLES, member_key
from dist_ens.sampling import kfold
from dist_ens.state import State


def examples_out_of_bag(
    member_ids: np.ndarray, num_examples: int, *, seed: int, num_folds: int | None
) -> np.ndarray:
    """Returns whether each member was not trained on each training example.

    Args:
        member_ids: Ids of the members of one group.
        num_examples: Number of training examples.
        seed: Seed of the run.
        num_folds: Number of folds. None if members were trained on bootstrap samples.

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
) -> Iterator[tuple[Mapping[str, np.ndarray], np.ndarray]]:
    """Yields the out-of-bag predictions of the training examples, a batch at a time.

    Args:
        evaluator: Evaluator of an ensemble of one group.
        state: State of the ensemble.
        split: Training split.
        out_of_bag: Whether a member was not trained on an example; bool[members, examples], see
            `examples_out_of_bag`.

    Yields:
        Summaries with leaves [batch, ...], in the split's order, and whether some member left the
        example out, bool[batch]. An example that no member left out is predicted by all members.

    Raises:
        UserError: If every example is in every member's sample.
    """
    if not out_of_bag.any():
        raise UserError(
            "All members were trained on all examples, so none can be predicted out-of-bag. Train "
            "with --config.data.examples=bootstrap or kfold."
        )
    first = 0
    for summaries in evaluator.member_predictions(state, split):
        size = len(next(iter(summaries.values()))[0])
        masks = out_of_bag[:, first : first + size]
        first += size
        is_held_out = np.asarray(masks.any(axis=0))
        masks = masks | ~is_held_out[None]
        yield evaluator.distribution.pool_summaries(summaries, masks), is_held_out


def held_out_scores(
    evaluator: Evaluator, state: State, split: Split, out_of_bag: np.ndarray
) -> JsonDict:
    """Scores the out-of-bag predictions of the training examples.

    Args:
        evaluator: Evaluator of an ensemble of one group.
        state: State of the ensemble.
        split: Training split.
        out_of_bag: Whether a member was not trained on an example; bool[members, examples].

    Returns:
        `scores`, `interval` (absent for too many rows), and `not_scored`, the number of examples
        that no member left out.

    Raises:
        UserError: If every example is in every member's sample.
    """

    def parts() -> Iterator[tuple[Mapping[str, np.ndarray], np.ndarray, np.ndarray]]:
        first = 0
        for summary, counts in held_out_predictions(evaluator, state, split, out_of_bag):
            here = np.arange(first, first + len(counts))
            first += len(counts)
            yield summary, split.take(here)["labels"], counts

    scores, intervals = evaluator.scores_of(parts())
    not_scored = int((~out_of_bag.any(axis=0)).sum())
    found: JsonDict = {"scores": scores, "not_scored": not_scored}
    return found if intervals is None else found | {"interval": intervals}


def held_out_means(evaluator: Evaluator, state: State, split: Split) -> np.ndarray:
    """Returns the members' point predictions of a split.

    Args:
        evaluator: Evaluator of an ensemble of one group.
        state: State of the ensemble.
        split: Split to predict.

    Returns:
        Means or medians, in the unit in which the source has the targets;
        float64[members, examples].
    """
    parts = [
        evaluator.distribution.point(summary)
        for summary in evaluator.member_predictions(state, split)
    ]
    return np.concatenate(parts, axis=1).astype(np.float64)
