"""The one path from an ensemble, a state and data to scores, and the function `evaluate`."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import numpy as np
from numpy.typing import ArrayLike

from dist_ens.data import LabelScaledSplit, Spec, Split, Standardization, TreeSplit
from dist_ens.data.checks import check_parts
from dist_ens.data.spec import in_tuples
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.checks import check_ids_of_groups
from dist_ens.ensemble.failures import frozen_positions
from dist_ens.ensemble.initial_state import label_scale, shapes_of
from dist_ens.ensemble.own_step import loss_of_scoring
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.examples import Examples, examples_of, parts_of_objective
from dist_ens.evaluation.label_checks import check_inputs
from dist_ens.evaluation.loss_scores import loss_directions, loss_scores
from dist_ens.evaluation.scores import Evaluation, Scores
from dist_ens.ground.errors import UserError, first_line
from dist_ens.ground.state import State, described, require_state
from dist_ens.ground.types import Batch, Data, PyTree
from dist_ens.layout import to_host
from dist_ens.losses import Objective
from dist_ens.metrics import Metric
from dist_ens.metrics.metric import checked_metrics

# Examples and labels that are scored at a time. A device holds its members' outputs for its part.
_MOST_EXAMPLES, _MOST_LABELS = 1000, 16_384


def evaluate(
    ensemble: Ensemble,
    state: State,
    data: Data | Examples,
    *,
    objective: Objective | None = None,
    eval_loss: Callable[..., PyTree] | None = None,
    metrics: Sequence[Metric | str] | None = None,
    batch_size: int | None = None,
    intervals: bool = True,
    weights: ArrayLike | None = None,
) -> Scores:
    """Scores an ensemble and each of its members on every example once.

    Args:
        ensemble: Ensemble. Its objective determines the metrics.
        state: State of the ensemble or of some members, of any layout.
        data: Data with the keys of the training data: a dict (or another pytree) of arrays
            [examples, ...], a source of `dist_ens.data` (its test split), or a finite iterable of
            batches, or a function that returns an iterator over them. The key `weights`
            holds the weights of the examples, if they have any. Labels may be names of classes if
            those of training were. Scores of a source that standardises its targets are in the
            targets' own unit. With a loss function, the batches of an iterable may be any pytrees
            of arrays. If their leaves have different lengths, or the ensemble has `batch_specs`,
            the scores are means over the batches.
        objective: Objective by which to score an ensemble of `Ensemble.from_step`. Default: that of
            the ensemble.
        eval_loss: Function by which to score such an ensemble, `eval_loss(state, batch, key) ->
            (loss, metrics)`. Default: that of the ensemble.
        metrics: Metrics in addition to those of the objective, or names of its optional metrics,
            such as "balanced_accuracy", "macro_f1", "auroc" and "average_precision" of classes.
        batch_size: Number of examples at a time. Default: 1,000, or as many as have 16,384 labels
            if those are fewer, as of texts. A loss function takes all examples as one batch, unless
            this needs more than half of the free memory of a device.
        intervals: Whether to compute 95 % bootstrap intervals.
        weights: Weights of the members in the pool, such as those of `select`; not negative,
            float[members], in the order of the state. Default: equal weights. The weights of the
            examples are a part of the data.

    Returns:
        The scores, which print as a table: `.ensemble` and `.mean_member` by name, `.members` for
        each member, and `.intervals`. Without an objective they are the loss function and its
        auxiliary scalars of the whole data for each member, and `.ensemble` is empty.

    Raises:
        UserError: If the data, a metric or the weights do not fit the ensemble. Also if a loss
            function draws random numbers or changes the model state without taking `train`, or the
            data does not fit in memory as one batch and a value of the loss function is no
            `losses.Ratio`.

    >>> import optax
    >>> from dist_ens.losses import categorical
    >>> network = (
    ...     lambda key: {"w": jax.random.normal(key, (3, 2))},
    ...     lambda params, inputs: inputs @ params["w"],
    ... )
    >>> ensemble = Ensemble(network, optax.sgd(0.1), categorical(2), num_members=4)
    >>> data = {"inputs": np.zeros((8, 3)), "labels": np.zeros(8, int)}
    >>> scores = evaluate(ensemble, ensemble.init(data), data)
    >>> round(scores.ensemble["nll"], 4)  # log 2, because the two classes are equally probable
    0.6931
    """
    if objective is not None or eval_loss is not None:
        ensemble = _scored_by(ensemble, objective, eval_loss)
    own = checked_metrics(metrics or ())
    require_state(state)
    examples = examples_of(data, state.class_names, ensemble.batch_specs)
    if isinstance(examples.split, TreeSplit):
        check_inputs(ensemble.objective, examples.split.tree)
    scores, _ = score(
        ensemble,
        state,
        examples,
        metrics=own,
        batch_size=batch_size,
        intervals=intervals,
        weights=weights,
    )
    return scores


def score(
    ensemble: Ensemble,
    state: State,
    data: Data | Examples,
    *,
    metrics: Sequence[Metric | str] = (),
    batch_size: int | None = None,
    intervals: bool = True,
    by_size: bool = False,
    weights: ArrayLike | None = None,
) -> tuple[Scores, Evaluation | None]:
    """Returns scores and their evaluation, which is None without an objective; see `evaluate`."""
    examples = examples_of(data, state.class_names, ensemble.batch_specs)
    here, state = ensemble.at(state._replace(class_names=()))
    examples = scorable(here, examples, metrics)
    if here.num_groups > 1:
        check_ids_of_groups(to_host(state.member_id).tolist(), here.num_groups)
    if here.objective is None:
        if weights is not None:
            raise UserError(
                "weights pool predictions, and the loss of this ensemble is a function, which "
                "scores each member alone. Leave weights out."
            )
        size = _MOST_EXAMPLES if batch_size is None else batch_size
        scores = loss_scores(here, state, examples.split, size)
        left_out = to_host(state.member_id)[positions_left_out(here, state)]
        return dataclasses.replace(scores, left_out=left_out.tolist()), None
    evaluator, split = evaluator_of(here, state, examples, metrics, batch_size, weights)
    evaluation = without_failed(evaluator, state).evaluate(state, split, by_size=by_size)
    return evaluation.scores(intervals=intervals), evaluation


def score_directions(
    ensemble: Ensemble,
    batch: Batch,
    examples: Examples,
    *,
    metrics: Sequence[Metric | str] = (),
    batch_size: int | None = None,
) -> dict[str, str | None]:
    """Returns the direction of each score: "lower", "higher" or None.

    Only shapes are computed, from those of a training batch. So this also checks, before training,
    that examples can be scored.
    """
    of_wave = ensemble if ensemble.waves == 1 else ensemble.of_wave
    state, objective = of_wave.abstract_state(batch), ensemble.objective
    split = scorable(ensemble, examples, metrics).split
    try:
        if objective is None:
            size = _MOST_EXAMPLES if batch_size is None else batch_size
            return loss_directions(of_wave, state, split, size)
        size = _examples_at_a_time(split) if batch_size is None else batch_size
        evaluator = Evaluator(ensemble, size, None, objective.distribution, metrics)
        return _directions(evaluator, state, split)
    except UserError:
        raise
    except Exception as error:  # The network, the distribution or the loss may raise any error.
        example = described(split.take(np.zeros(1, np.int64)))
        raise UserError(
            f"The evaluation data cannot be scored: {type(error).__name__}: {first_line(error)} "
            f"One example is {example}. Give examples like those of the training data."
        ) from error


def scorable(
    ensemble: Ensemble, examples: Examples, metrics: Sequence[Metric | str] = ()
) -> Examples:
    """Returns examples with the parts that an ensemble scores; raises if they do not fit it."""
    spec, objective = examples.spec, ensemble.objective
    if spec is not None and spec.num_groups != ensemble.num_groups:
        raise UserError(
            f"The source has num_groups={spec.num_groups}, and the ensemble has num_groups="
            f"{ensemble.num_groups}. Make the ensemble with num_groups={spec.num_groups}."
        )
    if objective is not None:
        return examples._replace(split=parts_of_objective(objective, examples.split))
    if metrics:
        first = metrics[0]
        raise UserError(
            f"The metric {first if isinstance(first, str) else first.name!r} needs a predictive "
            "distribution, and the loss of this ensemble is a function. Return the metric from it "
            "as an auxiliary scalar."
        )
    return examples


def _directions(evaluator: Evaluator, state: State, split: Split) -> dict[str, str | None]:
    ensemble = evaluator.ensemble
    example = split.take(np.zeros(1, np.int64))
    check_parts("The evaluation data", example)
    groups = (ensemble.num_groups,) if ensemble.num_groups > 1 else ()
    size = evaluator.filled_size
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((*groups, size, *leaf.shape[1:]), leaf.dtype),
        shapes_of(example),
    )
    outputs = evaluator.outputs_shape(state, shapes[Objective.INPUTS])
    labels, weights = jax.eval_shape(
        partial(evaluator.aligned, outputs), shapes[Objective.LABELS], shapes.get(Objective.WEIGHTS)
    )
    mask = jax.ShapeDtypeStruct((size,), bool)
    scored = jax.eval_shape(evaluator.programs.score, outputs, labels, mask, weights)
    return evaluator.directions(*scored[0])


def evaluator_of(
    ensemble: Ensemble,
    state: State,
    examples: Examples,
    metrics: Sequence[Metric | str],
    batch_size: int | None,
    weights: ArrayLike | None = None,
) -> tuple[Evaluator, Split]:
    """Returns the evaluator of an ensemble with an objective, and the split in its labels' unit."""
    objective: Objective = ensemble.objective  # type: ignore[assignment]
    split, spec, names = examples
    groups, given = ensemble.num_groups, None
    if spec is not None:
        names, given = spec.class_names or names, spec.standardization
    if objective.standardize:  # After the source, which may have standardised the labels too.
        mean, std = label_scale(state)
        split = LabelScaledSplit(split, objective.LABELS, mean, std)
        zeros = np.array(given.target_mean if given else [0 * mean] * groups)
        units = np.array(given.target_std if given else [0 * std + 1] * groups)
        given = Standardization(
            input_mean=((),) * groups,
            input_std=((),) * groups,
            target_mean=in_tuples(mean * units + zeros),
            target_std=in_tuples(std * units),
        )
    spec = Spec((), "float32", (), len(names) or None, groups, given, names or None)
    size = _examples_at_a_time(split) if batch_size is None else batch_size
    evaluator = Evaluator(ensemble, size, spec, objective.distribution, metrics)
    return evaluator if weights is None else evaluator.pooling((), weights), split


