"""The compiled programs that compute statistics of members' outputs on the devices."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ensemble import Ensemble
from dist_ens.errors import UserError, first_line
from dist_ens.layout import BATCH, BATCHES, MEMBER_BATCH, MEMBERS, all_members
from dist_ens.losses import Distribution
from dist_ens.losses.distribution import Values
from dist_ens.metrics import Metric
from dist_ens.metrics.catalogue import BY_SIZE
from dist_ens.metrics.metric import CLASSWISE, WHOLE_WEIGHTS, Statistic
from dist_ens.state import State
from dist_ens.types import Labels, Leaf, Outputs, PyTree, Shapes, Specs, Tree, Weights

# Ensembles of 1, 2, … members are scored along this many random orders, for this many sizes.
_ORDERS = 8
_SIZES = 12


class Programs:
    """Compiled functions from members' outputs to row statistics and summaries.

    A device gets the outputs of all members for its column's part of a batch. Each program has one
    collective, outside of any loop. The devices of XLA:CPU share a pool of threads, and would
    deadlock if they reached two collectives in different orders.

    Args:
        ensemble: Ensemble that gives the outputs.
        distribution: Predictive distribution of the outputs.
        metrics: Metrics, which may define statistics.
        left_out: Positions of members that are not pooled.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        distribution: Distribution,
        metrics: Sequence[Metric],
        left_out: Sequence[int],
    ) -> None:
        self._ensemble = ensemble
        self._distribution = distribution
        self._own = {m.name: m.statistic for m in metrics if m.statistic is not None}
        self._metrics = tuple(metrics)
        self._left_out = tuple(left_out)
        self._layout = ensemble.layout
        self._num_groups = ensemble.num_groups
        count = self._layout.num_members // self._num_groups
        self._pooled = np.setdiff1d(np.arange(count), left_out)
        self._group_of_member = self._layout.put(
            np.arange(self._layout.num_members) % self._num_groups, MEMBERS
        )

    def are_of(
        self, distribution: Distribution, metrics: Sequence[Metric], left_out: Sequence[int]
    ) -> bool:
        """Returns whether these programs belong to the given arguments; see `Programs`."""
        # A user's distribution may hold arrays, which have no single truth value when compared.
        return self._distribution is distribution and (self._metrics, self._left_out) == (
            tuple(metrics),
            tuple(left_out),
        )

    def outputs(self, state: State, inputs: jax.Array) -> jax.Array:
        """Returns the members' outputs, [members, batch, ...]."""
        return self._ensemble.outputs(state, inputs)

    def statistics(self, prediction: Values, labels: jax.Array) -> Values:
        """Returns the row statistics of one predictor, including those of custom metrics."""
        values = self._distribution.row_statistics(prediction, labels)
        if self._own:
            summary = self._distribution.summary(prediction)
            values |= {name: own(summary, labels) for name, own in self._own.items()}
        return values

    def check_metrics(self, metrics: Sequence[Metric], outputs: Outputs, labels: Labels) -> None:
        """Checks custom metrics by the shapes of their statistics alone.

        Args:
            metrics: Metrics in addition to those of the distribution.
            outputs: Outputs of the members for a batch, or their shape and type.
            labels: Labels of the batch, or their shape and type. Several groups add a leading axis
                [groups].

        Raises:
            UserError: If a statistic raises an error, is not one number for each label, has the
                name of another one, or does not exist.
        """
        if not metrics:
            return
        of_group = labels.shape[1:] if self._num_groups > 1 else labels.shape
        rows = jax.ShapeDtypeStruct(of_group, labels.dtype)
        known, summary = jax.eval_shape(self._read, outputs, rows)
        needed = {CLASSWISE, WHOLE_WEIGHTS, *self._own}
        for metric in metrics:
            if metric.statistic is not None:
                _check_statistic(metric.name, metric.statistic, known, summary, rows)
            missing = [name for name in metric.statistics if name not in {*known, *needed}]
            if missing:
                raise UserError(
                    f"The metric {metric.name!r} needs the statistic {missing[0]!r}, which does "
                    f"not exist. Use one of {', '.join(known)}, or give a function as statistic=."
                )

    def _read(self, outputs: jax.Array, labels: jax.Array) -> tuple[Values, Values]:
        """Returns the distribution's own statistics of a batch, and a member's summary."""
        distribution = self._distribution
        predictions = self._of_members(outputs)
        one = jax.tree.map(lambda leaf: leaf[0], predictions)
        known = distribution.row_statistics(one, labels) | distribution.diversity(predictions)
        return known, distribution.summary(one)

    def outputs_shape(self, state: State, inputs: Shapes) -> Shapes:
        """Returns the shape and type of the result of `outputs`, from those of its arguments.

        Args:
            state: State of the ensemble, or its shapes and types. For an ensemble in waves, those
                of one wave.
            inputs: Shapes and types of the inputs.
        """
        ensemble = self._ensemble
        of_wave = ensemble if ensemble.waves == 1 else ensemble.of_wave
        found = jax.eval_shape(of_wave.outputs, state, inputs)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                (self._layout.num_members, *leaf.shape[1:]), leaf.dtype
            ),
            found,
        )

    def scored(
        self, outputs: Outputs, labels: Labels, mask: Leaf, weights: Weights
    ) -> dict[str, str | None]:
        """Returns the direction of each score by its name, from the shapes that `score` takes."""
        found = jax.eval_shape(self.score, outputs, labels, mask, weights)
        (groups, _), (sums, _) = jax.eval_shape(self.apart, found)
        known = {*groups, WHOLE_WEIGHTS, *([CLASSWISE] if math.prod(sums.shape) else [])}
        directions: dict[str, str | None] = {}
        for metric in self._metrics:
            if known.issuperset(metric.statistics):
                directions.setdefault(metric.name, metric.direction)
        return directions

    def score(
        self, outputs: jax.Array, labels: jax.Array, mask: jax.Array, weights: jax.Array | None
    ) -> tuple[Values, list[tuple[Values, jax.Array]]]:
        """Returns the statistics of each row of a batch, and the batch's sums over classes.

        Args:
            outputs: Outputs of the members, [members, batch, ...].
            labels: Labels, [batch, ...]. With several groups [groups, batch, ...].
            mask: Mask of the examples that count, bool[batch].
            weights: Weights of the labels, [batch, ...] or [batch]. None: all labels count equally.

        Returns:
            The diversity of the members of each group, and the statistics and sums of all
            predictors, which `apart` takes apart on the host.
        """
        return self.score_of_device(outputs, self._group_of_member, labels, mask, weights)

    def apart(
        self, found: tuple[Values, list[tuple[Values, jax.Array]]]
    ) -> tuple[tuple[Values, Values], tuple[jax.Array, jax.Array]]:
        """Returns what `score` has found for the groups, and for the members.

        Returns:
            `(groups, members), (sums of groups, sums of members)`. Statistics are
            float32[groups or members, batch, rows of an example]. Sums are
            float32[groups or members, columns, ...].
        """
        diversity, parts = found
        count, rows = self._num_groups, self._layout.ensemble_axis
        if len(parts) == 1:  # Each row of the mesh has scored the groups, and then its members.
            of_row = np.arange(self._layout.num_members + count * rows).reshape(rows, -1)
            at = of_row[0, :count], of_row[:, count:].ravel()
            parts = [jax.tree.map(lambda leaf, at=each: leaf[at], parts[0]) for each in at]
        (groups, of_groups), (members, of_members) = parts
        groups = {name: leaf[:count] for name, leaf in groups.items()} | diversity
        return (groups, members), (of_groups[:count], of_members)

    @cached_property
    def score_of_device(self) -> Callable[..., PyTree]:
        """The program of `score`, whose second argument is the group of each member."""
        distribution, several = self._distribution, self._num_groups > 1

        def of_one(
            prediction: Values, labels: jax.Array, counts: jax.Array
        ) -> tuple[Values, jax.Array]:
            values = _in_rows(self.statistics(prediction, labels), labels)
            # The host adds the sums of the columns.
            return values, distribution.classwise(prediction, labels, counts)[None]

        def score(
            outputs: jax.Array,
            group: jax.Array,
            labels: jax.Array,
            mask: jax.Array,
            weights: jax.Array | None,
        ) -> tuple[Values, list[tuple[Values, jax.Array]]]:
            """Scores the members of a device on its column's part of the batch."""
            counts = mask
            if weights is not None:
                shaped = mask.reshape(-1, *(1,) * (weights.ndim - 1))
                counts = jnp.where(shaped, weights, 0).astype(jnp.float32)
            labels = labels if several else labels[None]
            of_all = jax.vmap(of_one, in_axes=(0, 0, None))
            everyone = self._pooled_members(outputs)
            pooled = jax.vmap(distribution.pool, in_axes=1)(everyone)
            members = self._of_members(outputs)
            diversity = jax.vmap(distribution.diversity, in_axes=1)(everyone)
            diversity = jax.vmap(_in_rows)(diversity, labels)
            if not _are_alike(pooled, members):
                of_members = of_all(members, labels[group], counts)
                return diversity, [of_all(pooled, labels, counts), of_members]
            # One computation for both takes less time to compile, and so does to part them later.
            both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), pooled, members)
            return diversity, [of_all(both, jnp.concatenate([labels, labels[group]]), counts)]

        return jax.jit(
            self._layout.shard_map(
                score,
                in_specs=(MEMBER_BATCH, MEMBERS, self.examples_spec, BATCH, BATCH),
                out_specs=(BATCHES, MEMBER_BATCH),
            )
        )

    @property
    def by_size(self) -> dict[str, Metric]:
        """The metrics of ensembles of 1, 2, … members, by name."""
        own = {metric.name: metric for metric in reversed(self._metrics)}
        return {metric.name: own[metric.name] for metric in BY_SIZE if metric.name in own}

    @cached_property
    def score_by_size(self) -> Callable[[jax.Array, jax.Array], Values]:
        """The program that scores ensembles of the first members in some random orders.

        It takes outputs and labels as in `score`. For each name in `by_size` it returns the first
        statistic of the metric, float32[sizes * groups, batch, rows of an example].
        """
        distribution, count = self._distribution, len(self._pooled)
        random = np.random.default_rng(0)
        orders = np.stack([random.permutation(count) for _ in range(_ORDERS if count > 1 else 1)])
        statistics = {name: metric.statistics[0] for name, metric in self.by_size.items()}

        def of_group(predictions: Values, labels: jax.Array) -> Values:
            def of_order(order: jax.Array) -> Values:
                in_order = jax.tree.map(lambda leaf: leaf[order], predictions)
                of_sizes = []
                for size in self.sizes:
                    first = jax.tree.map(lambda leaf, n=size: leaf[:n], in_order)
                    values = self.statistics(distribution.pool(first), labels)
                    values = {n: values[s] for n, s in statistics.items() if s in values}
                    of_sizes.append(_in_rows(values, labels))
                return jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_sizes)

            drawn = jax.lax.map(of_order, jnp.asarray(orders))
            return jax.tree.map(lambda leaf: leaf.mean(axis=0), drawn)

        def score(outputs: jax.Array, labels: jax.Array) -> Values:
            labels = labels if self._num_groups > 1 else labels[None]
            of_groups = jax.vmap(of_group, in_axes=(1, 0), out_axes=1)
            values = of_groups(self._pooled_members(outputs), labels)
            return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), values)

        return jax.jit(
            self._layout.shard_map(
                score, in_specs=(MEMBER_BATCH, self.examples_spec), out_specs=BATCHES
            )
        )

    @cached_property
    def predictions(self) -> Callable[[jax.Array], tuple[Values, Values]]:
        """The program from outputs to the summaries of the groups and of the members."""
        distribution = self._distribution

        def predictions(outputs: jax.Array) -> tuple[Values, Values]:
            members = jax.vmap(distribution.summary)(self._of_members(outputs))
            return self._summaries_of_groups(outputs), members

        return self._jitted(predictions)

    @cached_property
    def pooled_predictions(self) -> Callable[[jax.Array], tuple[Values, Values]]:
        """The program from outputs to the summaries of the groups, and to NaN for broken members.

        For each member and example it returns NaN if a number of the prediction is NaN, and else 0.
        """
        distribution = self._distribution

        def zero_or_nan(prediction: Values) -> jax.Array:
            summary = distribution.summary(prediction).values()
            broken = [jnp.isnan(leaf).reshape(len(leaf), -1).any(axis=1) for leaf in summary]
            return jnp.where(jnp.stack(broken).any(axis=0), jnp.nan, 0.0)

        def predictions(outputs: jax.Array) -> tuple[Values, Values]:
            members = {"number": jax.vmap(zero_or_nan)(self._of_members(outputs))}
            return self._summaries_of_groups(outputs), members

        return self._jitted(predictions)

    @property
    def examples_spec(self) -> Specs:
        """The spec of labels and inputs, which have a leading axis [groups] for several groups."""
        return BATCH if self._num_groups == 1 else BATCHES

    @cached_property
    def sizes(self) -> list[int]:
        """The numbers of members of the ensembles that `score_by_size` scores."""
        count = len(self._pooled)
        return np.unique(np.geomspace(1, count, min(count, _SIZES)).round().astype(int)).tolist()

    def _jitted(self, fn: Callable[[jax.Array], Tree]) -> Callable[[jax.Array], Tree]:
        """Returns the program of a function of a device's outputs."""
        return jax.jit(
            self._layout.shard_map(fn, in_specs=MEMBER_BATCH, out_specs=(BATCHES, MEMBER_BATCH))
        )

    def _summaries_of_groups(self, outputs: jax.Array) -> Values:
        """Returns the summaries of the pooled predictions of the groups."""
        distribution = self._distribution
        pooled = jax.vmap(distribution.pool, in_axes=1)(self._pooled_members(outputs))
        return jax.vmap(distribution.summary)(pooled)

    def _pooled_members(self, outputs: jax.Array) -> Values:
        """Returns the predictions of all pooled members, leaves [members, groups, batch, ...]."""
        everyone = self._of_members(all_members(outputs))

        def in_groups(leaf: jax.Array) -> jax.Array:
            leaf = leaf.reshape(-1, self._num_groups, *leaf.shape[1:])
            return leaf if len(self._pooled) == len(leaf) else leaf[self._pooled]

        return jax.tree.map(in_groups, everyone)

    def _of_members(self, outputs: jax.Array) -> Values:
        """Returns the predictions of members from their outputs, leaves [members, batch, ...]."""
        return jax.vmap(self._distribution.from_outputs)(self._samples_of(outputs))

    def _samples_of(self, outputs: jax.Array) -> jax.Array:
        """Returns outputs [members, samples, batch, ...]."""
        return jnp.moveaxis(outputs, 2, 1) if self._ensemble.dropout_samples else outputs[:, None]


