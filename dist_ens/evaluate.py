"""A state and examples in; the ensemble's and every member's scores and predictions out."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.data import ArraySplit, Spec, Split, Standardization, evaluation_batches
from dist_ens.ensemble import Ensemble, State
from dist_ens.errors import UserError
from dist_ens.layout import BATCH, BATCHES, MEMBER_BATCH, MEMBERS, all_members, to_host
from dist_ens.losses import normal_distribution
from dist_ens.metrics import (
    classification_scores,
    classification_sums,
    mixture_log_probs,
    mixture_moments,
    regression_scores,
    regression_sums,
)


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores over a split.

    Attributes:
        groups: For each group of members, of their mixture, on the group's own examples; of classes
            `accuracy`, `nll`, `brier`, `ece`, of real targets `rmse`, `mae`, `nll`, `mixture_nll`,
            `crps`.
        members: Of each member, on its group's examples, with its `member_id`.
    """

    groups: list[dict[str, float]]
    members: list[dict[str, float]]

    @property
    def ensemble(self) -> dict[str, float]:
        """The mean of each score over the groups; of one group its scores."""
        return self._over_groups(np.mean)

    @property
    def mean_member(self) -> dict[str, float]:
        """The mean of each score over the members."""
        return {
            name: float(np.mean([member[name] for member in self.members]))
            for name in self.ensemble
        }

    def to_dict(self) -> dict[str, Any]:
        """`{"test": {…}, "members": [{"member_id", …}]}`, and of several groups `test_std`."""
        several = {"test_std": self._over_groups(np.std)} if len(self.groups) > 1 else {}
        return {"test": self.ensemble, **several, "members": self.members}

    def _over_groups(self, reduce: Any) -> dict[str, float]:
        names = self.groups[0]
        return {name: float(reduce([scores[name] for scores in self.groups])) for name in names}


