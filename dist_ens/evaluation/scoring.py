"""The function `evaluate`, which scores an ensemble and its members on some data."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dist_ens.data import LabelScaledSplit, Source, Spec, Split, Standardization, TreeSplit
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.failures import frozen_positions
from dist_ens.ensemble.initial_state import shapes_of
from dist_ens.ensemble.loss_checks import check_loss_outputs, explained_errors
from dist_ens.ensemble.optimizer import evaluation_params
from dist_ens.ensemble.waves import results_in_waves
from dist_ens.errors import UserError, first_line, kind_of
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.label_checks import check_keys
from dist_ens.evaluation.row_scores import Evaluation
from dist_ens.evaluation.scores import Scores, scores_of_means
from dist_ens.execution.lift import lift
from dist_ens.layout import MEMBERS, Waves, named_specs, to_host
from dist_ens.losses import Objective
from dist_ens.losses.averaging import traced_anew, tracing_loss
from dist_ens.members.label_scale import label_scale
from dist_ens.methods import LossInfo
from dist_ens.metrics import Metric
from dist_ens.metrics.catalogue import direction_of
from dist_ens.metrics.metric import checked_metrics
from dist_ens.randomness import PREDICT, pinned_generator
from dist_ens.state import State, refuse_lists, structure_text
from dist_ens.types import Batch, Data, Metrics, ModelState, Params, PyTree, Structure

BATCH_SIZE = 1000


class Examples(NamedTuple):
    """The examples to score.

    Attributes:
        split: Examples with random access.
        spec: Description of the source of the examples. None if they do not come from a source.
    """

    split: Split
    spec: Spec | None = None


def evaluate(
    ensemble: Ensemble,
    state: State,
    data: Data | Examples,
    *,
    metrics: Sequence[Metric] | None = None,
    batch_size: int = BATCH_SIZE,
    intervals: bool = True,
) -> Scores:
    """Scores an ensemble and each of its members on every example once.

    Args:
        ensemble: Ensemble. Its objective determines the metrics.
        state: State of the ensemble or of some members, of any layout.
        data: Data with the keys of the training data: a dict of arrays [examples, ...], a source
            of `dist_ens.data` (its test split), or a finite iterable of batches. The key `weights`
            holds the weights of the examples, if they have any. Scores of a source that
            standardises its targets are in the targets' own unit.
        metrics: Metrics in addition to those of the objective.
        batch_size: Number of examples at a time.
        intervals: Whether to compute 95 % bootstrap intervals.

    Returns:
        The scores, which print as a table: `.ensemble` and `.mean_member` by name, `.members` for
        each member, and `.intervals`. Without an objective they are the means of the loss function
        and of its auxiliary scalars for each member, and `.ensemble` is empty.

    Raises:
        UserError: If the data or a metric does not fit the ensemble, or `batch_size` is not a
            positive whole number.

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
    own = checked_metrics(metrics or ())
    scores, _ = score(
        ensemble, state, data, metrics=own, batch_size=batch_size, intervals=intervals
    )
    return scores


def score(
    ensemble: Ensemble,
    state: State,
    data: Data | Examples,
    *,
    metrics: Sequence[Metric] = (),
    batch_size: int = BATCH_SIZE,
    intervals: bool = True,
    by_size: bool = False,
) -> tuple[Scores, Evaluation | None]:
    """Returns the scores, and the evaluation from which they are computed; see `evaluate`.

    Args:
        ensemble: See `evaluate`.
        state: See `evaluate`.
        data: See `evaluate`.
        metrics: See `evaluate`.
        batch_size: See `evaluate`.
        intervals: See `evaluate`.
        by_size: Whether the evaluation includes ensembles of 1, 2, … of the members.

    Returns:
        The scores and the evaluation, which is None for an ensemble without an objective.

    Raises:
        UserError: See `evaluate`.
    """
    if not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise UserError(f"batch_size is {batch_size!r}. Give a whole number of at least 1.")
    (here, state), examples = ensemble.at(state), examples_of(data)
    check_groups(here, examples.spec)
    if here.objective is None:
        _check_no_metrics(metrics)
        scores = _mean_losses(here, state, examples.split, int(batch_size))
        left_out = to_host(state.member_id)[positions_left_out(here, state)]
        return dataclasses.replace(scores, left_out=left_out.tolist()), None
    examples = examples._replace(split=parts_of_objective(here.objective, examples.split))
    evaluator, split = evaluator_of(here, state, examples, metrics, int(batch_size))
    evaluation = without_failed(evaluator, here, state).evaluate(state, split, by_size=by_size)
    return evaluation.scores(intervals=intervals), evaluation


