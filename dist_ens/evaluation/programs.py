"""The compiled programs that compute statistics of members' outputs on the devices."""

from collections.abc import Callable, Sequence
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ensemble import Ensemble
from dist_ens.ground.errors import UserError
from dist_ens.ground.types import Labels, Leaf, Outputs, Specs, Tree, Weights
from dist_ens.layout import BATCH, BATCHES, MEMBER_BATCH, MEMBERS, REPLICATED, all_members
from dist_ens.losses import Distribution
from dist_ens.losses.distribution import Values, passed
from dist_ens.metrics import Metric
from dist_ens.metrics.catalogue import BY_SIZE

# The statistics of each row by name, and the sums over classes.
Scored = tuple[Values, jax.Array]

# Ensembles of 1, 2, … members are scored along this many random orders, for this many sizes.
_ORDERS = 8
_SIZES = 12


class Programs:
    """Compiled functions from members' outputs to row statistics and summaries.

    A device gets the outputs of all members for its column's part of a batch. The weights of the
    pooled members, float32[members] with sum 1, are the last argument of each program, and None if
    they are equal. Each program has one collective, outside of any loop. The devices of XLA:CPU
    share a pool of threads, and would deadlock if they reached two collectives in different orders.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        distribution: Distribution,
        metrics: Sequence[Metric],
        left_out: Sequence[int],
    ) -> None:
        self._ensemble, self._distribution = ensemble, distribution
        self._metrics = tuple(metrics)
        self._layout, self._num_groups = ensemble.layout, ensemble.num_groups
        count = ensemble.num_predictors
        self._pooled = np.setdiff1d(np.arange(count // self._num_groups), left_out)
        self._group_of_member = self._layout.put(
            np.arange(ensemble.num_members) % self._num_groups, MEMBERS
        )

    def statistics(self, prediction: Values, labels: jax.Array) -> Values:
        """Returns the row statistics of one predictor, including those of custom metrics."""
        values = self._distribution.row_statistics(prediction, labels)
        for metric in self._metrics:
            if metric.statistic is None:
                continue
            if metric.name in values:
                raise UserError(
                    f"The metric {metric.name!r} has the name of a statistic that the predictions "
                    "have already. Choose another name."
                )
            found = jnp.asarray(metric.statistic(self._distribution.summary(prediction), labels))
            if metric.by_class is not None and found.shape[:-1] == labels.shape:
                of_classes = jnp.moveaxis(found, -1, 0)
                values |= {f"{metric.name}_{number}": v for number, v in enumerate(of_classes)}
                continue
            if found.shape != labels.shape:
                raise UserError(
                    f"The metric {metric.name!r} returns values of shape {list(found.shape)} for "
                    f"labels of shape {list(labels.shape)}. Return one number for each label."
                )
            values[metric.name] = found
        return values

    def score(
        self,
        outputs: Outputs,
        labels: Labels,
        mask: Leaf,
        weights: Weights,
        pool: Leaf | None = None,
    ) -> tuple[Scored, Scored]:
        """Returns statistics of each row and sums over classes, of the groups and of the members.

        Statistics are [groups or members, batch, rows of an example]. Sums are [groups or members,
        columns, ...]; the host adds those of the columns.
        """
        return self.score_of_device(outputs, self._group_of_member, labels, mask, weights, pool)

    @cached_property
    def score_of_device(self) -> Callable[..., tuple[Scored, Scored]]:
        """The program of `score`, whose second argument is the group of each member."""
        distribution, several = self._distribution, self._num_groups > 1
        heads = self._ensemble.heads or 1

        def of_one(prediction: Values, labels: jax.Array, counts: jax.Array) -> Scored:
            values = _in_rows(self.statistics(prediction, labels), labels)
            return values, distribution.classwise(prediction, labels, counts)[None]

        def score(
            outputs: jax.Array,
            group: jax.Array,
            labels: jax.Array,
            mask: jax.Array,
            weights: jax.Array | None,
            pool: jax.Array | None,
        ) -> tuple[Scored, Scored]:
            """Scores the members of a device on its column's part of the batch."""
            counts, group = _counts(mask, weights), jnp.repeat(group, heads)
            labels = labels if several else labels[None]
            of_all = jax.vmap(of_one, in_axes=(0, 0, None))
            everyone = self._pooled_members(outputs)
            pooled = self._pool(everyone, pool)
            diversity = jax.vmap(
                lambda each: distribution.diversity(each, **passed(pool)), in_axes=1
            )(everyone)
            members = self._of_members(outputs)
            if _types_of(pooled) == _types_of(members):
                # One computation for both takes less time to compile.
                both = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), pooled, members)
                found = of_all(both, jnp.concatenate([labels, labels[group]]), counts)
                (groups, sums), of_members = (
                    jax.tree.map(lambda leaf, at=at: leaf[at], found)
                    for at in (slice(len(labels)), slice(len(labels), None))
                )
            else:
                groups, sums = of_all(pooled, labels, counts)
                of_members = of_all(members, labels[group], counts)
            return (groups | jax.vmap(_in_rows)(diversity, labels), sums), of_members

        specs = (MEMBER_BATCH, MEMBERS, self.examples_spec, BATCH, BATCH)
        return self._compiled(score, specs, (BATCHES, MEMBER_BATCH))

    @property
    def by_size(self) -> dict[str, Metric]:
        """The metrics of ensembles of 1, 2, … members, by name."""
        own = {metric.name: metric for metric in reversed(self._metrics)}
        return {metric.name: own[metric.name] for metric in BY_SIZE if metric.name in own}

    @cached_property
    def sizes(self) -> list[int]:
        """The numbers of members of the ensembles that `score_by_size` scores."""
        count = len(self._pooled)
        return np.unique(np.geomspace(1, count, min(count, _SIZES)).round().astype(int)).tolist()

    @cached_property
    def score_by_size(self) -> Callable[..., tuple[Values, Values]]:
        """The program that scores ensembles of the first members in some random orders.

        For each name in `by_size` it returns the first statistic of the metric, float32[sizes *
        groups, batch, rows of an example], and its weighted sum over the batch in each order, for
        each target, float32[orders * groups * sizes * targets, columns].
        """
        distribution, count = self._distribution, len(self._pooled)
        random = np.random.default_rng(0)
        orders = np.stack([random.permutation(count) for _ in range(_ORDERS if count > 1 else 1)])
        statistics = {name: metric.statistics[0] for name, metric in self.by_size.items()}

        def of_group(
            predictions: Values, labels: jax.Array, counts: jax.Array, pool: jax.Array | None
        ) -> tuple[Values, Values]:
            def of_order(order: jax.Array) -> Values:
                in_order, weights = jax.tree.map(lambda leaf: leaf[order], (predictions, pool))
                of_sizes = []
                for size in self.sizes:
                    first, w = jax.tree.map(lambda leaf, n=size: leaf[:n], (in_order, weights))
                    values = self.statistics(distribution.pool(first, **passed(w)), labels)
                    values = {n: values[s] for n, s in statistics.items() if s in values}
                    of_sizes.append(_in_rows(values, labels))
                return jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_sizes)

            drawn = jax.lax.map(of_order, jnp.asarray(orders))
            counted = counts.reshape(1, 1, len(labels), -1)

            def summed(leaf: jax.Array) -> jax.Array:
                total = (jnp.where(counted > 0, leaf, 0) * counted).sum(axis=-2)
                targets = distribution.num_targets or 1
                return total.reshape(*total.shape[:2], -1, targets).sum(axis=2)

            sums = jax.tree.map(summed, drawn)
            return jax.tree.map(lambda leaf: leaf.mean(axis=0), drawn), sums

        def score(
            outputs: jax.Array,
            labels: jax.Array,
            mask: jax.Array,
            weights: jax.Array | None,
            pool: jax.Array | None,
        ) -> tuple[Values, Values]:
            labels = labels if self._num_groups > 1 else labels[None]
            of_groups = jax.vmap(of_group, in_axes=(1, 0, None, None), out_axes=1)
            counts = _counts(mask, weights)
            values, sums = of_groups(self._pooled_members(outputs), labels, counts, pool)
            values = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), values)
            return values, jax.tree.map(lambda leaf: leaf.reshape(-1, 1), sums)

        specs = (MEMBER_BATCH, self.examples_spec, BATCH, BATCH)
        return self._compiled(score, specs, (BATCHES, BATCHES))

    @cached_property
    def member_values(self) -> Callable[[jax.Array], Values]:
        """The program from outputs to the members' predictions, leaves [members, batch, ...]."""
        return jax.jit(self._layout.shard_map(self._of_members, MEMBER_BATCH, MEMBER_BATCH))

    @cached_property
    def predictions(self) -> Callable[..., tuple[Values, Values]]:
        """The program from outputs to the summaries of the groups and of the members."""
        return self._with_groups(jax.vmap(self._distribution.summary))

    @cached_property
    def pooled_predictions(self) -> Callable[..., tuple[Values, Values]]:
        """The program from outputs to the groups' summaries, and to NaN for broken members."""

        def zero_or_nan(prediction: Values) -> Values:
            summary = self._distribution.summary(prediction).values()
            broken = [jnp.isnan(leaf).reshape(len(leaf), -1).any(axis=1) for leaf in summary]
            return {"number": jnp.where(jnp.stack(broken).any(axis=0), jnp.nan, 0.0)}

        return self._with_groups(jax.vmap(zero_or_nan))

    @property
    def examples_spec(self) -> Specs:
        """The spec of labels and inputs, which have a leading axis [groups] for several groups."""
        return BATCH if self._num_groups == 1 else BATCHES

    def _with_groups(
        self, of_members: Callable[[Values], Tree]
    ) -> Callable[..., tuple[Values, Tree]]:
        """Returns the program of the summaries of the groups and of a function of the members."""
        summary = jax.vmap(self._distribution.summary)

        def predictions(outputs: jax.Array, pool: jax.Array | None) -> tuple[Values, Tree]:
            pooled = self._pool(self._pooled_members(outputs), pool)
            return summary(pooled), of_members(self._of_members(outputs))

        return self._compiled(predictions, (MEMBER_BATCH,), (BATCHES, MEMBER_BATCH))

    def _compiled(
        self, program: Callable[..., Tree], in_specs: tuple[Specs, ...], out_specs: Specs
    ) -> Callable[..., Tree]:
        """Returns a program on the mesh, whose last argument is the weights in the pool or None."""
        mapped = self._layout.shard_map(program, (*in_specs, REPLICATED), out_specs)
        count = len(in_specs)
        return jax.jit(lambda *args: mapped(*args[:count], args[count] if args[count:] else None))

    def _pool(self, predictions: Values, pool: jax.Array | None) -> Values:
        """Returns the groups' predictions from those of `_pooled_members`."""
        pool_group = self._distribution.pool
        return jax.vmap(lambda each: pool_group(each, **passed(pool)), in_axes=1)(predictions)

    def _pooled_members(self, outputs: jax.Array) -> Values:
        """Returns the predictions of all pooled members, leaves [members, groups, batch, ...]."""
        everyone = self._of_members(all_members(outputs))

        def in_groups(leaf: jax.Array) -> jax.Array:
            leaf = leaf.reshape(-1, self._num_groups, *leaf.shape[1:])
            return leaf if len(self._pooled) == len(leaf) else leaf[self._pooled]

        return jax.tree.map(in_groups, everyone)

    def _of_members(self, outputs: jax.Array) -> Values:
        """Returns the predictions of members from their outputs, leaves [members, batch, ...]."""
        has_samples = self._ensemble.dropout_samples
        samples = jnp.moveaxis(outputs, 2, 1) if has_samples else outputs[:, None]
        return jax.vmap(self._distribution.from_outputs)(samples)


