"""The evaluator, which scores and predicts with an ensemble and all of its members."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens import progress
from dist_ens.data import ArraySplit, Spec, Split, evaluation_batches
from dist_ens.data.source_check import check_parts
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.checks import check_ids_of_groups
from dist_ens.ensemble.initial_state import shapes_of
from dist_ens.errors import BrokenMembersError, UserError, counted, first_line
from dist_ens.evaluation.label_checks import (
    check_classes,
    check_finite,
    check_labels,
    check_weights,
)
from dist_ens.evaluation.predictions import broken_positions, joined, shown
from dist_ens.evaluation.programs import programs_of
from dist_ens.evaluation.row_scores import Evaluation, scores_of_rows
from dist_ens.layout import BATCH, to_host
from dist_ens.losses import Categorical, Distribution, Gaussian, Objective
from dist_ens.metrics import Metric
from dist_ens.metrics.label_rows import one_a_row
from dist_ens.state import State
from dist_ens.stop_signal import StopSignal
from dist_ens.types import Labels, Leaf, Outputs, PyTree, Weights

# Arrays of predictions by name, see `Evaluator.predict`.
_Summary = dict[str, np.ndarray]


class Evaluator:
    """The evaluator of an ensemble, which scores or predicts every example exactly once.

    A device gets the outputs of all members for its column's part of a batch. So the batch should
    be small if there are many members and outputs. Only a few numbers are kept for each prediction,
    and not the members' outputs.

    Args:
        ensemble: Ensemble. Member m is in group m % num_groups.
        batch_size: Number of examples at a time over all hosts, at least 1.
        spec: Description of the data. Default: its labels are classes.
        distribution: Predictive distribution of the outputs. Default: `Categorical()` for classes,
            and `Gaussian()` for real targets.
        metrics: Metrics in addition to those of the distribution.
        left_out: Positions of members whose predictions are not pooled.

    Raises:
        UserError: If groups would have different numbers of members, no member remains, members are
            left out of several groups, or two metrics have the same name.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        batch_size: int,
        spec: Spec | None = None,
        distribution: Distribution | None = None,
        metrics: Sequence[Metric] = (),
        left_out: Sequence[int] = (),
    ) -> None:
        layout = ensemble.layout
        self._ensemble = ensemble
        self._spec = spec
        self._own_metrics = tuple(metrics)
        self.left_out = tuple(left_out)
        self._layout = layout
        self._num_groups = ensemble.num_groups
        if layout.num_members % self._num_groups:
            raise UserError(
                f"{counted(layout.num_members, 'member')} cannot be divided evenly among "
                f"{self._num_groups} groups. Choose a multiple."
            )
        check_ids_of_groups(ensemble.ids.tolist(), self._num_groups)
        if left_out and (self._num_groups > 1 or len(left_out) >= layout.num_members):
            raise UserError(
                f"{len(left_out)} of {counted(layout.num_members, 'member')}, in "
                f"{counted(self._num_groups, 'group')}, cannot be left out: members are left out "
                "of one group, and some must remain. Train again with a lower "
                "--config.optimizer.learning_rate."
            )
        self._standardization = spec.standardization if spec else None
        # Each batch has the same examples on every mesh, so that a network which samples draws the
        # same numbers for them. It is filled up to divide over the columns.
        self._batch_size = batch_size
        self._filled_size = math.ceil(batch_size / layout.data_axis) * layout.data_axis
        of_classes = spec is None or spec.num_classes is not None
        self.distribution = distribution or (Categorical() if of_classes else Gaussian())
        self.metrics = (*self.distribution.metrics, *self._own_metrics)
        known = {metric.name for metric in self.distribution.metrics}
        for metric in self._own_metrics:
            if metric.name in known:
                raise UserError(
                    f"Two metrics are called {metric.name!r}. Give one of them another name."
                )
            known.add(metric.name)
        self.programs = programs_of(ensemble, self.distribution, self.metrics, self.left_out)

    @property
    def ensemble(self) -> Ensemble:
        """Ensemble whose predictions are scored."""
        return self._ensemble

    def without(self, positions: Sequence[int]) -> "Evaluator":
        """Returns an evaluator that also leaves out the members at some positions.

        Args:
            positions: Positions of the members.

        Raises:
            UserError: If no member remains, or there are several groups.
        """
        left_out = sorted({*self.left_out, *positions})
        return Evaluator(
            self._ensemble,
            self._batch_size,
            self._spec,
            self.distribution,
            self._own_metrics,
            left_out,
        )

    def evaluate(self, state: State, split: Split, *, by_size: bool = False) -> Evaluation:
        """Computes the row statistics of a split.

        Args:
            state: State of the ensemble.
            split: Examples with `inputs`, `labels` and optional `weights`, which have the shape
                [examples] or that of the labels. The examples of several groups follow one another,
                group by group. Each host reads the part of its columns.
            by_size: Whether ensembles of 1, 2, … members are also scored.

        Returns:
            The evaluation, on every host. Rows of weight 0 are left out.

        Raises:
            UserError: If the labels do not have the shape of the outputs' rows, a metric does not
                fit, a label is NaN or infinite, or weights are negative, not finite, all 0, or
                given for several groups.
        """
        member_ids, programs = self._member_ids(state), self.programs
        length = len(split) // self._num_groups
        parts: list[PyTree] = []
        classwise: PyTree = None
        for number, batch in enumerate(self._batches(split)):
            inputs, labels = batch[Objective.INPUTS], batch[Objective.LABELS]
            weights = batch.get(Objective.WEIGHTS)
            outputs = programs.outputs(state, inputs)
            if not number:
                self._check_labels(outputs, labels, weights)
            labels, weights = self._aligned(outputs, labels, weights)
            if not number:
                programs.check_metrics(self._own_metrics, outputs, labels)
            found = programs.score(outputs, labels, batch["mask"], weights)
            values, sums = programs.apart(to_host(found))
            of_sizes = to_host(programs.score_by_size(outputs, labels)) if by_size else {}
            there = min(self._batch_size, length - number * self._batch_size)
            rows: PyTree = to_host(labels).reshape(self._num_groups, self._filled_size, -1)
            weights_of_rows = None if weights is None else _weights_like(to_host(weights), rows)
            parts.append(
                jax.tree.map(
                    lambda leaf, n=there: leaf[..., :n, :].reshape(*leaf.shape[:-2], -1),
                    (rows, *values, of_sizes, weights_of_rows),
                )
            )
            sums = (sums[0].sum(axis=1, dtype=np.float64), sums[1].sum(axis=1, dtype=np.float64))
            classwise = sums if classwise is None else jax.tree.map(np.add, classwise, sums)
        rows_per_example = rows.shape[-1]
        rows = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=-1), *parts)
        example_of_row = np.repeat(np.arange(length), rows_per_example)
        counted = rows[0] if rows[-1] is None else np.where(rows[-1] == 0, 0, rows[0])
        of_examples = counted.reshape(self._num_groups, length, -1).swapaxes(0, 1)
        check_finite(self._ensemble.objective, of_examples)
        if rows[-1] is not None:
            check_weights(rows[-1][0])
            counts = rows[-1][0] > 0
            rows = jax.tree.map(lambda leaf: leaf[..., counts], rows)
            example_of_row = example_of_row[counts]
        labels, groups, members, of_sizes, weights = rows
        if isinstance(self.distribution, Categorical):
            check_classes(labels, outputs.shape[-1])
        return Evaluation(
            distribution=self.distribution,
            metrics=self.metrics,
            by_size_metrics=programs.by_size,
            units=self.units,
            zeros=self.zeros,
            class_names=(self._spec and self._spec.class_names) or (),
            member_ids=member_ids,
            left_out=member_ids[list(self.left_out)].tolist(),
            rows_per_example=rows_per_example,
            example_of_row=example_of_row,
            labels=labels,
            groups=groups,
            members=members,
            group_classwise=classwise[0],
            member_classwise=classwise[1],
            # Weights that are all 1 are the same as no weights.
            weights=None if weights is None or (weights == 1).all() else weights[0],
            sizes=programs.sizes if by_size else (),
            by_size={
                name: leaf.reshape(len(programs.sizes), self._num_groups, -1)
                for name, leaf in of_sizes.items()
            },
        )

    def _check_labels(self, outputs: Outputs, labels: Labels, weights: Weights) -> None:
        """Checks the labels and weights of a batch against outputs [members, batch, ...]."""
        shape = (*self._rows_of(outputs), outputs.shape[-1])
        if self._num_groups > 1:
            labels = jax.ShapeDtypeStruct(labels.shape[1:], labels.dtype)
        check_labels(self.distribution, shape, labels, weights)

    def _aligned(
        self, outputs: Outputs, labels: Labels, weights: Weights
    ) -> tuple[Labels, Weights]:
        """Returns labels and weights of a batch without an axis of length 1 at their end."""
        rows = self._rows_of(outputs)
        of_groups = (self._num_groups, *rows) if self._num_groups > 1 else rows
        if weights is not None:
            weights = one_a_row(weights, rows)
        return one_a_row(labels, of_groups), weights

    def _rows_of(self, outputs: Outputs) -> tuple[int, ...]:
        """Returns the shape of the labels that belong to outputs [members, batch, ...]."""
        shape = list(outputs.shape[1:-1])
        if self._ensemble.dropout_samples is not None:
            del shape[1]  # of the samples
        return tuple(shape)

    def check(self, state: State, split: Split) -> dict[str, str | None]:
        """Checks that a split can be scored, by the shapes of its examples alone.

        Args:
            state: Shapes of the state of the ensemble, or of one wave if it has waves.
            split: Examples; see `evaluate`.

        Returns:
            Direction of each score of the ensemble by its name: "lower", "higher" or None.

        Raises:
            UserError: If the network, the predictive distribution or a metric does not fit.
        """
        example = split.take(np.zeros(1, np.int64))
        check_parts("The evaluation data", example, may_have_weights=True)
        groups = (self._num_groups,) if self._num_groups > 1 else ()
        of_batch = (*groups, self._filled_size)
        shapes = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((*of_batch, *leaf.shape[1:]), leaf.dtype),
            shapes_of(example),
        )
        labels, programs = shapes[Objective.LABELS], self.programs
        try:
            outputs = programs.outputs_shape(state, shapes[Objective.INPUTS])
            weights = shapes.get(Objective.WEIGHTS)
            self._check_labels(outputs, labels, weights)
            labels, weights = jax.eval_shape(partial(self._aligned, outputs), labels, weights)
            programs.check_metrics(self._own_metrics, outputs, labels)
            mask = jax.ShapeDtypeStruct((self._filled_size,), bool)
            return programs.scored(outputs, labels, mask, weights)
        except UserError:
            raise
        except Exception as error:  # A network or a distribution may raise any error.
            listed = ", ".join(
                f"{name!r} {leaf.dtype}{list(leaf.shape[len(of_batch) :])}"
                for name, leaf in shapes.items()
            )
            raise UserError(
                f"The evaluation data cannot be scored: {type(error).__name__}: "
                f"{first_line(error)} Its examples are {listed}. Give examples like those of the "
                "training data."
            ) from error

    def predict(self, state: State, inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Returns predictions for inputs, with inputs and real targets in their own units.

        Args:
            state: State of the ensemble.
            inputs: Inputs [examples, ...], the same on every host.

        Returns:
            A dict of arrays, on every host, with `member_id`, int32[members]. For classes it holds
            the ensemble's `probs`, float32[examples, ..., classes], and `member_probs` with a
            leading axis [members]. For real targets it holds `mean` and `variance`, [examples], or
            `quantiles`, [examples, levels], and the same names with the prefix `member_`. Targets
            that the source standardised are float64, because a mean may be far larger than its
            deviation; others are float32. With several groups the ensemble's leaves have a leading
            axis [groups].
        """
        given = self._standardization
        own = [inputs] * self._num_groups if given is None else given.of_inputs(inputs)
        own = np.concatenate(own)
        # A prediction does not read labels.
        split = ArraySplit(own, np.zeros(len(own), np.int32))
        batches = self._summaries(state, split, self.programs.predictions)
        groups, members = joined([(self.shown(g), self.shown(m)) for g, m in batches])
        if self._num_groups == 1:
            groups = {name: leaf[0] for name, leaf in groups.items()}
        members = {f"member_{name}": leaf for name, leaf in members.items()}
        return {**groups, **members, "member_id": self._member_ids(state)}

    def pooled_predictions(self, state: State, split: Split) -> dict[str, np.ndarray]:
        """Returns the summaries of the ensemble's predictions of a split.

        Args:
            state: State of the ensemble.
            split: Examples; see `evaluate`.

        Returns:
            Leaves float32[groups, examples, ...]. They are `log_probs`, in nats, for classes. For
            real targets they are `mean` and `variance`, or `quantiles`, in the unit in which the
            source has the targets.

        Raises:
            BrokenMembersError: If predictions of pooled members are NaN.
        """
        batches = self._summaries(state, split, self.programs.pooled_predictions)
        return joined([groups for groups, _ in self._sound(state, batches)])

    def member_predictions(self, state: State, split: Split) -> Iterator[dict[str, np.ndarray]]:
        """Yields the summaries of the members' predictions of a split, a batch at a time.

        Args:
            state: State of the ensemble.
            split: Examples; see `evaluate`.

        Yields:
            Leaves [members, batch, ...]; see `pooled_predictions`.

        Raises:
            BrokenMembersError: If predictions of pooled members are NaN.
        """
        batches = self._summaries(state, split, self.programs.predictions)
        for _, members in self._sound(state, batches):
            yield members

    def values_of(
        self,
        summary: Mapping[str, np.ndarray],
        labels: np.ndarray,
        counts: np.ndarray | None = None,
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns the row statistics of summaries of one group.

        Args:
            summary: Summary of predictions, leaves [examples, ...].
            labels: Labels of the split, [examples, ...].
            counts: Whether each example counts, bool[examples]. Default: all examples count.

        Returns:
            The statistics by name, float32[rows], of the examples that count, and the sums over
            classes. Real targets are in the unit in which the source has them. Statistics that a
            summary does not determine are left out.
        """
        counts = np.ones(len(labels), bool) if counts is None else counts
        prediction, at = self.distribution.from_summary(summary), jnp.asarray(labels)
        values = self.programs.statistics(prediction, at)
        classwise = self.distribution.classwise(prediction, at, jnp.asarray(counts))
        rows = {name: leaf[counts].ravel() for name, leaf in jax.device_get(values).items()}
        lost = self.distribution.lost_in_summary
        rows = {name: leaf for name, leaf in rows.items() if name not in lost}
        return rows, np.asarray(classwise, np.float64)

    def scores_of(
        self, parts: Iterable[tuple[Mapping[str, np.ndarray], np.ndarray, np.ndarray | None]]
    ) -> tuple[dict[str, float], dict[str, tuple[float, float]] | None]:
        """Computes the scores of summaries of one group, and their 95 % bootstrap intervals.

        Args:
            parts: Arguments of `values_of` for each part of the examples: summaries, labels and
                whether examples count. Small parts need less memory.

        Returns:
            The scores, and their intervals `(low, high)`. The intervals are None for too many rows.
        """
        values: list[dict[str, np.ndarray]] = []
        classwise: Leaf = 0
        num_examples = 0
        for summary, labels, counts in parts:
            rows, sums = self.values_of(summary, labels, counts)
            values.append(rows)
            classwise = classwise + sums
            num_examples += len(labels) if counts is None else int(counts.sum())
        rows = {name: np.concatenate([each[name] for each in values]) for name in values[0]}
        return scores_of_rows(self.metrics, rows, classwise, num_examples, self.units[0])

    def shown(self, summary: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns summaries in the form that `predict` returns.

        Args:
            summary: Summary of predictions, leaves [groups or members, examples, ...].
        """
        return shown(self.distribution, summary, self._standardization)

    @property
    def units(self) -> tuple[float, ...]:
        """Standard deviation by which the source divided the targets of each group; default: 1."""
        given = self._standardization
        return given.target_std if given else (1.0,) * self._num_groups

    @property
    def zeros(self) -> tuple[float, ...]:
        """Mean that the source subtracted from the targets of each group; default: 0."""
        given = self._standardization
        return given.target_mean if given else (0.0,) * self._num_groups

    def _sound(
        self, state: State, batches: Iterator[tuple[_Summary, _Summary]]
    ) -> Iterator[tuple[_Summary, _Summary]]:
        """Yields the batches; raises a `BrokenMembersError` if a pooled member predicts NaN."""
        for groups, members in batches:
            broken = [p for p in broken_positions(members) if p not in self.left_out]
            if broken:
                raise BrokenMembersError(self._member_ids(state)[broken].tolist())
            yield groups, members

    def _summaries(
        self, state: State, split: Split, program: Callable[[jax.Array], PyTree]
    ) -> Iterator[tuple[_Summary, _Summary]]:
        """Yields the results of a program of predictions for each batch, without padding."""
        self._member_ids(state)
        left = len(split) // self._num_groups
        for batch in self._batches(split):
            found = to_host(program(self.programs.outputs(state, batch[Objective.INPUTS])))
            count = min(left, self._batch_size)
            found = jax.tree.map(lambda leaf, n=count: leaf[:, :n], found)
            left -= count
            yield found

    def _member_ids(self, state: State) -> np.ndarray:
        """Returns the ids of the members; raises if they do not match the groups."""
        ids = to_host(state.member_id)
        if (ids % self._num_groups != np.arange(len(ids)) % self._num_groups).any():
            raise UserError(
                f"Members {ids.tolist()} are not in the order of their {self._num_groups} groups. "
                "Put them in the order of their ids."
            )
        return ids

    def _batches(self, split: Split) -> Iterator[dict[str, jax.Array]]:
        """Yields the batches of a split on the devices, with a `mask` without the padding."""
        rows, size = self._layout.host_rows(self._filled_size), self._batch_size
        for batch in evaluation_batches(
            split, global_batch_size=size, host_rows=rows, num_groups=self._num_groups
        ):
            progress.made()
            if StopSignal.current is not None:
                StopSignal.current.stop_evaluation()
            if self._num_groups > 1 and Objective.WEIGHTS in batch:
                raise UserError(
                    f"Examples of {self._num_groups} groups have weights, which only one group can "
                    "have. Leave the weights out."
                )
            mask = self._layout.put(batch.pop("mask"), BATCH)
            yield {**self._layout.put(batch, self.programs.examples_spec), "mask": mask}


def _weights_like(weights: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Returns the weights of rows, float64[1, batch, rows of an example]."""
    of_examples = np.asarray(weights, np.float64).reshape(1, len(weights), -1)
    return np.broadcast_to(of_examples, labels.shape)