def positions_left_out(ensemble: Ensemble, state: State) -> list[int]:
    """Returns the positions of the members that failed, and are left out of the ensemble's scores.

    These are the frozen members. None are left out if all members are frozen, or if there are
    several groups of members, whose scores need every member.

    Args:
        ensemble: Ensemble.
        state: State of the ensemble. Every host must call this.
    """
    frozen = frozen_positions(state)
    is_possible = ensemble.num_groups == 1 and len(frozen) < ensemble.num_members
    return frozen if is_possible else []


def without_failed(evaluator: Evaluator, ensemble: Ensemble, state: State) -> Evaluator:
    """Returns an evaluator that leaves out the members that failed; see `positions_left_out`.

    Args:
        evaluator: Evaluator of the ensemble.
        ensemble: Ensemble.
        state: State of the ensemble. Every host must call this.
    """
    left_out = positions_left_out(ensemble, state)
    return evaluator.without(left_out) if left_out else evaluator


def check_score(
    ensemble: Ensemble, batch: Batch, examples: Examples, *, metrics: Sequence[Metric] = ()
) -> dict[str, str | None]:
    """Checks by shapes alone that examples can be scored; see `evaluate`.

    Args:
        ensemble: Ensemble. Its objective determines the metrics.
        batch: Shapes and types of a training batch.
        examples: Examples to score.
        metrics: Metrics in addition to those of the objective.

    Returns:
        Direction of each score by its name: "lower", "higher" or None.

    Raises:
        UserError: If the examples or a metric do not fit the ensemble.
    """
    of_wave = ensemble if ensemble.waves == 1 else ensemble.of_wave
    state = of_wave.abstract_state(batch)
    check_groups(ensemble, examples.spec)
    if ensemble.objective is None:
        _check_no_metrics(metrics)
        return _checked_means(of_wave, state, examples.split)
    objective = ensemble.objective
    split = parts_of_objective(objective, examples.split)
    if objective.standardize:
        split = LabelScaledSplit(split, objective.LABELS, 0.0, 1.0)
    evaluator = Evaluator(
        ensemble, BATCH_SIZE, distribution=objective.distribution, metrics=metrics
    )
    return evaluator.check(state, split)


def check_groups(ensemble: Ensemble, spec: Spec | None) -> None:
    """Raises a `UserError` if a source has other groups of examples than the ensemble."""
    if spec is not None and spec.num_groups != ensemble.num_groups:
        raise UserError(
            f"The source has num_groups={spec.num_groups}, and the ensemble has num_groups="
            f"{ensemble.num_groups}: members would be scored on examples that they were trained "
            f"on. Make the ensemble with num_groups={spec.num_groups}."
        )


def evaluator_of(
    ensemble: Ensemble, state: State, examples: Examples, metrics: Sequence[Metric], batch_size: int
) -> tuple[Evaluator, Split]:
    """Returns the evaluator of an ensemble with an objective, and a split with labels in its unit.

    Args:
        ensemble: Ensemble with an objective.
        state: State of the ensemble.
        examples: Examples to score.
        metrics: Metrics in addition to those of the objective.
        batch_size: Number of examples at a time.

    Raises:
        RuntimeError: If the ensemble has no objective.
    """
    objective = ensemble.objective
    if objective is None:
        raise RuntimeError("The ensemble has no objective, which an evaluator needs.")
    split, spec = examples
    if objective.standardize:
        mean, std = label_scale(state)
        split = LabelScaledSplit(split, objective.LABELS, mean, std)
        spec = _with_label_scale(spec, ensemble.num_groups, mean, std)
    return Evaluator(ensemble, batch_size, spec, objective.distribution, metrics), split