def programs_of(
    ensemble: Ensemble,
    distribution: Distribution,
    metrics: Sequence[Metric],
    left_out: Sequence[int],
) -> Programs:
    """Returns the programs of an ensemble, which are cached from the last call.

    Only one set is cached, because a program keeps the objects alive that its metrics capture.
    """
    kept = ensemble.programs.evaluation
    # A user's distribution may hold arrays, which have no single truth value when compared.
    key = id(distribution), tuple(metrics), tuple(left_out)
    if "scores" not in kept or kept["scores"][0] != key:
        kept["scores"] = key, Programs(ensemble, distribution, metrics, left_out)
    return kept["scores"][1]


def _counts(mask: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Returns the mask of the examples that count, or their weights, 0 for those that do not."""
    if weights is None:
        return mask
    shaped = mask.reshape(-1, *(1,) * (weights.ndim - 1))
    return jnp.where(shaped, weights, 0).astype(jnp.float32)


def _in_rows(values: Values, labels: jax.Array) -> Values:
    """Returns the values as [batch, rows of an example], one row for each label of an example."""
    batch = labels.shape[0]
    return {name: leaf.reshape(batch, -1) for name, leaf in values.items()}


def _types_of(predictions: Values) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    return {name: (leaf.shape[1:], leaf.dtype) for name, leaf in predictions.items()}
