"""Conformal rules: the calibration examples of a method, for predictions at any level."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Self

import jax
import numpy as np

from dist_ens.evaluation.conformal import (
    class_scores,
    conformal_quantile,
    cqr_margin,
    jackknife_plus,
)
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.types import Inputs
from dist_ens.losses import Distribution

SETS = ("lac", "aps", "raps")
_MASK = "out_of_bag"
# Members' predictions are in float32, and two computations of one probability may differ by this.
# Without it examples of equal scores, of which a pooling by votes has many, could lose their label.
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class ConformalRule:
    """A conformal method with its calibration examples.

    `examples` are arrays of the n examples: for sets the `scores` of the labels, for cqr the
    `labels` and the leaves of the prediction, for cv+ and jackknife+ `residuals` and `out_of_bag`,
    bool[members, n]. `mean` and `std` are those by which real targets were standardised.
    """

    method: str
    examples: Mapping[str, np.ndarray]
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def of_sets(cls, method: str, probs: np.ndarray, labels: np.ndarray, u: np.ndarray) -> Self:
        """Returns the rule of a method in `SETS`; see `class_scores`."""
        scores = class_scores(method, probs, u)[np.arange(len(labels)), labels]
        return cls(method, {"scores": np.sort(scores)})

    def sets(self, probs: np.ndarray, u: np.ndarray, level: float) -> np.ndarray:
        """Returns whether a class is in the set of an example; bool[batch, classes].

        `probs` are those before any calibration, and `u` is from `uniform_of`.
        """
        quantile = conformal_quantile(self.examples["scores"], level)
        return class_scores(self.method, probs, u) <= quantile + _ROUNDING

    def own_interval(
        self,
        distribution: Distribution,
        shown: Mapping[str, np.ndarray],
        points: Callable[[], np.ndarray],
        level: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of `interval` in the targets' own unit, from predictions in it."""
        mean, std = self.mean, self.std
        own = {name: values[None] for name, values in shown.items()}
        standard = distribution.shown(own, np.array([-mean / std]), np.array([1 / std]))
        summary = distribution.from_shown({name: values[0] for name, values in standard.items()})
        low, high = self.interval(distribution, summary, lambda: (points() - mean) / std, level)
        return low * std + mean, high * std + mean

    def interval(
        self,
        distribution: Distribution,
        summary: Mapping[str, np.ndarray],
        points: Callable[[], np.ndarray],
        level: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lower and upper ends of the intervals in the calibration examples' unit.

        `points` returns the members' means or medians, [members, batch], for cv+ and jackknife+.
        """
        examples = self.examples
        if self.method != "cqr":
            return jackknife_plus(examples["residuals"], examples[_MASK], points(), level)
        held = {name: values for name, values in examples.items() if name != "labels"}
        ends = distribution.central_interval(held, level)
        margin = cqr_margin(*ends, examples["labels"], level)
        low, high = distribution.central_interval(summary, level)
        return low - margin, high + margin

    def to_dict(self) -> JsonDict:
        """Returns the method and its examples in types that JSON can hold."""
        examples = {name: values.tolist() for name, values in self.examples.items()}
        if _MASK in examples:
            # A hexadecimal digit for 4 examples: a list of words would be 20 times as long.
            examples[_MASK] = [np.packbits(row).tobytes().hex() for row in self.examples[_MASK]]
        return {**vars(self), "examples": examples}

    @classmethod
    def from_dict(cls, values: JsonDict) -> Self:
        """Returns the rule that `to_dict` wrote, also after a round trip through JSON."""
        examples = dict(values["examples"])
        if _MASK in examples:
            count = len(examples["residuals"])
            rows = [np.frombuffer(bytes.fromhex(row), np.uint8) for row in examples[_MASK]]
            examples[_MASK] = [np.unpackbits(row, count=count).astype(bool) for row in rows]
        return cls(**{**values, "examples": {n: np.array(leaf) for n, leaf in examples.items()}})


def uniform_of(inputs: Inputs) -> np.ndarray:
    """Returns a number in [0, 1) for each example that its inputs alone determine; float64[batch].

    So the sets of aps and raps, which need it, do not depend on the other examples of a call.
    """
    leaves = [np.asarray(leaf).astype(np.float32) + 0.0 for leaf in jax.tree.leaves(inputs)]
    rows = np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)
    digests = [hashlib.blake2b(row.tobytes(), digest_size=6).digest() for row in rows]
    return np.array([int.from_bytes(digest, "little") for digest in digests]) / 2.0**48