def _check_no_metrics(metrics: Sequence[Metric]) -> None:
    """Raises a `UserError` if metrics are given for a loss function."""
    if metrics:
        raise UserError(
            f"The metric {metrics[0].name!r} is computed from a predictive distribution, and "
            "the loss of this ensemble is a function. Use an objective, or return the metric "
            "from the loss as an auxiliary scalar."
        )


def parts_of_objective(objective: Objective, split: Split) -> Split:
    """Returns a split with the parts that an objective reads.

    Raises:
        UserError: If the inputs or the labels are absent, or a key is misspelt.
    """
    example = split.take(np.zeros(1, np.int64))
    if isinstance(example, Mapping):
        check_keys(objective, example)
    for key in (objective.INPUTS, objective.LABELS):
        if not isinstance(example, Mapping) or key not in example:
            found = ", ".join(map(repr, example)) if isinstance(example, Mapping) else "no dict"
            raise UserError(
                f"The objective {objective.name} takes data with the key {key!r}: got {found}. "
                f"Give a dict with {objective.INPUTS!r} and {objective.LABELS!r}."
            )
    if not isinstance(split, TreeSplit):
        return split
    # An objective reads no other part of the data, as in training.
    names = (objective.INPUTS, objective.LABELS, objective.WEIGHTS)
    return TreeSplit({name: split.tree[name] for name in names if name in split.tree})


def _with_label_scale(spec: Spec | None, num_groups: int, mean: float, std: float) -> Spec:
    """Returns a description of labels that the ensemble standardises after the source did."""
    given = spec.standardization if spec else None
    zeros = given.target_mean if given else (0.0,) * num_groups
    units = given.target_std if given else (1.0,) * num_groups
    both = Standardization(
        input_mean=((),) * num_groups,
        input_std=((),) * num_groups,
        target_mean=tuple(mean * unit + zero for zero, unit in zip(zeros, units, strict=True)),
        target_std=tuple(std * unit for unit in units),
    )
    return Spec((), "float32", (), None, num_groups, both)


def examples_of(data: Data | Examples) -> Examples:
    """Returns data as examples with random access.

    Args:
        data: Examples, a source (its test split), a split, a pytree of arrays, or a finite iterable
            of batches, which is read completely.

    Raises:
        UserError: If the data has another type.
    """
    if isinstance(data, Examples):
        return data
    if isinstance(data, Source):
        return Examples(data.test, data.spec)
    if isinstance(data, Split):
        return Examples(data)
    return Examples(TreeSplit(arrays_of(data)))


def arrays_of(data: Data) -> PyTree:
    """Returns a pytree of arrays [examples, ...]: the data itself, or its batches joined.

    Args:
        data: A pytree of arrays (a dict, a tuple or an array), or a finite iterable of batches.

    Raises:
        UserError: If the data has another type, has no batches, or the batches are not pytrees of
            one structure.
    """
    if isinstance(data, Mapping | tuple) or hasattr(data, "dtype"):
        refuse_lists(data, "the data")
        return data
    if not isinstance(data, Iterable):
        raise UserError(
            f"The data is {kind_of(data)}. Give a dict of arrays, a source of "
            "dist_ens.data, or an iterable of batches."
        )
    batches = []
    for number, batch in enumerate(data):
        refuse_lists(batch, f"batch {number} of the data", and_numbers=False)
        batches.append(jax.tree.map(np.asarray, batch))
    if not batches:
        raise UserError("The data has no batches. Give at least one.")
    first: Structure = jax.tree.structure(batches[0])
    for number, batch in enumerate(batches):
        _check_batch(kind_of(data), number, batch)
        structure: Structure = jax.tree.structure(batch)
        if structure != first:
            raise UserError(
                f"Batch {number} of the data is a pytree {structure_text(structure)}, and the "
                f"first is {structure_text(first)}. Give batches of one structure."
            )
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)