def _examples_at_a_time(split: Split) -> int:
    """Returns the number of examples of a split that are scored at a time by default."""
    labels = jax.tree.leaves(split.take(np.zeros(1, np.int64))[Objective.LABELS])
    return min(_MOST_EXAMPLES, max(1, _MOST_LABELS // max(np.size(leaf) for leaf in labels)))


def positions_left_out(ensemble: Ensemble, state: State) -> list[int]:
    """Returns the positions of the frozen members; every host must call this.

    None are left out if all members are frozen, or if several groups need every member.
    """
    frozen = frozen_positions(state)
    is_possible = ensemble.num_groups == 1 and len(frozen) < ensemble.num_members
    return frozen if is_possible else []


def without_failed(evaluator: Evaluator, state: State) -> Evaluator:
    """Returns an evaluator that leaves out the members that failed; see `positions_left_out`."""
    positions = positions_left_out(evaluator.ensemble, state)
    left_out = evaluator.ensemble.predictors_of(positions)
    return evaluator.without(left_out) if left_out else evaluator


def _scored_by(
    ensemble: Ensemble, objective: Objective | None, eval_loss: Callable[..., PyTree] | None
) -> Ensemble:
    """Returns an ensemble with its own step that another loss scores; the newest is kept."""
    if ensemble.own_step is None:
        raise UserError(
            "objective and eval_loss score an ensemble of Ensemble.from_step. Leave them out."
        )
    kept, key = ensemble.programs.evaluation, (objective, eval_loss)
    if "scored_by" not in kept or kept["scored_by"][0] != key:
        has_apply = ensemble.member.has_apply
        loss = loss_of_scoring(objective, eval_loss, has_apply=has_apply)
        kept["scored_by"] = key, ensemble.replace(loss=loss)
    return kept["scored_by"][1]
