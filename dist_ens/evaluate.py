"""A state and examples in; the ensemble's and every member's scores and predictions out."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.data import Split, evaluation_batches
from dist_ens.ensemble import Ensemble, State
from dist_ens.layout import BATCH, REPLICATED, to_host
from dist_ens.metrics import classification_scores, classification_sums, mixture_log_probs


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores over a split.

    Attributes:
        ensemble: Of the mixture of the members: `accuracy`, `nll`, `brier`, `ece`.
        members: Of each member, with its `member_id`.
    """

    ensemble: dict[str, float]
    members: list[dict[str, float]]

    @property
    def mean_member(self) -> dict[str, float]:
        """The mean of each score over the members."""
        return {
            name: float(np.mean([member[name] for member in self.members]))
            for name in self.ensemble
        }

    def to_dict(self) -> dict[str, Any]:
        """`{"test": {…}, "members": [{"member_id", …}]}`."""
        return {"test": self.ensemble, "members": self.members}


class Evaluator:
    """Scores and predicts with an ensemble, every example exactly once, nothing gathered.

    Args:
        ensemble: The lifted member.
        global_batch_size: Examples at a time, rounded up to fill the data axis.
    """

    def __init__(self, ensemble: Ensemble, global_batch_size: int) -> None:
        layout = ensemble.layout
        self._ensemble = ensemble
        self._layout = layout
        self._batch_size = math.ceil(global_batch_size / layout.data_axis) * layout.data_axis
        everywhere = layout.sharding(REPLICATED)

        def score(member_logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
            member_log_probs = jax.nn.log_softmax(member_logits)
            return {
                "ensemble": classification_sums(mixture_log_probs(member_log_probs), labels, mask),
                "members": jax.vmap(classification_sums, in_axes=(0, None, None))(
                    member_log_probs, labels, mask
                ),
            }

        def probabilities(member_logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            member_log_probs = jax.nn.log_softmax(member_logits)
            return jnp.exp(mixture_log_probs(member_log_probs)), jnp.exp(member_log_probs)

        self._score = jax.jit(score, out_shardings=everywhere)
        self._probabilities = jax.jit(probabilities, out_shardings=everywhere)

    def evaluate(self, state: State, split: Split) -> Scores:
        """Scores of the ensemble and of every member on a whole split.

        Args:
            state: Of the ensemble.
            split: Examples with labels; read on every host, each its own columns' part.

        Returns:
            The scores.
        """
        total: Any = None
        for batch in self._batches(split):
            logits = self._ensemble.predict(state, batch["inputs"])
            sums = jax.device_get(self._score(logits, batch["labels"], batch["mask"]))
            sums = jax.tree.map(lambda leaf: leaf.astype(np.float64), sums)
            total = sums if total is None else jax.tree.map(np.add, total, sums)
        return Scores(
            ensemble=classification_scores(total["ensemble"]),
            members=[
                {
                    "member_id": int(member_id),
                    **classification_scores(jax.tree.map(lambda s: s[i], total["members"])),  # noqa: B023
                }
                for i, member_id in enumerate(to_host(state.member_id))
            ],
        )

    def predict(self, state: State, split: Split) -> dict[str, np.ndarray]:
        """Probabilities for every example of a split; its labels are not looked at.

        Args:
            state: Of the ensemble.
            split: The examples.

        Returns:
            `probs` float32[examples, ..., classes] of the mixture, `member_probs`
            float32[members, examples, ..., classes] and `member_id` int32[members]; on every host.
        """
        parts = [
            jax.device_get(self._probabilities(self._ensemble.predict(state, batch["inputs"])))
            for batch in self._batches(split)
        ]
        return {
            "probs": np.concatenate([probs for probs, _ in parts])[: len(split)],
            "member_probs": np.concatenate([m for _, m in parts], axis=1)[:, : len(split)],
            "member_id": to_host(state.member_id),
        }

    def _batches(self, split: Split) -> Any:
        rows = self._layout.host_rows(self._batch_size)
        for batch in evaluation_batches(split, global_batch_size=self._batch_size, host_rows=rows):
            yield self._layout.put(batch, self._batch_size, BATCH)
