"""Predictions of an ensemble with their uncertainty."""

import dataclasses
from functools import partial

import jax
from jax.typing import ArrayLike

from dist_ens.ground.state import described
from dist_ens.ground.types import Outputs, PyTree
from dist_ens.metrics.pooling import mean_of_members, variance_of_members


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Prediction:
    """Prediction of an ensemble for a batch of inputs.

    A field that the members do not determine is None.

    Attributes:
        mean: Prediction of the ensemble: class probabilities [batch, ..., classes], probabilities
            of several labels [batch, labels], the mean of real targets [batch, ...], or the median
            of predicted quantiles. Several targets are the last axis of this and other fields.
        total: Total uncertainty, [batch, ...]: the entropy of `mean` in nats, or the variance of
            the members' mixture in the targets' unit squared.
        aleatoric: Part of `total` that the members predict: their mean entropy, or mean variance.
        epistemic: Part of `total` in which the members differ: `total` less `aleatoric`, the mutual
            information; or the variance of the members' means, their mean squared distance from
            the ensemble's mean.
        members: Predictions of the members: class probabilities [members, batch, ..., classes],
            means or medians [members, batch, ...].
        member_variance: Variances that the members predict, [members, batch, ...].
        std: Square root of `total`, [batch, ...].
        quantiles: Quantiles of the ensemble, ascending, [batch, ..., levels].
        interval: Ends `(lower, upper)` of the conformal intervals of real targets, [batch] or
            [batch, targets] each. None without a conformal rule; see `dist_ens.calibrate`.
        sets: Whether a class is in the conformal set of an example, bool[batch, classes], or 0 and
            1 in that of each label, bool[batch, labels, 2]. None without a conformal rule.
        unit: "nats" for classes, "target" for real targets, "" for outputs without an objective.
        class_names: Names of the classes, in the order of the last axis of `mean`. None if the
            labels of training were numbers.

    >>> prediction = Prediction(
    ...     mean=jax.numpy.array([0.5]),
    ...     total=jax.numpy.array([1.0]),
    ...     aleatoric=None,
    ...     epistemic=None,
    ...     members=None,
    ...     unit="target",
    ... )
    >>> in_own_unit = prediction.in_unit(mean=10.0, std=2.0)
    >>> in_own_unit.mean.tolist(), in_own_unit.total.tolist()  # 0.5 * 2 + 10 and 1 * 2**2
    ([11.0], [4.0])
    """

    mean: PyTree
    total: PyTree
    aleatoric: PyTree
    epistemic: PyTree
    members: PyTree
    member_variance: PyTree = None
    std: PyTree = None
    quantiles: PyTree = None
    interval: PyTree = None
    sets: PyTree = None
    unit: str = dataclasses.field(default="", metadata={"static": True})
    class_names: tuple[str, ...] | None = dataclasses.field(default=None, metadata={"static": True})

    def in_unit(self, mean: ArrayLike, std: ArrayLike) -> "Prediction":
        """Returns the prediction of standardised targets in the labels' own unit.

        `mean` and `std` are those by which the labels were standardised, scalars or [targets]. A
        prediction whose `unit` is not "target" is unchanged.
        """
        if self.unit != "target":
            return self

        def scaled(field: str) -> PyTree:
            values = getattr(self, field)
            if values is None:
                return None
            if field == "quantiles":  # Its last axis is one of levels, behind the targets.
                return located(values.swapaxes(-1, -2)).swapaxes(-1, -2)
            if field in _LOCATIONS:
                return jax.tree.map(located, values)
            spread = _with_axes(std, values)
            return values * spread if field == "std" else values * spread**2

        def located(leaf: PyTree) -> PyTree:
            return leaf * _with_axes(std, leaf) + _with_axes(mean, leaf)

        return dataclasses.replace(self, **{name: scaled(name) for name in _LOCATIONS + _SPREADS})

    def first(self, size: int) -> "Prediction":
        """Returns the prediction for the first `size` inputs of the batch."""
        if jax.tree.leaves(self.mean)[0].shape[0] == size:
            return self
        return _first(self, size)

    def __repr__(self) -> str:
        """Returns the fields that are not None, with type and shape."""
        lines = [
            f"    {field.name}: {described(getattr(self, field.name))},"
            for field in dataclasses.fields(self)
            if field.name not in _NO_ARRAYS and getattr(self, field.name) is not None
        ]
        if self.class_names is not None:
            lines.append(f"    class_names: {', '.join(self.class_names)},")
        return "\n".join(["Prediction(", *lines, ")"])


_NO_ARRAYS = ("unit", "class_names")
_OF_MEMBERS = ("members", "member_variance")
_LOCATIONS = ("mean", "members", "quantiles", "interval")
_SPREADS = ("total", "aleatoric", "epistemic", "member_variance", "std")


def _with_axes(number: ArrayLike, like: PyTree) -> PyTree:
    """Returns a scalar, or an array [targets] with as many axes as an array [..., targets]."""
    count = jax.numpy.ndim(number)
    return number[(None,) * (like.ndim - count)] if count else number  # type: ignore[index]


@partial(jax.jit, static_argnums=1)  # One program for all fields.
def _first(prediction: Prediction, size: int) -> Prediction:
    def cut(field: str) -> PyTree:
        axis = 1 if field in _OF_MEMBERS else 0
        return jax.tree.map(
            lambda leaf: jax.lax.slice_in_dim(leaf, 0, size, axis=axis), getattr(prediction, field)
        )

    names = [field.name for field in dataclasses.fields(prediction)]
    return dataclasses.replace(
        prediction, **{name: cut(name) for name in names if name not in _NO_ARRAYS}
    )


def predict_leaves(outputs: Outputs, weights: jax.Array | None = None) -> Prediction:
    """Returns the prediction of an ensemble without an objective, leaf by leaf.

    `members` holds the outputs, a pytree of float arrays [members, batch, ...], `mean` their mean,
    and `epistemic` their variance, divided by the number of members. The others are None. Both are
    weighted by `weights`, float[members]; default: equal weights.

    >>> prediction = predict_leaves(jax.numpy.array([[1.0], [3.0]]))
    >>> prediction.mean.tolist(), prediction.epistemic.tolist()
    ([2.0], [1.0])
    """
    return Prediction(
        mean=jax.tree.map(lambda leaf: mean_of_members(leaf, weights), outputs),
        total=None,
        aleatoric=None,
        epistemic=jax.tree.map(lambda leaf: variance_of_members(leaf, weights), outputs),
        members=outputs,
    )
