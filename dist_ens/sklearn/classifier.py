"""The estimator of classes."""

from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
from numpy.typing import ArrayLike
from sklearn.base import ClassifierMixin
from sklearn.utils import Tags
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from typing_extensions import override

from dist_ens.ground.types import Network, OptimizerOfMember
from dist_ens.losses import Objective
from dist_ens.methods import Method
from dist_ens.sampling.hyper import Drawn
from dist_ens.sklearn.estimator import EnsembleEstimator


class EnsembleClassifier(ClassifierMixin, EnsembleEstimator):
    """A deep ensemble that predicts classes, or several labels of a row that are 0 or 1.

    Inputs are not scaled: put a `StandardScaler` before it.

    Args:
        n_estimators: Number of networks.
        model: Sizes of the hidden layers of an MLP, or a network of any library with as many
            outputs as the loss has; see `dist_ens.as_member`.
        optimizer: Optimizer of Optax, or a function `make(hyper)` of a member's settings. Default:
            Adam with `learning_rate`.
        learning_rate: Learning rate. It is the setting `learning_rate` of every member, so that
            another value does not compile again. None for an `optimizer` that reads no such
            setting.
        loss: Name of a loss of `dist_ens.losses`, or an objective. Default: "categorical", or
            "multilabel" for several labels of a row.
        steps: Number of steps. Default: `max_epochs` decides.
        max_epochs: Number of passes over the training rows.
        batch_size: Number of rows in a step.
        methods: Methods of `dist_ens.methods`, such as `(bootstrap(),)` for bagging.
        hyper: Settings that differ from member to member, as for `dist_ens.Ensemble`.
        early_stopping: Whether to stop when the NLL of held-out rows has not improved for 10
            epochs. The state of the best epoch is kept.
        validation_fraction: Share of the rows that `early_stopping` holds out, and share of the
            others that `calibration` holds out.
        calibration: Calibration that is fitted on held-out rows: "temperature", "vector" or
            "isotonic". Weights of rows do not count in it, but rows of weight 0 are left out. If
            the rows do not determine it, none is applied, with a warning. Default: none.
        class_weight: Weight of each class, or "balanced". Default: 1.
        random_state: Seed of the networks and of the order of the rows.
        verbose: Whether to show the progress.

    Attributes:
        classes_: Sorted labels of the classes, or the numbers of several labels of a row.
        ensemble_: Ensemble that was trained.
        state_: State of the ensemble, arrays of NumPy with leaves [n_estimators, ...].
        n_iter_: Number of steps of the state, after early stopping that of the best epoch.
        n_features_in_: Number of columns of the training rows.
        feature_names_in_: Names of the columns, if the training rows are a frame.
        calibration_: Calibration that was fitted, or None.

    >>> from sklearn.datasets import load_iris
    >>> x, y = load_iris(return_X_y=True)
    >>> classifier = EnsembleClassifier(4, learning_rate=1e-2, random_state=0).fit(x, y)
    >>> bool(classifier.score(x, y) > 0.95), classifier.predict_proba(x).shape
    (True, (150, 3))
    """

    def __init__(
        self,
        n_estimators: int = 8,
        *,
        model: Sequence[int] | Network = (64, 64),
        optimizer: OptimizerOfMember | None = None,
        learning_rate: float | None = 1e-3,
        loss: str | Objective | None = None,
        steps: int | None = None,
        max_epochs: float = 100,
        batch_size: int = 128,
        methods: Sequence[Method] = (),
        hyper: Mapping[str, Drawn | ArrayLike | str] | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        calibration: str | None = None,
        class_weight: Mapping[object, float] | str | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        given = {
            n: v for n, v in locals().items() if n not in ("self", "class_weight", "__class__")
        }
        super().__init__(**given)
        self.class_weight = class_weight

    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Trains the ensemble from the beginning.

        Args:
            X: Inputs, [rows, columns].
            y: Labels of classes, numbers or texts, [rows]; or several labels that are 0 or 1,
                [rows, labels].
            sample_weight: Weights of the rows, not negative, [rows]. Default: 1.
        """
        x, labels, weights = self._checked(X, y, sample_weight, reset=True)
        if labels.ndim > 1:
            classes, numbers = np.arange(labels.shape[1]), labels
        else:
            classes, numbers = np.unique(labels, return_inverse=True)
            if len(classes) < 2:
                raise ValueError(
                    f"Classifier can't train when only one class is present: {classes[0]}."
                )
        self._begin(labels)
        self.classes_ = classes
        return self._fit(x, numbers.astype(np.int32), self._weights(labels, weights))

    def partial_fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        classes: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Continues training with one pass over some rows, without early stopping or calibration.

        Args:
            X: Inputs, [rows, columns].
            y: Labels of classes, [rows], or several labels, [rows, labels].
            classes: All classes, which the first call must name. Not needed for several labels.
            sample_weight: Weights of the rows, [rows]. Default: 1.
        """
        is_first = not hasattr(self, "state_")
        x, labels, weights = self._checked(X, y, sample_weight, reset=is_first)
        if labels.ndim > 1:
            classes = range(labels.shape[1])
        if is_first:
            if classes is None:
                raise ValueError("classes must be passed on the first call to partial_fit.")
            self._begin(labels)
            self.classes_ = np.unique(classes)
        elif classes is not None and not np.array_equal(np.unique(classes), self.classes_):
            raise ValueError(f"`classes` are not those of the first call, {self.classes_}.")
        if self.class_weight == "balanced":
            raise ValueError(
                "class_weight='balanced' needs all rows, and partial_fit sees some. Give a dict."
            )
        if self._labels_shape:
            return self._fit_on(x, labels.astype(np.int32), self._weights(labels, weights))
        numbers = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        if (unknown := self.classes_[numbers] != labels).any():
            raise ValueError(f"`y` has the class {labels[unknown][0]}, not in {self.classes_}.")
        return self._fit_on(x, numbers.astype(np.int32), self._weights(labels, weights))

    def _weights(self, labels: np.ndarray, weights: np.ndarray | None) -> np.ndarray | None:
        """Returns the weights of rows times those of their classes."""
        if self.class_weight is None:
            return weights
        rows = labels
        if self.class_weight != "balanced":  # Rows of `partial_fit` may be of some classes only.
            ones = np.ones_like(self.classes_)
            rows = np.concatenate([labels, self.classes_ if labels.ndim == 1 else [0 * ones, ones]])
        own = compute_sample_weight(self.class_weight, rows)[: len(labels)]
        return own if weights is None else weights * own

    @override
    def _checked(
        self, x: ArrayLike, y: ArrayLike, weights: ArrayLike | None, *, reset: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        inputs, labels, weights = super()._checked(x, y, weights, reset=reset)
        check_classification_targets(labels)
        if labels.ndim > 1 and not np.isin(labels, (0, 1)).all():
            raise ValueError("Several labels of a row must each be 0 or 1, and `y` has others.")
        return inputs, labels, weights

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    @property
    @override
    def _default_loss(self) -> str:
        return "multilabel" if self._labels_shape else "categorical"

    @property
    @override
    def _loss_options(self) -> dict[str, int | bool]:
        return {"num_labels" if self._labels_shape else "num_classes": len(self.classes_)}

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Returns the probabilities of the classes, the mean of all members, [rows, classes].

        Of several labels of a row, they are the probabilities of 1, [rows, labels].
        """
        probs = self._predicted(X)["mean"]
        return probs if self._labels_shape else probs / probs.sum(axis=1, keepdims=True)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """Returns the most probable class of each row, [rows], or 0 and 1, [rows, labels]."""
        probs = self.predict_proba(X)
        if self._labels_shape:
            return (probs > 0.5).astype(np.int64)
        return self.classes_[probs.argmax(axis=1)]