class Evaluator:
    """Scores and predicts with an ensemble, every example exactly once.

    A device is given all members' outputs for its column's part of a batch: of many members and
    outputs the batch is to be small.

    Args:
        ensemble: The lifted member; its members are of its groups in turn.
        global_batch_size: Examples at a time, rounded up to fill the data axis.
        spec: Of the data; default: its labels are classes.

    Raises:
        UserError: If groups would have unequally many members.
    """

    def __init__(
        self, ensemble: Ensemble, global_batch_size: int, spec: Spec | None = None
    ) -> None:
        layout = ensemble.layout
        self._ensemble = ensemble
        self._layout = layout
        self._num_groups = ensemble.num_groups
        if layout.num_members % self._num_groups:
            raise UserError(
                f"Every group has equally many members. Received: {layout.num_members} members for "
                f"{self._num_groups} groups. Choose a multiple."
            )
        self._standardization = spec.standardization if spec else None
        self._batch_size = math.ceil(global_batch_size / layout.data_axis) * layout.data_axis
        kind = _CLASSES if spec is None or spec.num_classes is not None else _REAL_TARGETS
        self._kind = kind
        self._group_of_member = layout.put_members(np.arange(layout.num_members) % self._num_groups)
        labels_spec = BATCH if self._num_groups == 1 else BATCHES

        # One collective in each program, and none in a loop: XLA:CPU's devices share a pool of
        # threads, and wait for each other without end where they come to two in another order.
        def of_groups(member_outputs: jax.Array) -> jax.Array:
            """[members of a group, groups, batch, ...], of all members."""
            everyone = all_members(member_outputs)
            return everyone.reshape(-1, self._num_groups, *everyone.shape[1:])

        def score(outputs: jax.Array, group: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
            """A device's own members, and its column's part of the batch."""
            labels = labels[None] if self._num_groups == 1 else labels
            groups = jax.vmap(kind.sums, in_axes=(1, 0, None))(of_groups(outputs), labels, mask)
            members = jax.vmap(lambda one, group: kind.sums(one[None], labels[group], mask))(
                outputs, group
            )
            # Columns are added up on the host.
            return jax.tree.map(lambda leaf: leaf[None], groups), jax.tree.map(
                lambda leaf: leaf[:, None], members
            )

        def predictions(outputs: jax.Array) -> Any:
            return (
                jax.vmap(kind.mixture, in_axes=1)(of_groups(outputs)),
                jax.vmap(lambda one: kind.mixture(one[None]))(outputs),
            )

        self._score = jax.jit(
            layout.shard_map(
                score,
                in_specs=(MEMBER_BATCH, MEMBERS, labels_spec, BATCH),
                out_specs=(BATCH, MEMBER_BATCH),
            )
        )
        self._predictions = jax.jit(
            layout.shard_map(predictions, in_specs=MEMBER_BATCH, out_specs=(BATCHES, MEMBER_BATCH))
        )

    def evaluate(self, state: State, split: Split) -> Scores:
        """Scores of the ensemble and of every member on a whole split.

        Args:
            state: Of the ensemble.
            split: Examples with labels, of several groups one group's after the other's; read on
                every host, each its own columns' part.

        Returns:
            The scores; of real targets in the unit that they had before they were standardised.
        """
        member_ids = self._member_ids(state)
        total: Any = None
        for batch in self._batches(split):
            outputs = self._ensemble.predict(state, batch["inputs"])
            groups, members = to_host(
                self._score(outputs, self._group_of_member, batch["labels"], batch["mask"])
            )
            sums = (
                jax.tree.map(lambda leaf: leaf.sum(axis=0, dtype=np.float64), groups),
                jax.tree.map(lambda leaf: leaf.sum(axis=1, dtype=np.float64), members),
            )
            total = sums if total is None else jax.tree.map(np.add, total, sums)

        def scores(sums: Any, group: int) -> dict[str, float]:
            if self._standardization is None:
                return self._kind.scores(sums)
            return regression_scores(sums, unit=self._standardization.target_std[group])

        def entry(tree: Any, index: int) -> Any:
            return jax.tree.map(lambda leaf: leaf[index], tree)

        groups, members = total
        return Scores(
            groups=[scores(entry(groups, group), group) for group in range(self._num_groups)],
            members=[
                {"member_id": int(member_id)}
                | scores(entry(members, position), position % self._num_groups)
                for position, member_id in enumerate(member_ids)
            ],
        )

    def predict(self, state: State, inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Predictions for examples in their own units.

        Args:
            state: Of the ensemble.
            inputs: [examples, ...], the same on every host.

        Returns:
            `member_id` int32[members], and in float32, of classes `probs` [examples, ..., classes]
            of the mixture and `member_probs` [members, examples, ..., classes]; of real targets, in
            their own unit, `mean` and `variance` [examples] of the mixture, `member_mean` and
            `member_variance` [members, examples]. Of several groups what is of the mixture is
            [groups, examples]. On every host.
        """
        given, member_ids = self._standardization, self._member_ids(state)
        own = [inputs] * self._num_groups if given is None else given.of_inputs(inputs)
        own = np.concatenate(own)
        # Their labels are not looked at.
        split = ArraySplit(own, np.zeros(len(own), np.int32))
        parts = [
            to_host(self._predictions(self._ensemble.predict(state, batch["inputs"])))
            for batch in self._batches(split)
        ]
        # [groups, examples, ...] and [members, examples, ...]
        whole = jax.tree.map(lambda *leaves: np.concatenate(leaves, axis=1), *parts)
        mixture, members = jax.tree.map(lambda leaf: leaf[:, : len(inputs)], whole)
        if given is not None:
            mixture, members = _in_own_unit(mixture, given), _in_own_unit(members, given)
        if self._num_groups == 1:
            mixture = {name: leaf[0] for name, leaf in mixture.items()}
        members = {f"member_{name}": leaf for name, leaf in members.items()}
        return {**mixture, **members, "member_id": member_ids}

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
        examples = BATCH if self._num_groups == 1 else BATCHES
        for batch in evaluation_batches(
            split, global_batch_size=size, host_rows=rows, num_groups=self._num_groups
        ):
            mask = self._layout.put(batch.pop("mask"), size, BATCH)
            yield {**self._layout.put(batch, size, examples), "mask": mask}


@dataclasses.dataclass(frozen=True)
class _Kind:
    """Of labels: how members' outputs for a batch are read.

    Attributes:
        mixture: The distribution of members' mixture, an array for each of its parameters.
        sums: What a batch adds to the scores of members' mixture.
        scores: The scores from the sums.
    """

    mixture: Callable[[jax.Array], dict[str, jax.Array]]
    sums: Callable[[jax.Array, jax.Array, jax.Array], dict[str, jax.Array]]
    scores: Callable[[dict[str, Any]], dict[str, float]]


def _log_probs(member_logits: jax.Array) -> jax.Array:
    return mixture_log_probs(jax.nn.log_softmax(member_logits))


_CLASSES = _Kind(
    mixture=lambda logits: {"probs": jnp.exp(_log_probs(logits))},
    sums=lambda logits, labels, mask: classification_sums(_log_probs(logits), labels, mask),
    scores=classification_scores,
)


def _moments(member_outputs: jax.Array) -> dict[str, jax.Array]:
    mean, variance = mixture_moments(*normal_distribution(member_outputs))
    return {"mean": mean, "variance": variance}


_REAL_TARGETS = _Kind(
    mixture=_moments,
    sums=lambda outputs, targets, mask: regression_sums(
        *normal_distribution(outputs), targets, mask
    ),
    scores=regression_scores,
)


def _in_own_unit(
    moments: Mapping[str, np.ndarray], given: Standardization
) -> dict[str, np.ndarray]:
    """Means and variances [groups or members, examples] in the unit that the targets came in."""
    repeats = len(moments["mean"]) // len(given.target_mean)
    mean, std = (
        np.tile(values, repeats)[:, None] for values in (given.target_mean, given.target_std)
    )
    return {
        "mean": (moments["mean"] * std + mean).astype(np.float32),
        "variance": (moments["variance"] * std**2).astype(np.float32),
    }
