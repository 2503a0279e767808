"""A state and examples in; the ensemble's and every member's scores and predictions out."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.data import ArraySplit, Spec, Split, Standardization, evaluation_batches
from dist_ens.ensemble import Ensemble
from dist_ens.errors import BrokenMembersError, UserError
from dist_ens.evaluation.kinds import Classes, Kind, Normals
from dist_ens.evaluation.scores import Evaluation, scores_of_rows
from dist_ens.layout import BATCH, BATCHES, MEMBER_BATCH, MEMBERS, all_members, to_host
from dist_ens.losses import log_softmax
from dist_ens.state import State

# Orders of the members along which ensembles of 1, 2, … of them are scored; and of how many sizes.
_ORDERS = 8
_SIZES = 12


class Evaluator:
    """Scores and predicts with an ensemble, every example exactly once.

    A device is given all members' outputs for its column's part of a batch: of many members and
    outputs the batch is to be small. Of a whole split a few numbers are kept for each prediction,
    never the members' outputs.

    Args:
        ensemble: The lifted member; its members are of its groups in turn.
        global_batch_size: Examples at a time, rounded up to fill the data axis.
        spec: Of the data; default: its labels are classes.
        kind: How outputs are read; default: classes as softmax_cross_entropy trains them, real
            targets as gaussian_nll does, pooled as probabilities.
        left_out: Positions of members whose predictions are not pooled.

    Raises:
        UserError: If groups would have unequally many members, or nobody is left.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        global_batch_size: int,
        spec: Spec | None = None,
        kind: Kind | None = None,
        left_out: Sequence[int] = (),
    ) -> None:
        layout = ensemble.layout
        self._ensemble = ensemble
        self._spec = spec
        self.left_out = tuple(left_out)
        self._layout = layout
        self._num_groups = ensemble.num_groups
        if layout.num_members % self._num_groups:
            raise UserError(
                f"Every group has equally many members. Received: {layout.num_members} members for "
                f"{self._num_groups} groups. Choose a multiple."
            )
        if left_out and (self._num_groups > 1 or len(left_out) >= layout.num_members):
            raise UserError(
                "Members are left out of one group, and some remain. Received: "
                f"{len(left_out)} of {layout.num_members} members of {self._num_groups} groups to "
                "leave out. Train them anew with a lower --config.optimizer.learning_rate."
            )
        self._standardization = spec.standardization if spec else None
        self._batch_size = math.ceil(global_batch_size / layout.data_axis) * layout.data_axis
        of_classes = spec is None or spec.num_classes is not None
        self._kind = kind or (Classes(log_softmax) if of_classes else Normals())
        self._group_of_member = layout.put_members(np.arange(layout.num_members) % self._num_groups)
        count = layout.num_members // self._num_groups
        self._pooled = np.setdiff1d(np.arange(count), left_out)

    def without(self, positions: Sequence[int]) -> "Evaluator":
        """The same evaluator, which leaves out the members at some more positions.

        Raises:
            UserError: See `Evaluator`.
        """
        left_out = sorted({*self.left_out, *positions})
        return Evaluator(self._ensemble, self._batch_size, self._spec, self._kind, left_out)

    def evaluate(self, state: State, split: Split, *, by_size: bool = False) -> Evaluation:
        """What every prediction of a split scores.

        Args:
            state: Of the ensemble.
            split: Examples with labels, of several groups one group's after the other's; read on
                every host, each its own columns' part.
            by_size: Whether ensembles of 1, 2, … members are scored too.

        Returns:
            The evaluation, on every host.
        """
        member_ids = self._member_ids(state)
        length = len(split) // self._num_groups
        parts: list[Any] = []
        classwise: Any = None
        for number, batch in enumerate(self._batches(split)):
            outputs, labels = self._ensemble.predict(state, batch["inputs"]), batch["labels"]
            values, sums = to_host(
                self._score(outputs, self._group_of_member, labels, batch["mask"])
            )
            of_sizes = to_host(self._score_by_size(outputs, labels)) if by_size else {}
            there = min(self._batch_size, length - number * self._batch_size)
            labels = to_host(labels).reshape(self._num_groups, self._batch_size, -1)
            rows = jax.tree.map(
                lambda leaf, n=there: leaf[..., :n, :].reshape(*leaf.shape[:-2], -1),
                (labels, *values, of_sizes),
            )
            parts.append(rows)
            sums = (sums[0].sum(axis=0, dtype=np.float64), sums[1].sum(axis=1, dtype=np.float64))
            classwise = sums if classwise is None else jax.tree.map(np.add, classwise, sums)
        rows_per_example = labels.shape[-1]
        labels, groups, members, of_sizes = jax.tree.map(
            lambda *leaves: np.concatenate(leaves, axis=-1), *parts
        )
        given = self._standardization
        return Evaluation(
            kind=self._kind,
            units=self.units,
            zeros=given.target_mean if given else (0.0,) * self._num_groups,
            member_ids=member_ids,
            left_out=member_ids[list(self.left_out)].tolist(),
            rows_per_example=rows_per_example,
            labels=labels,
            groups=groups,
            members=members,
            group_classwise=classwise[0],
            member_classwise=classwise[1],
            sizes=self._sizes if by_size else (),
            by_size={
                name: leaf.reshape(len(self._sizes), self._num_groups, -1)
                for name, leaf in of_sizes.items()
            },
        )

    def predict(self, state: State, inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Returns predictions for examples in their own units.

        Args:
            state: Of the ensemble.
            inputs: [examples, ...], the same on every host.

        Returns:
            `member_id` int32[members]; of classes `probs` float32[examples, ..., classes] of the
            ensemble and `member_probs` [members, examples, ..., classes]; of real targets, in their
            own unit, `mean` and `variance` [examples] of the ensemble, `member_mean` and
            `member_variance` [members, examples], or `quantiles` with a last axis [levels]. Real
            targets that the source standardised are float64, for a mean may be far larger than the
            deviation around it; others are float32. Of several groups what is of the ensemble is
            [groups, examples]. On every host.
        """
        given = self._standardization
        own = [inputs] * self._num_groups if given is None else given.of_inputs(inputs)
        own = np.concatenate(own)
        # Their labels are not looked at.
        split = ArraySplit(own, np.zeros(len(own), np.int32))
        batches = self._told_batches(state, split, self._predictions)
        groups, members = _joined([(self.shown(g), self.shown(m)) for g, m in batches])
        if self._num_groups == 1:
            groups = {name: leaf[0] for name, leaf in groups.items()}
        members = {f"member_{name}": leaf for name, leaf in members.items()}
        return {**groups, **members, "member_id": self._member_ids(state)}

    def pooled_predictions(self, state: State, split: Split) -> dict[str, np.ndarray]:
        """Returns the ensemble's predictions of a split, to be scored or `shown`.

        Returns:
            In float32 with a leading [groups]: of classes `log_probs`, in nats; of real targets
            `mean` and `variance`, or `quantiles`, in the unit in which the source has the targets.

        Raises:
            BrokenMembersError: If predictions of members that are pooled are no numbers.
        """
        batches = self._told_batches(state, split, self._pooled_predictions)
        return _joined([groups for groups, _ in self._sound(state, batches)])

    def values_of(
        self, told: Mapping[str, np.ndarray], labels: np.ndarray, counts: np.ndarray | None = None
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns what predictions of one group add to scores.

        Args:
            told: Predictions in the form of `pooled_predictions`, leaves [examples, ...].
            labels: Of a split, [examples, ...].
            counts: Whether an example does; bool[examples]. None: all do.

        Returns:
            By name float32[rows], of the examples that count, of real targets in the unit in which
            the source has them; and what they add to what is scored class by class.
        """
        counts = np.ones(len(labels), bool) if counts is None else counts
        prediction, at = self._kind.read(told), jnp.asarray(labels)
        values = self._kind.values(prediction, at)
        classwise = self._kind.classwise(prediction, at, jnp.asarray(counts))
        # What was told of a mixture is its moments: of its own density nothing is left.
        of_mixtures = ("mixture_nll", "crps")
        rows = {name: leaf[counts].ravel() for name, leaf in jax.device_get(values).items()}
        rows = {name: leaf for name, leaf in rows.items() if name not in of_mixtures}
        return rows, np.asarray(classwise, np.float64)

    def scores_of(
        self, parts: Iterable[tuple[Mapping[str, np.ndarray], np.ndarray, np.ndarray | None]]
    ) -> tuple[dict[str, float], dict[str, tuple[float, float]] | None]:
        """The scores of predictions of one group, and their 95 % bootstrap intervals.

        Args:
            parts: Some examples' predictions, labels and whether they count, as `values_of` takes
                them; a part at a time, so that what is scored class by class is never all there.

        Returns:
            The scores, and the ends of their intervals; None of too many rows.
        """
        values: list[dict[str, np.ndarray]] = []
        classwise: Any = 0
        num_examples = 0
        for told, labels, counts in parts:
            rows, sums = self.values_of(told, labels, counts)
            values.append(rows)
            classwise = classwise + sums
            num_examples += len(labels) if counts is None else int(counts.sum())
        rows = {name: np.concatenate([each[name] for each in values]) for name in values[0]}
        return scores_of_rows(self._kind, rows, classwise, num_examples, self.units[0])

    def central_interval(
        self, told: Mapping[str, np.ndarray], level: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of the predictions' central intervals, in the predictions' unit.

        Args:
            told: `mean` and `variance` [examples], or `quantiles` [examples, levels], of which the
                outermost are taken.
            level: Probability of the interval of a normal distribution, in (0, 1).

        Returns:
            The lower and the upper ends, float64[examples] each.

        Raises:
            UserError: If predictions are means alone.
        """
        told = {name: leaf.astype(np.float64) for name, leaf in told.items()}
        if "quantiles" in told:
            return told["quantiles"][..., 0], told["quantiles"][..., -1]
        if not self.kind.has_spread:
            raise UserError(
                "An interval is of quantiles or of a distribution. Received: members that say "
                "their mean alone. Train with --config.loss.name=gaussian_nll or pinball."
            )
        half = NormalDist().inv_cdf((1 + level) / 2) * np.sqrt(told["variance"])
        return told["mean"] - half, told["mean"] + half

    def member_predictions(self, state: State, split: Split) -> Iterator[dict[str, np.ndarray]]:
        """Yields the members' predictions of a split, a batch at a time.

        Yields:
            As `pooled_predictions`, with leaves [members, batch, ...].

        Raises:
            BrokenMembersError: If predictions of members that are pooled are no numbers.
        """
        batches = self._told_batches(state, split, self._predictions)
        for _, members in self._sound(state, batches):
            yield members

    def _sound(self, state: State, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; of none does a member that is pooled predict what is no number."""
        for groups, members in batches:
            broken = [p for p in broken_positions(members) if p not in self.left_out]
            if broken:
                raise BrokenMembersError(self._member_ids(state)[broken].tolist())
            yield groups, members

    def _told_batches(self, state: State, split: Split, program: Any) -> Iterator[Any]:
        self._member_ids(state)
        left = len(split) // self._num_groups
        for batch in self._batches(split):
            told = to_host(program(self._ensemble.predict(state, batch["inputs"])))
            told = jax.tree.map(lambda leaf, n=left: leaf[:, :n], told)
            left -= self._batch_size
            yield told

    def shown(self, told: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Returns predictions in the form in which `predict` has them.

        Args:
            told: Predictions in the form of `pooled_predictions` or `member_predictions`, leaves
                [groups or members, examples, ...].

        Returns:
            Of classes `probs`; of real targets what was given, in their own unit. See `predict`.
        """
        if "log_probs" in told:
            return {"probs": np.exp(told["log_probs"])}
        given = self._standardization
        return dict(told) if given is None else _in_own_unit(told, given)

    @property
    def units(self) -> tuple[float, ...]:
        """What the source divided the targets of each group by; 1 where it did not."""
        given = self._standardization
        return given.target_std if given else (1.0,) * self._num_groups

    @property
    def kind(self) -> Kind:
        """How outputs are read."""
        return self._kind

    @cached_property
    def _score(self) -> Any:
        """What each row of a batch adds to scores; and what the batch does, class by class."""
        kind, several = self._kind, self._num_groups > 1

        def of_group(outputs: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
            predictions = jax.vmap(kind.of_samples)(outputs)
            pooled = kind.pooled(predictions)
            values = kind.values(pooled, labels) | kind.diversity(predictions)
            return _in_rows(values, labels), kind.classwise(pooled, labels, mask)

        def of_member(outputs: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
            prediction = kind.of_samples(outputs)
            values = _in_rows(kind.values(prediction, labels), labels)
            return values, kind.classwise(prediction, labels, mask)

        def score(outputs: jax.Array, group: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
            """A device's own members, and its column's part of the batch."""
            labels = labels if several else labels[None]
            groups, of_groups = jax.vmap(of_group, in_axes=(1, 0, None))(
                self._of_groups(outputs), labels, mask
            )
            members, of_members = jax.vmap(lambda one, group: of_member(one, labels[group], mask))(
                self._samples_of(outputs), group
            )
            # What columns have seen class by class is added up on the host.
            return (groups, members), (of_groups[None], of_members[:, None])

        return jax.jit(
            self._layout.shard_map(
                score,
                in_specs=(MEMBER_BATCH, MEMBERS, self._examples_spec, BATCH),
                out_specs=((BATCHES, MEMBER_BATCH), (BATCH, MEMBER_BATCH)),
            )
        )

    @cached_property
    def _score_by_size(self) -> Any:
        """NLL and error of ensembles of the first members in some random orders, row by row.

        [sizes * groups, batch, rows of an example].
        """
        kind, count = self._kind, len(self._pooled)
        random = np.random.default_rng(0)
        orders = np.stack([random.permutation(count) for _ in range(_ORDERS if count > 1 else 1)])
        names = ("nll", "correct", "squared_error")

        def of_group(outputs: jax.Array, labels: jax.Array) -> Any:
            predictions = jax.vmap(kind.of_samples)(outputs)

            def of_order(order: jax.Array) -> Any:
                in_order = jax.tree.map(lambda leaf: leaf[order], predictions)
                of_sizes = []
                for size in self._sizes:
                    first = jax.tree.map(lambda leaf, n=size: leaf[:n], in_order)
                    values = kind.values(kind.pooled(first), labels)
                    values = {name: values[name] for name in names if name in values}
                    of_sizes.append(_in_rows(values, labels))
                return jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_sizes)

            drawn = jax.lax.map(of_order, jnp.asarray(orders))
            return jax.tree.map(lambda leaf: leaf.mean(axis=0), drawn)

        def score(outputs: jax.Array, labels: jax.Array) -> Any:
            labels = labels if self._num_groups > 1 else labels[None]
            of_groups = jax.vmap(of_group, in_axes=(1, 0), out_axes=1)
            values = of_groups(self._of_groups(outputs), labels)
            return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), values)

        return jax.jit(
            self._layout.shard_map(
                score, in_specs=(MEMBER_BATCH, self._examples_spec), out_specs=BATCHES
            )
        )

    @cached_property
    def _predictions(self) -> Any:
        kind = self._kind

        def predictions(outputs: jax.Array) -> Any:
            members = jax.vmap(lambda one: kind.told(kind.of_samples(one)))
            return self._told_of_groups(outputs), members(self._samples_of(outputs))

        return self._jitted(predictions, (BATCHES, MEMBER_BATCH))

    @cached_property
    def _pooled_predictions(self) -> Any:
        """Of the members no more than whether they are numbers."""
        kind = self._kind

        def nothing_or_nan(outputs: jax.Array) -> jax.Array:
            told = kind.told(kind.of_samples(outputs)).values()
            broken = [jnp.isnan(leaf).reshape(len(leaf), -1).any(axis=1) for leaf in told]
            return jnp.where(jnp.stack(broken).any(axis=0), jnp.nan, 0.0)

        def predictions(outputs: jax.Array) -> Any:
            members = {"number": jax.vmap(nothing_or_nan)(self._samples_of(outputs))}
            return self._told_of_groups(outputs), members

        return self._jitted(predictions, (BATCHES, MEMBER_BATCH))

    def _jitted(self, fn: Any, out_specs: Any) -> Any:
        return jax.jit(self._layout.shard_map(fn, in_specs=MEMBER_BATCH, out_specs=out_specs))

    def _told_of_groups(self, outputs: jax.Array) -> Any:
        kind = self._kind

        def of_group(outputs: jax.Array) -> Any:
            return kind.told(kind.pooled(jax.vmap(kind.of_samples)(outputs)))

        return jax.vmap(of_group, in_axes=1)(self._of_groups(outputs))

    # One collective in each program, and none in a loop: XLA:CPU's devices share a pool of
    # threads, and wait for each other without end where they come to two in another order.
    def _of_groups(self, outputs: jax.Array) -> jax.Array:
        """[members of a group, groups, samples, batch, ...], of all members that are pooled."""
        everyone = self._samples_of(all_members(outputs))
        everyone = everyone.reshape(-1, self._num_groups, *everyone.shape[1:])
        return everyone if len(self._pooled) == len(everyone) else everyone[self._pooled]

    def _samples_of(self, outputs: jax.Array) -> jax.Array:
        """[members, samples, batch, ...]."""
        return jnp.moveaxis(outputs, 2, 1) if self._ensemble.dropout_samples else outputs[:, None]

    @property
    def _examples_spec(self) -> Any:
        return BATCH if self._num_groups == 1 else BATCHES

    @cached_property
    def _sizes(self) -> list[int]:
        count = len(self._pooled)
        return np.unique(np.geomspace(1, count, min(count, _SIZES)).round().astype(int)).tolist()

    def _member_ids(self, state: State) -> np.ndarray:
        ids = to_host(state.member_id)
        if (ids % self._num_groups != np.arange(len(ids)) % self._num_groups).any():
            raise UserError(
                f"Members are of their {self._num_groups} groups in turn, by their ids. Received: "
                f"members {ids.tolist()}. Put them in the order of their ids."
            )
        return ids

    def _batches(self, split: Split) -> Iterator[dict[str, jax.Array]]:
        rows, size = self._layout.host_rows(self._batch_size), self._batch_size
        for batch in evaluation_batches(
            split, global_batch_size=size, host_rows=rows, num_groups=self._num_groups
        ):
            mask = self._layout.put(batch.pop("mask"), size, BATCH)
            yield {**self._layout.put(batch, size, self._examples_spec), "mask": mask}


def broken_positions(member_predictions: Mapping[str, np.ndarray]) -> list[int]:
    """Positions of the members some of whose predictions are no numbers.

    Args:
        member_predictions: Leaves [members, examples, ...].
    """
    broken = [
        np.isnan(leaf).reshape(len(leaf), -1).any(axis=1) for leaf in member_predictions.values()
    ]
    return np.flatnonzero(np.any(broken, axis=0)).tolist()


def _joined(parts: Sequence[Any]) -> Any:
    """Batches of predictions as one: leaves [groups or members, examples, ...]."""
    return jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)


def _in_rows(values: Mapping[str, jax.Array], labels: jax.Array) -> dict[str, jax.Array]:
    """[..., batch, rows of an example]: labels are one of an example, or one of each position."""
    batch = labels.shape[0]
    return {name: leaf.reshape(batch, -1) for name, leaf in values.items()}


def _in_own_unit(told: Mapping[str, np.ndarray], given: Standardization) -> dict[str, np.ndarray]:
    """Returns predictions [groups or members, examples, …] in the unit that the targets came in.

    In float64 on the host: float32 would leave nothing of a deviation of 1 around a mean of 1e8.
    """

    def scaled(name: str, values: np.ndarray) -> np.ndarray:
        repeats, rest = len(values) // len(given.target_mean), (1,) * (values.ndim - 1)
        mean, std = (
            np.tile(numbers, repeats).reshape(-1, *rest)
            for numbers in (given.target_mean, given.target_std)
        )
        return values * std**2 if name == "variance" else values * std + mean

    return {name: scaled(name, values) for name, values in told.items()}
