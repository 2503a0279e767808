"""The function `evaluate`, which scores an ensemble and its members on some data."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from dist_ens.data import LabelScaledSplit, Source, Spec, Split, Standardization, TreeSplit
from dist_ens.data.class_names import are_names, listed, with_class_numbers
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.batches import rows_of
from dist_ens.ensemble.failures import frozen_positions
from dist_ens.ensemble.own_step import loss_of_scoring
from dist_ens.errors import UserError, kind_of
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.label_checks import check_inputs, check_keys
from dist_ens.evaluation.loss_scores import WholeBatches, check_loss_scores, loss_scores
from dist_ens.evaluation.row_scores import Evaluation
from dist_ens.evaluation.scores import Scores
from dist_ens.host_keys import generator_of, host_array
from dist_ens.layout import to_host
from dist_ens.losses import Objective
from dist_ens.members.label_scale import label_scale
from dist_ens.metrics import Metric
from dist_ens.metrics.metric import checked_metrics
from dist_ens.state import State, refuse_lists, structure_text
from dist_ens.types import Batch, Data, PyTree, Specs, Structure

BATCH_SIZE = 1000


class Examples(NamedTuple):
    """The examples to score.

    Attributes:
        split: Examples with random access.
        spec: Description of the source of the examples. None if they do not come from a source.
        class_names: Names of the classes of arrays; empty if they have none.
    """

    split: Split
    spec: Spec | None = None
    class_names: tuple[str, ...] = ()


def evaluate(
    ensemble: Ensemble,
    state: State,
    data: Data | Examples,
    *,
    objective: Objective | None = None,
    eval_loss: Callable[..., PyTree] | None = None,
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
            holds the weights of the examples, if they have any. Labels may be names of classes if
            those of training were. Scores of a source that standardises its targets are in the
            targets' own unit. With a loss function, the batches of an iterable may be any pytrees
            of arrays. If their leaves have different lengths, or the ensemble has `batch_specs`,
            the scores are means over the batches.
        objective: Objective by which to score an ensemble of `Ensemble.from_step`. Default: that of
            the ensemble.
        eval_loss: Function by which to score such an ensemble, `eval_loss(state, batch, key) ->
            (loss, metrics)`. Default: that of the ensemble.
        metrics: Metrics in addition to those of the objective.
        batch_size: Number of examples at a time. A loss function takes all examples as one batch,
            unless this needs more than half of the free memory of a device.
        intervals: Whether to compute 95 % bootstrap intervals.

    Returns:
        The scores, which print as a table: `.ensemble` and `.mean_member` by name, `.members` for
        each member, and `.intervals`. Without an objective they are the loss function and its
        auxiliary scalars of the whole data for each member, and `.ensemble` is empty.

    Raises:
        UserError: If the data or a metric does not fit the ensemble, or `batch_size` is not a
            positive whole number. Also if a loss function draws random numbers or changes the model
            state without taking `train`, or the data does not fit in memory as one batch and a
            value of the loss function is no `losses.Ratio`.

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
    examples = examples_of(data, state.class_names, ensemble.batch_specs)
    if isinstance(examples.split, TreeSplit):
        check_inputs(ensemble.objective, examples.split.tree)
    scores, _ = score(
        ensemble, state, examples, metrics=own, batch_size=batch_size, intervals=intervals
    )
    return scores


def _scored_by(
    ensemble: Ensemble, objective: Objective | None, eval_loss: Callable[..., PyTree] | None
) -> Ensemble:
    """Returns an ensemble with a step of its own that is scored by something else.

    Only the newest is kept with the ensemble, so that its programs are compiled once.
    """
    if ensemble.own_step is None:
        raise UserError(
            "objective and eval_loss score an ensemble that Ensemble.from_step made. This one is "
            "scored by its loss. Leave them out."
        )
    kept, key = ensemble.programs.evaluation, (objective, eval_loss)
    if "scored_by" not in kept or kept["scored_by"][0] != key:
        has_apply = ensemble.member.has_apply
        loss = loss_of_scoring(objective, eval_loss, has_apply=has_apply)
        scored = ensemble.replace(loss=loss)
        kept["scored_by"] = key, scored
    return kept["scored_by"][1]


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
    examples = examples_of(data, state.class_names, ensemble.batch_specs)
    state = state._replace(class_names=())
    here, state = ensemble.at(state)
    check_groups(here, examples.spec)
    if here.objective is None:
        _check_no_metrics(metrics)
        scores = loss_scores(here, state, examples.split, int(batch_size))
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
    ensemble: Ensemble,
    batch: Batch,
    examples: Examples,
    *,
    metrics: Sequence[Metric] = (),
    batch_size: int = BATCH_SIZE,
) -> dict[str, str | None]:
    """Checks by shapes alone that examples can be scored; see `evaluate`.

    Args:
        ensemble: Ensemble. Its objective determines the metrics.
        batch: Shapes and types of a training batch.
        examples: Examples to score.
        metrics: Metrics in addition to those of the objective.
        batch_size: Number of examples at a time.

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
        return check_loss_scores(of_wave, state, examples.split, batch_size)
    objective = ensemble.objective
    split = parts_of_objective(objective, examples.split)
    if objective.standardize:
        split = LabelScaledSplit(split, objective.LABELS, 0.0, 1.0)
    evaluator = Evaluator(
        ensemble, batch_size, distribution=objective.distribution, metrics=metrics
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
    split, spec, names = examples
    if spec is None and names:
        spec = Spec((), "float32", (), len(names), ensemble.num_groups, class_names=names)
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
        UserError: If the inputs or the labels are absent, a key is misspelt, or the examples are
            batches without rows.
    """
    if isinstance(split, WholeBatches):
        raise UserError(
            f"The objective {objective.name} scores examples, and the arrays of a batch of the "
            "data have different lengths. Give every array one row for each example."
        )
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


def examples_of(
    data: Data | Examples, names: Sequence[str] = (), batch_specs: Specs = "batch"
) -> Examples:
    """Returns data as examples with random access.

    Args:
        data: Examples, a source (its test split), a split, a pytree of arrays, or a finite iterable
            of batches, which is read completely.
        names: Names of the classes of training; empty if they have none.
        batch_specs: Parts of a batch that hold no rows; see `Ensemble`.

    Raises:
        UserError: If the data has another type, or other classes than those of training.
    """
    if isinstance(data, Source):
        if names and data.spec.class_names not in (None, tuple(names)):
            raise UserError(
                f"The classes of the source are {listed(data.spec.class_names or ())}, and the "
                f"members were trained on {listed(names)}. Give a source of the same classes."
            )
        return Examples(data.test, data.spec)
    if isinstance(data, Examples):
        return data._replace(class_names=tuple(names)) if names else data
    if isinstance(data, Split):
        return Examples(data, class_names=tuple(names))
    if not _is_tree(data):
        data = _batches_of(data)
        if batch_specs != "batch" or any(rows_of(batch) is None for batch in data):
            return Examples(WholeBatches(data), class_names=tuple(names))
    arrays = with_class_numbers(arrays_of(data), Objective.LABELS, names, "The data")
    return Examples(TreeSplit(arrays), class_names=tuple(names))


def arrays_of(data: Data) -> PyTree:
    """Returns a pytree of arrays [examples, ...]: the data itself, or its batches joined.

    Args:
        data: A pytree of arrays (a dict, a tuple or an array), or a finite iterable of batches.

    Raises:
        UserError: If the data has another type, has no batches, or the batches are not pytrees of
            one structure.
    """
    if _is_tree(data):
        refuse_lists(data, "the data")
        return data
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *_batches_of(data))


def _is_tree(data: Data) -> bool:
    """Returns whether data is a pytree of arrays, and not an iterable of batches."""
    return isinstance(data, Mapping | tuple) or hasattr(data, "dtype")


def _batches_of(data: Data) -> list[Batch]:
    """Returns the batches of a finite iterable; see `arrays_of`."""
    if not isinstance(data, Iterable):
        raise UserError(
            f"The data is {kind_of(data)}. Give a dict of arrays, a source of "
            "dist_ens.data, or an iterable of batches."
        )
    batches = []
    for number, batch in enumerate(data):
        refuse_lists(batch, f"batch {number} of the data", and_numbers=False)
        batches.append(jax.tree.map(host_array, batch))
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
    return batches


def _check_batch(kind: str, number: int, batch: Batch) -> None:
    """Raises a `UserError` unless every leaf of a batch is an array of numbers."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        is_number = jax.numpy.issubdtype(leaf.dtype, jax.numpy.number) or leaf.dtype == bool
        is_scalar = not path and not leaf.ndim
        if is_scalar or not (is_number or generator_of(leaf.dtype) or are_names(leaf)):
            name = jax.tree_util.keystr(path)
            raise UserError(
                f"The data is {kind}, and its item {number} holds{name and f' at {name}'} an "
                f"array {leaf.dtype}{list(leaf.shape)}, which is no batch of examples. Give a dict "
                "of arrays [examples, ...], or an iterable of such batches."
            )
