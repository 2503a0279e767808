"""The evaluator, which scores and predicts with an ensemble and all of its members."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from dist_ens.data import ArraySplit, Spec, Split, evaluation_batches
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.checks import check_ids_of_groups
from dist_ens.evaluation.label_checks import (
    check_classes,
    check_finite,
    check_labels,
    check_weights,
)
from dist_ens.evaluation.programs import programs_of
from dist_ens.evaluation.scores import Evaluation
from dist_ens.ground.errors import BrokenMembersError, UserError
from dist_ens.ground.state import State
from dist_ens.ground.types import Labels, Outputs, PyTree, Shapes, Weights
from dist_ens.layout import BATCH, to_host
from dist_ens.losses import Categorical, Distribution, Gaussian, Objective
from dist_ens.losses.distribution import checked_weights
from dist_ens.metrics import Metric
from dist_ens.metrics.metric import CLASSWISE, WHOLE_WEIGHTS, named_metrics, one_a_row
from dist_ens.processes import progress
from dist_ens.processes.stop_signal import StopSignal

# Arrays of predictions by name, see `Evaluator.predict`.
_Summary = dict[str, np.ndarray]


class Evaluator:
    """The evaluator of an ensemble, which scores or predicts every example exactly once.

    A device gets the outputs of all members for its column's part of a batch. Without
    `distribution` it is `Categorical()` for classes, as without `spec`, and `Gaussian()` for real
    targets. Members at the positions `left_out` are not pooled. The others are pooled with
    `weights`, float64[members] with sum 1, or equally without.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        batch_size: int,
        spec: Spec | None = None,
        distribution: Distribution | None = None,
        metrics: Sequence[Metric | str] = (),
        left_out: Sequence[int] = (),
        weights: ArrayLike | None = None,
    ) -> None:
        self.ensemble, self.left_out = ensemble, tuple(left_out)
        self._spec = spec
        self._layout, self._num_groups = ensemble.layout, ensemble.num_groups
        check_ids_of_groups(ensemble.ids.tolist(), self._num_groups)
        count = ensemble.num_predictors
        if left_out and (self._num_groups > 1 or len(left_out) >= count):
            raise UserError(
                f"{len(left_out)} of {count} members cannot be left out: there must "
                "be one group, of which some remain. Train again with a lower learning rate."
            )
        self._standardization = given = spec.standardization if spec else None
        # By these the source divided the targets of each group, after it subtracted those.
        # They are float64[groups], or float64[groups, targets].
        self.units = np.array(given.target_std) if given else np.ones(self._num_groups)
        self.zeros = np.array(given.target_mean) if given else np.zeros(self._num_groups)
        # Each batch has the same examples on every mesh, so that a network which samples draws the
        # same numbers for them. It is filled up to divide over the columns.
        self._batch_size, columns = batch_size, self._layout.data_axis
        self.filled_size = math.ceil(batch_size / columns) * columns
        of_classes = spec is None or spec.num_classes is not None
        self.distribution = distribution or (Categorical() if of_classes else Gaussian())
        self.own_metrics = named_metrics(metrics, self.distribution.optional_metrics)
        self.metrics = (*self.distribution.metrics, *self.own_metrics)
        names = [metric.name for metric in self.own_metrics]
        names += {metric.name for metric in self.distribution.metrics}
        if len({*names}) < len(names):
            twice = max(names, key=names.count)
            raise UserError(f"Two metrics are called {twice!r}. Give one another name.")
        self.programs = programs_of(ensemble, self.distribution, self.metrics, self.left_out)
        self.weights, self._pool = self._weights(weights), None
        if self.weights is not None:
            self._pool = np.delete(self.weights, self.left_out).astype(np.float32)

    def without(self, positions: Sequence[int]) -> "Evaluator":
        """Returns an evaluator that also leaves out the members at some positions."""
        return self.pooling(sorted({*self.left_out, *positions}), self.weights)

    def pooling(self, left_out: Sequence[int], weights: ArrayLike | None) -> "Evaluator":
        """Returns an evaluator that leaves out other members, or pools with other weights."""
        return Evaluator(
            self.ensemble,
            self._batch_size,
            self._spec,
            self.distribution,
            self.own_metrics,
            left_out,
            weights,
        )

    def _weights(self, weights: ArrayLike | None) -> np.ndarray | None:
        """Returns checked weights, which are 0 for members left out."""
        if weights is None:
            return None
        if self._num_groups > 1:
            raise UserError(
                f"weights are those of one pool, and this ensemble has {self._num_groups} groups "
                "of members that were trained on other examples. Leave weights out."
            )
        count = self.ensemble.num_predictors
        found = np.array(checked_weights(weights, count, self.distribution))
        found[list(self.left_out)] = 0
        return checked_weights(found, count)

    @property
    def not_pooled(self) -> list[int]:
        """Positions of the members that are left out or have weight 0."""
        if self.weights is None:
            return list(self.left_out)
        return np.flatnonzero(self.weights == 0).tolist()

    def evaluate(self, state: State, split: Split, *, by_size: bool = False) -> Evaluation:
        """Returns the row statistics of a split on every host, without rows of weight 0.

        The examples of several groups follow one another, group by group. With `by_size` ensembles
        of 1, 2, … members are also scored.
        """
        programs, length = self.programs, len(split) // self._num_groups
        parts: list[PyTree] = []
        totals: PyTree = None
        for batch, mask, count in self._batches(split):
            outputs = self.ensemble.outputs(state, batch[Objective.INPUTS])
            labels, weights = self.aligned(
                outputs, batch[Objective.LABELS], batch.get(Objective.WEIGHTS)
            )
            scored = to_host(programs.score(outputs, labels, mask, weights, self._pool))
            (groups, of_groups), (members, of_members) = scored
            of_sizes, of_orders = {}, {}
            if by_size:
                of_sizes, of_orders = to_host(
                    programs.score_by_size(outputs, labels, mask, weights, self._pool)
                )
            rows: PyTree = to_host(labels).reshape(self._num_groups, self.filled_size, -1)
            if weights is not None:
                of_examples = to_host(weights).astype(np.float64).reshape(1, len(mask), -1)
                weights = np.broadcast_to(of_examples, rows.shape)
            parts.append(
                jax.tree.map(
                    lambda leaf, n=count: leaf[..., :n, :].reshape(*leaf.shape[:-2], -1),
                    (rows, groups, members, of_sizes, weights),
                )
            )
            sums = jax.tree.map(
                lambda leaf: leaf.sum(axis=1, dtype=np.float64), (of_groups, of_members, of_orders)
            )
            totals = sums if totals is None else jax.tree.map(np.add, totals, sums)
        all_rows = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=-1), *parts)
        rows_per_example = rows.shape[-1]
        example_of_row = np.repeat(np.arange(length), rows_per_example)
        all_rows, counts = self._counted(all_rows, length, outputs.shape[-1])
        labels, groups, members, of_sizes, weights = all_rows
        self.directions(groups, totals[0])
        targets = self.distribution.num_targets or 1
        num_counted = (labels.shape[1] if weights is None else weights.sum()) / targets
        member_ids = self.ensemble.predictor_ids(state)
        hyper = to_host(state.hyper or {})
        return Evaluation(
            distribution=self.distribution,
            metrics=self.metrics,
            units=self.units,
            zeros=self.zeros,
            class_names=(self._spec and self._spec.class_names) or (),
            member_ids=member_ids,
            hyper={n: np.repeat(v, self.ensemble.heads or 1) for n, v in hyper.items()},
            left_out=member_ids[self.not_pooled].tolist(),
            member_weights=self.weights,
            rows_per_example=rows_per_example,
            example_of_row=example_of_row[counts],
            labels=labels,
            groups=groups,
            members=members,
            group_classwise=totals[0],
            member_classwise=totals[1],
            weights=weights,
            sizes=programs.sizes if by_size else (),
            by_size={
                name: leaf.reshape(len(programs.sizes), self._num_groups, -1)
                for name, leaf in of_sizes.items()
            },
            by_order={
                name: leaf.reshape(-1, self._num_groups, len(programs.sizes), targets) / num_counted
                for name, leaf in totals[2].items()
            },
        )

    def _counted(
        self, rows: tuple[PyTree, ...], length: int, num_outputs: int
    ) -> tuple[tuple[PyTree, ...], slice | np.ndarray]:
        """Checks labels and weights. Returns the rows of a weight above 0, and which they are."""
        *others, weights = rows
        labels = others[0] if weights is None else np.where(weights == 0, 0, others[0])
        of_examples = labels.reshape(self._num_groups, length, -1).swapaxes(0, 1)
        check_finite(self.ensemble.objective, of_examples)
        if isinstance(self.distribution, Categorical):
            check_classes(labels, num_outputs if self.distribution.num_targets is None else 2)
        if weights is None:
            return rows, slice(None)
        check_weights(weights[0])
        counts = weights[0] > 0
        others = jax.tree.map(lambda leaf: leaf[..., counts], others)
        weights = weights[0, counts]
        # Weights that are all 1 are the same as no weights.
        return (*others, None if (weights == 1).all() else weights), counts

    def aligned(self, outputs: Outputs, labels: Labels, weights: Weights) -> tuple[Labels, Weights]:
        """Returns checked labels and weights of a batch, without a last axis of length 1.

        The weights of several targets are those of their rows, [batch, ..., targets].
        """
        rows = outputs.shape[1:-1]
        if self.ensemble.dropout_samples is not None:
            rows = (rows[0], *rows[2:])
        groups = (self._num_groups,) if self._num_groups > 1 else ()
        of_group = jax.ShapeDtypeStruct(labels.shape[len(groups) :], labels.dtype)
        check_labels(self.distribution, (*rows, outputs.shape[-1]), of_group, weights)
        targets = () if self.distribution.num_targets is None else (self.distribution.num_targets,)
        if weights is not None:
            weights = one_a_row(weights, rows)
            if targets:
                missing = (1,) * (len(rows) + 1 - weights.ndim)
                weights = jnp.broadcast_to(
                    weights.reshape(*weights.shape, *missing), (*rows, *targets)
                )
        return one_a_row(labels, (*groups, *rows, *targets)), weights

    def outputs_shape(self, state: State, inputs: Shapes) -> Shapes:
        """Returns the shape and type of all members' outputs, from the state of one wave."""
        of_wave = self.ensemble if self.ensemble.waves == 1 else self.ensemble.of_wave
        found = of_wave.programs.output_shapes(state, inputs)
        shape = (self.ensemble.num_predictors, *found.shape[1:])
        return jax.ShapeDtypeStruct(shape, found.dtype)

    def directions(self, statistics: Iterable[str], classwise: Shapes) -> dict[str, str | None]:
        """Returns the direction of each score; raises if a custom metric lacks a statistic."""
        known = {*statistics, WHOLE_WEIGHTS, *([CLASSWISE] if classwise.size else [])}
        directions: dict[str, str | None] = {}
        for metric in self.metrics:
            if known.issuperset(metric.statistics):
                directions.setdefault(metric.name, metric.direction)
            elif metric in self.own_metrics:
                raise UserError(
                    f"The metric {metric.name!r} needs the statistics {metric.statistics}, of "
                    f"which not all exist. Use {', '.join(statistics)}, or give statistic=."
                )
        return directions

    def predict(self, state: State, inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Returns predictions for inputs on every host, both in their own units.

        The ensemble has `probs`, `mean` and `variance`, or `quantiles`, [examples, ...], with a
        leading axis [groups] for several groups; the members have the same names with the prefix
        `member_`. Targets that the source standardised are float64, because a mean may be far
        larger than its deviation.
        """
        given = self._standardization
        own = [inputs] * self._num_groups if given is None else given.of_inputs(inputs)
        own = np.concatenate(own)
        # A prediction does not read labels.
        split = ArraySplit(own, np.zeros(len(own), np.int32))
        batches = self._summaries(state, split, self.programs.predictions)
        groups, members = _joined([(self.shown(g), self.shown(m)) for g, m in batches])
        if self._num_groups == 1:
            groups = {name: leaf[0] for name, leaf in groups.items()}
        members = {f"member_{name}": leaf for name, leaf in members.items()}
        return {**groups, **members, "member_id": self.ensemble.predictor_ids(state)}

    def pooled_predictions(self, state: State, split: Split) -> dict[str, np.ndarray]:
        """Returns the summaries of the ensemble's predictions of a split, [groups, examples, ...].

        They are in the unit in which the source has the targets. NaN raises a `BrokenMembersError`.
        """
        batches = self._summaries(state, split, self.programs.pooled_predictions)
        return _joined([groups for groups, _ in self._sound(state, batches)])

    def member_predictions(self, state: State, split: Split) -> Iterator[dict[str, np.ndarray]]:
        """Yields the summaries of the members' predictions, leaves [members, batch, ...]."""
        batches = self._summaries(state, split, self.programs.predictions)
        for _, members in self._sound(state, batches):
            yield members

    def member_values(
        self, state: State, split: Split
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray | None]:
        """Returns the members' predictions of a split, with its checked labels and weights.

        Predictions are leaves [members, examples, ...] on every host, and labels [examples, ...].
        Weights are float64[rows], and None if they are equal. There is one group.
        """
        parts: list[PyTree] = []
        for batch, _, count in self._batches(split):
            outputs = self.ensemble.outputs(state, batch[Objective.INPUTS])
            labels, weights = self.aligned(
                outputs, batch[Objective.LABELS], batch.get(Objective.WEIGHTS)
            )
            of_labels = jax.tree.map(lambda leaf: leaf[None], (labels, weights))
            found = to_host((self.programs.member_values(outputs), of_labels))
            parts.append(jax.tree.map(lambda leaf, n=count: leaf[:, :n], found))
        values, (labels, weights) = _joined(parts)
        rows = labels.reshape(1, -1)
        if weights is not None:
            given = weights.reshape(*weights.shape, *(1,) * (labels.ndim - weights.ndim))
            weights = np.broadcast_to(given, labels.shape).reshape(1, -1).astype(np.float64)
        self._counted((rows, weights), len(split), outputs.shape[-1])
        return values, labels[0], None if weights is None else weights[0]

    def values_of(
        self,
        summary: Mapping[str, np.ndarray],
        labels: np.ndarray,
        counts: np.ndarray | None = None,
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns row statistics and sums over classes of summaries, of examples with `counts`."""
        counts = np.ones(len(labels), bool) if counts is None else counts
        prediction, at = self.distribution.from_summary(summary), jnp.asarray(labels)
        values = self.programs.statistics(prediction, at)
        classwise = self.distribution.classwise(prediction, at, jnp.asarray(counts))
        lost = self.distribution.lost_in_summary
        rows = {
            name: leaf[counts].ravel()
            for name, leaf in jax.device_get(values).items()
            if name not in lost
        }
        return rows, np.asarray(classwise, np.float64)

    def shown(self, summary: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns summaries in the form that `predict` returns, with targets in their own unit.

        They are scaled in float64 on the host, because float32 would lose a deviation of 1 around a
        mean of 1e8.
        """
        if self._standardization is None:
            return self.distribution.shown(summary)
        times = len(next(iter(summary.values()))) // self._num_groups
        scale = (np.concatenate([each] * times) for each in (self.zeros, self.units))
        return self.distribution.shown(summary, *scale)

    def _sound(
        self, state: State, batches: Iterator[tuple[_Summary, _Summary]]
    ) -> Iterator[tuple[_Summary, _Summary]]:
        """Yields the batches; raises a `BrokenMembersError` if a pooled member predicts NaN."""
        for groups, members in batches:
            broken = [p for p in broken_positions(members) if p not in self.not_pooled]
            if broken:
                raise BrokenMembersError(self.ensemble.predictor_ids(state)[broken].tolist())
            yield groups, members

    def _summaries(
        self, state: State, split: Split, program: Callable[..., PyTree]
    ) -> Iterator[tuple[_Summary, _Summary]]:
        """Yields the results of a program of predictions for each batch, without padding."""
        for batch, _, count in self._batches(split):
            outputs = self.ensemble.outputs(state, batch[Objective.INPUTS])
            found = to_host(program(outputs, self._pool))
            yield jax.tree.map(lambda leaf, n=count: leaf[:, :n], found)

    def _batches(self, split: Split) -> Iterator[tuple[dict[str, jax.Array], jax.Array, int]]:
        """Yields the batches on the devices, each with the mask and number of its examples."""
        rows, size = self._layout.host_rows(self.filled_size), self._batch_size
        left = len(split) // self._num_groups
        for batch in evaluation_batches(
            split, global_batch_size=size, host_rows=rows, num_groups=self._num_groups
        ):
            progress.made()
            if StopSignal.current is not None:
                StopSignal.current.stop_evaluation()
            mask = self._layout.put(batch.pop("mask"), BATCH)
            yield self._layout.put(batch, self.programs.examples_spec), mask, min(left, size)
            left -= size


def broken_positions(member_predictions: Mapping[str, np.ndarray]) -> list[int]:
    """Returns the positions of the members with NaN among their predictions."""
    broken = [
        np.isnan(leaf).reshape(len(leaf), -1).any(axis=1) for leaf in member_predictions.values()
    ]
    return np.flatnonzero(np.any(broken, axis=0)).tolist()


def _joined(parts: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)
