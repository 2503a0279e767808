"""The estimator of real targets."""

from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtri
from sklearn.base import RegressorMixin
from sklearn.utils import Tags
from typing_extensions import override

from dist_ens.ground.numbers import require_fraction
from dist_ens.sklearn.estimator import EnsembleEstimator

# Targets are far from 0 if their range is a smaller share of it.
_FAR = 1e-3
# Float32 holds the variances of targets whose range lies between these.
_NARROW, _WIDE = 1e-9, 1e9


class EnsembleRegressor(RegressorMixin, EnsembleEstimator):
    """A deep ensemble that predicts numbers, with their uncertainty.

    The target is standardised. Inputs are not: put a `StandardScaler` before it.

    Arguments and attributes are those of `EnsembleClassifier`, without classes. The default loss is
    "gaussian". A calibration is "variance", or "cqr" for conformal intervals. `ensemble_` predicts
    `(target - offset_) / scale_`. These are 0 and 1 unless targets are so far from 0 that float32
    would round them, or their range is so small or large that it would not hold their variances.

    >>> from sklearn.datasets import load_diabetes
    >>> x, y = load_diabetes(return_X_y=True)
    >>> regressor = EnsembleRegressor(4, max_epochs=20, random_state=0).fit(10 * x, y)
    >>> mean, std = regressor.predict(10 * x[:3], return_std=True)
    >>> mean.shape, std.shape, regressor.predict_interval(10 * x[:3]).shape
    ((3,), (3,), (3, 2))
    """

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    @property
    @override
    def _default_loss(self) -> str:
        return "gaussian"

    @property
    @override
    def _loss_options(self) -> dict[str, int | bool]:
        targets = {"targets": self._labels_shape[0]} if self._labels_shape else {}
        return {"standardize": True, **targets}

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Trains the ensemble from the beginning.

        Args:
            X: Inputs, [rows, columns].
            y: Targets, [rows], or several of a row, [rows, targets], which are independent given
                the inputs.
            sample_weight: Weights of the rows, not negative, [rows]. Default: 1.
        """
        inputs, targets, weights = self._checked(X, y, sample_weight, reset=True)
        self._begin_at(targets, weights)
        return self._fit(inputs, (targets - self.offset_) / self.scale_, weights)

    def partial_fit(
        self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None
    ) -> Self:
        """Continues training with one pass over some rows. The first rows scale the target.

        Args:
            X: Inputs, [rows, columns].
            y: Targets, [rows] or [rows, targets].
            sample_weight: Weights of the rows, [rows]. Default: 1.
        """
        is_first = not hasattr(self, "state_")
        inputs, targets, weights = self._checked(X, y, sample_weight, reset=is_first)
        if is_first:
            self._begin_at(targets, weights)
        return self._fit_on(inputs, (targets - self.offset_) / self.scale_, weights)

    def _begin_at(self, targets: np.ndarray, weights: np.ndarray | None) -> None:
        """Begins a fit, and chooses the middle and the scale of the targets that it is given."""
        self._begin(targets)
        counted = targets if weights is None else targets[weights > 0]
        low, high = counted.min(axis=0), counted.max(axis=0)
        middle = (low + high) / 2
        is_far = high - low < _FAR * np.abs(middle)
        # Of an objective of the user's, 0 may mean something.
        has_own = self.loss is not None and not isinstance(self.loss, str)
        self.offset_ = np.where(is_far & (not has_own), middle, 0.0)
        width = np.where(high > low, high - low, 1.0)
        is_odd = (width < _NARROW) | (width > _WIDE)
        # A power of two changes no digit.
        self.scale_ = np.where(is_odd & (not has_own), 2 ** np.floor(np.log2(width)), 1.0)

    @override
    def _checked(
        self, x: ArrayLike, y: ArrayLike, weights: ArrayLike | None, *, reset: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        inputs, targets, weights = super()._checked(x, y, weights, reset=reset)
        targets = targets.astype(np.float64)
        if reset and (np.ptp(targets, axis=0) == 0).any():
            raise ValueError(
                f"All values of a target are equal, such as {targets[0]} "
                f"(n_samples={len(targets)}): nothing to learn."
            )
        return inputs, targets, weights

    def predict(
        self, X: ArrayLike, return_std: bool = False
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Returns the means, and with `return_std` the standard deviations too, in the form of `y`.

        The variance is that of the mixture of the members: the mean of their variances, and the
        variance of their means.
        """
        found = self._predicted(X)
        mean = found["mean"] * self.scale_ + self.offset_
        if not return_std:
            return mean
        if "aleatoric" not in found:  # The spread of the members alone is too small.
            raise ValueError(f"loss={self.loss!r} predicts no variance. Use loss='gaussian'.")
        return mean, np.sqrt(found["total"]) * self.scale_

    def predict_interval(self, X: ArrayLike, coverage: float = 0.9) -> np.ndarray:
        """Returns the ends of an interval for each target, [rows, 2] or [rows, targets, 2].

        With `calibration="cqr"` it is the conformal interval, which contains the stated share of
        the targets of new rows. Otherwise it is that of a normal distribution of the predicted
        mean and variance.

        Args:
            X: Inputs, [rows, columns].
            coverage: Share of the targets in their intervals, in [0, 1).
        """
        require_fraction("coverage", coverage, "0.9 is usual.")
        if self.calibration_ is not None and self.calibration_.conformal is not None:
            ends = self._predicted(X, coverage)["interval"]
            return ends * self.scale_[..., None] + self.offset_[..., None]
        mean, std = self.predict(X, return_std=True)
        half = ndtri((1 + coverage) / 2) * std
        return np.stack([mean - half, mean + half], axis=-1)