def programs_of(
    ensemble: Ensemble,
    distribution: Distribution,
    metrics: Sequence[Metric],
    left_out: Sequence[int],
) -> Programs:
    """Returns the programs of an ensemble, which are cached from the last call.

    Only one set is cached, because a program keeps the objects alive that its metrics capture.

    Args:
        ensemble: See `Programs`.
        distribution: See `Programs`.
        metrics: See `Programs`.
        left_out: See `Programs`.
    """
    kept = ensemble.programs.evaluation.get("scores")
    if kept is None or not kept.are_of(distribution, metrics, left_out):
        kept = Programs(ensemble, distribution, metrics, left_out)
        ensemble.programs.evaluation["scores"] = kept
    return kept


def _check_statistic(
    name: str, statistic: Statistic, known: Values, summary: Values, labels: Labels
) -> None:
    """Raises a `UserError` unless the statistic of a custom metric is one number for each label."""
    if name in known:
        raise UserError(
            f"The metric {name!r} has the name of a statistic that the predictions have already. "
            "Choose another name."
        )
    try:
        values = jax.eval_shape(statistic, summary, labels)
    except Exception as error:  # The function of a user may raise any error.
        given = ", ".join(f"{key!r} {list(leaf.shape)}" for key, leaf in summary.items())
        raise UserError(
            f"The statistic of the metric {name!r} raises {type(error).__name__}: "
            f"{first_line(error)} It was given a prediction of {given} and labels "
            f"{list(labels.shape)}."
        ) from error
    if jnp.shape(values) != labels.shape:
        raise UserError(
            f"The metric {name!r} returns values of shape {list(jnp.shape(values))} for labels of "
            f"shape {list(labels.shape)}. Return one number for each label."
        )


def _in_rows(values: Values, labels: jax.Array) -> Values:
    """Returns the values as [batch, rows of an example], one row for each label of an example."""
    batch = labels.shape[0]
    return {name: leaf.reshape(batch, -1) for name, leaf in values.items()}


def _are_alike(first: Values, second: Values) -> bool:
    """Returns whether two predictions differ in the number of predictors alone."""
    forms = [
        {name: (leaf.shape[1:], leaf.dtype) for name, leaf in each.items()}
        for each in (first, second)
    ]
    return forms[0] == forms[1]