def _check_batch(kind: str, number: int, batch: Batch) -> None:
    """Raises a `UserError` unless every leaf of a batch is an array of numbers [batch, ...]."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        is_number = jax.numpy.issubdtype(leaf.dtype, jax.numpy.number) or leaf.dtype == bool
        if not leaf.ndim or not is_number:
            name = jax.tree_util.keystr(path)
            raise UserError(
                f"The data is {kind}, and its item {number} holds{name and f' at {name}'} an "
                f"array {leaf.dtype}{list(leaf.shape)}, which is no batch of examples. Give a dict "
                "of arrays [examples, ...], or an iterable of such batches."
            )


def _means_of_one(ensemble: Ensemble) -> Callable[[State, Batch], Metrics]:
    """Returns the function of a member and a batch that computes the loss and its scalars."""
    loss = ensemble.bare_loss

    @pinned_generator()
    def of_one(state: State, batch: Batch) -> Metrics:
        params = evaluation_params(state.params, state.opt_state)
        key = jax.random.fold_in(state.key, PREDICT)
        info = LossInfo(key, state.key, state.member_id, None, None)

        def means(params: Params, model_state: ModelState, batch: Batch) -> Metrics:
            with tracing_loss(), explained_errors():
                results = loss(params, model_state, batch, info)
                return check_loss_outputs(results, model_state)[2]

        return traced_anew(means)(params, state.model_state, batch)

    return of_one


def _checked_means(ensemble: Ensemble, state: State, split: Split) -> dict[str, str | None]:
    """Traces a loss function on a batch, and returns the directions of its scores."""
    size = min(len(split), BATCH_SIZE)
    examples = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype),
        shapes_of(split.take(np.zeros(1, np.int64))),
    )
    program = ensemble.layout.shard_map(
        lambda state, batch: jax.vmap(_means_of_one(ensemble), (0, None))(state, batch),
        in_specs=named_specs(("members", "shared")),
        out_specs=named_specs("members"),
    )
    try:
        with explained_errors():
            means = jax.eval_shape(program, state, examples)
    except UserError:
        raise
    except Exception as error:  # A loss function may raise any error.
        listed = ", ".join(
            f"{jax.tree_util.keystr(path)} {leaf.dtype}{list(leaf.shape)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(examples)
        )
        raise UserError(
            f"The loss function does not take the evaluation data, {listed}: "
            f"{type(error).__name__}: {first_line(error)} Give data with the keys and shapes of "
            "the training data."
        ) from error
    return {name: direction_of(name) for name in means}


def _mean_losses(ensemble: Ensemble, state: State, split: Split, batch_size: int) -> Scores:
    """Returns the means of a loss function and its auxiliary scalars over the batches."""
    kept = ensemble.evaluation_programs
    if "mean_losses" not in kept:
        kept["mean_losses"] = _mean_losses_program(ensemble)
    program = kept["mean_losses"]
    sums: dict[str, np.ndarray] = {}
    for first in range(0, len(split), batch_size):
        rows = np.arange(first, min(first + batch_size, len(split)))
        with explained_errors():
            means = to_host(program(state, split.take(rows)))
        for name, values in means.items():
            total = len(rows) * np.asarray(values, np.float64)
            sums[name] = sums[name] + total if name in sums else total
    return scores_of_means(to_host(state.member_id).tolist(), sums, len(split))


def _mean_losses_program(ensemble: Ensemble) -> Callable[[State, Batch], Metrics]:
    """Returns the program from a state and a batch to each member's means, float32[members]."""
    waves = Waves(ensemble.layout, ensemble.waves)
    # Every column gets the whole batch, so that the last batch can have any size.
    program: Callable[[State, Batch], Metrics] = lift(
        _means_of_one(ensemble), layout=waves.layout_of_one, in_specs=("members", "shared")
    )
    return results_in_waves(waves, program, MEMBERS) if waves.count > 1 else program
