"""The common parts of the estimators: parameters, training and predictions."""

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Self, cast

import jax
import numpy as np
import optax
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from dist_ens import losses
from dist_ens.callbacks import EarlyStopping
from dist_ens.data import TreeSplit
from dist_ens.ensemble import Ensemble
from dist_ens.evaluation.calibration import Calibration
from dist_ens.evaluation.fit_calibration import calibrate
from dist_ens.ground.errors import UserError
from dist_ens.ground.numbers import require_fraction
from dist_ens.ground.state import State
from dist_ens.ground.types import Batch, Network, Optimizer, OptimizerOfMember
from dist_ens.layout import MEMBERS, Layout, to_host
from dist_ens.losses import Objective
from dist_ens.members import as_member
from dist_ens.methods import Method
from dist_ens.models import mlp
from dist_ens.sampling.hyper import Drawn
from dist_ens.training import FitResult, fit

_LEARNING_RATE = "learning_rate"
# Inputs are predicted in parts of this length, the last one filled up, by one program.
_ROWS_AT_A_TIME = 512
_PATIENCE = 10  # Number of epochs without an improvement, as `n_iter_no_change` of scikit-learn.
_MOST_PROGRAMS = 16  # Largest number of compiled ensembles that are kept.


class _Compiled:
    """An ensemble whose programs are compiled; later fits replace its seed and its settings."""

    def __init__(self, ensemble: Ensemble) -> None:
        self.ensemble = ensemble


class EnsembleEstimator(BaseEstimator):
    """The common parts of both estimators."""

    _default_loss: str

    def __init__(
        self,
        n_estimators: int = 8,
        *,
        model: Sequence[int] | Network = (64, 64),
        optimizer: OptimizerOfMember | None = None,
        learning_rate: float = 1e-3,
        loss: str | Objective | None = None,
        steps: int | None = None,
        max_epochs: float = 100,
        batch_size: int = 128,
        methods: Sequence[Method] = (),
        hyper: Mapping[str, Drawn | ArrayLike | str] | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        calibration: str | None = None,
        random_state: int | np.random.RandomState | None = None,
        verbose: bool = False,
    ) -> None:
        self.n_estimators = n_estimators
        self.model = model
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.loss = loss
        self.steps = steps
        self.max_epochs = max_epochs
        self.batch_size = batch_size
        self.methods = methods
        self.hyper = hyper
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.calibration = calibration
        self.random_state = random_state
        self.verbose = verbose

    def __getstate__(self) -> dict[str, object]:
        # Compiled programs belong to this process. A loaded estimator makes them anew.
        return {
            name: value for name, value in super().__getstate__().items() if name != "_compiled"
        }

    def _drawn_seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def _fit(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray | None) -> Self:
        """Trains on checked arrays, `y` in the form that the objective takes."""
        self._seed = self._drawn_seed()
        data: dict[str, np.ndarray] = {"inputs": x, "labels": y}
        data |= {} if weights is None else {"weights": weights}
        held_out = None
        if self.early_stopping or self.calibration is not None:
            require_fraction("validation_fraction", self.validation_fraction, "0.1 is usual.")
            data, held_out = self._divided(data)
        result = self._train(data, held_out=held_out)
        self.calibration_: Calibration | None = None
        if self.calibration is not None and held_out is not None:
            unweighted = {name: held_out[name] for name in ("inputs", "labels")}
            is_rule = self.calibration in self._objective.distribution.conformal
            self.calibration_ = calibrate(
                result.ensemble,
                result.state,
                unweighted,
                method=None if is_rule else self.calibration,
                conformal=self.calibration if is_rule else None,
            )
        return self

    def _fit_on(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray | None) -> Self:
        """Trains by one pass over some rows, from the beginning if there is no state yet."""
        data = {"inputs": x, "labels": y} | ({} if weights is None else {"weights": weights})
        if hasattr(self, "state_"):
            state = self._ensemble.layout.moved(self.state_, MEMBERS)
        else:
            self._seed = self._drawn_seed()
            self.calibration_ = None
            state = self._ensemble.init(TreeSplit(data).take(np.arange(min(2, len(x)))))
        self._train(data, state)
        return self

    def _train(
        self, data: Batch, state: State | None = None, held_out: Batch | None = None
    ) -> FitResult:
        """Trains the ensemble, from a state or from the beginning, and keeps what it returns."""
        steps, count = self.steps, len(data["labels"])
        if state is not None:
            steps = int(to_host(state.step)[0]) + -(-count // self.batch_size)
        result = fit(
            self._ensemble,
            data,
            steps=steps,
            epochs=self.max_epochs if steps is None else None,
            batch_size=min(self.batch_size, count),
            state=state,
            callbacks=[EarlyStopping("nll", patience=_PATIENCE)] if self.early_stopping else [],
            eval_data=held_out if self.early_stopping else None,
            eval_every="epoch" if self.early_stopping else None,
            progress=bool(self.verbose),
        )
        # The execution that was chosen serves later fits of the same shapes too.
        self._compiled.ensemble = result.ensemble
        self.state_ = to_host(result.state)
        self.n_iter_ = result.step
        return result

    def _divided(self, data: Batch) -> tuple[Batch, Batch]:
        """Returns training and held-out data, with a share of each class."""
        labels = data["labels"] if isinstance(self, ClassifierMixin) else None
        parts = train_test_split(
            *data.values(),
            test_size=self.validation_fraction,
            stratify=labels,
            random_state=self._seed,
        )
        named = [dict(zip(data, parts[at::2], strict=True)) for at in (0, 1)]
        return named[0], named[1]

    @property
    def _num_classes(self) -> int | None:
        classes = getattr(self, "classes_", None)
        return None if classes is None else len(classes)

    @property
    def _objective(self) -> Objective:
        loss = self._default_loss if self.loss is None else self.loss
        if not isinstance(loss, str):
            return loss
        make = getattr(losses, loss) if loss in losses.__all__ else None
        takes = inspect.signature(make).parameters if make else ()
        if make is None or ("num_classes" in takes) != (self._num_classes is not None):
            raise UserError(
                f"loss={loss!r} does not fit {type(self).__name__}. Give {self._default_loss!r}, "
                "another loss of dist_ens.losses by its name, or an objective."
            )
        return make(self._num_classes) if self._num_classes else make(standardize=True)

    @property
    def _settings(self) -> dict[str, Drawn | ArrayLike | str]:
        return {_LEARNING_RATE: float(self.learning_rate), **(self.hyper or {})}

    @property
    def _ensemble(self) -> Ensemble:
        """The ensemble of these parameters, with the programs of an earlier fit if they fit."""
        if not hasattr(self, "_compiled"):
            model = tuple(self.model) if isinstance(self.model, list) else self.model
            given: tuple[Hashable, ...] = (
                self.n_estimators,
                cast(Hashable, model),
                cast(Hashable, self.optimizer or _adam),
                cast(Hashable, self.loss or self._default_loss),
                tuple(self.methods),
                tuple(sorted(self._settings)),
                self.n_features_in_,
                self._num_classes,
            )
            try:
                self._compiled = _compiled(*given, make=_Maker(self))
            except TypeError:  # A part of the user's has no hash, so nothing can be found by it.
                self._compiled = _compiled.__wrapped__(*given, make=_Maker(self))
        return self._compiled.ensemble.with_values(self._seed, self._settings)

    def _predicted(self, x: ArrayLike, level: float | None = None) -> dict[str, np.ndarray]:
        """Returns the fields of the prediction, float64[rows, ...], with intervals of a level."""
        check_is_fitted(self, "state_")
        inputs = np.asarray(validate_data(self, x, dtype=np.float32, reset=False))
        count = len(inputs)
        rows = np.zeros((-(-count // _ROWS_AT_A_TIME) * _ROWS_AT_A_TIME, inputs.shape[1]), "f4")
        rows[:count] = inputs
        ensemble, found, calibration = self._ensemble, [], self.calibration_
        if level is not None and calibration is not None:
            calibration = calibration.at(level)
        state = ensemble.layout.moved(self.state_, MEMBERS)
        for first in range(0, len(rows), _ROWS_AT_A_TIME):
            part = rows[first : first + _ROWS_AT_A_TIME]
            prediction = ensemble.predict(state, part, calibration=calibration)
            values = {name: getattr(prediction, name) for name in ("mean", "total", "interval")}
            if values["interval"] is not None:
                values["interval"] = np.moveaxis(values["interval"], 0, -1)
            found.append({n: np.asarray(v, np.float64) for n, v in values.items() if v is not None})
        return {name: np.concatenate([f[name] for f in found])[:count] for name in found[0]}


class _Maker:
    """A function that makes the ensemble of an estimator; all of them are equal as keys."""

    def __init__(self, estimator: EnsembleEstimator) -> None:
        self._estimator = estimator

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Maker)

    def __hash__(self) -> int:
        return 0

    def __call__(self) -> Ensemble:
        """Returns the ensemble, whose programs are not compiled yet."""
        given = self._estimator
        objective = given._objective
        model, optimizer = given.model, given.optimizer or _adam
        if isinstance(model, Sequence) and all(isinstance(size, int) for size in model):
            model = mlp((given.n_features_in_,), objective.num_outputs, hidden_sizes=tuple(model))
        # Each device holds whole members, so any number of rows is a batch.
        devices = jax.devices()
        rows = max(k for k in range(1, len(devices) + 1) if given.n_estimators % k == 0)
        return Ensemble(
            as_member(model),
            optimizer,
            objective,
            num_members=given.n_estimators,
            methods=tuple(given.methods),
            hyper=given._settings,
            layout=Layout.make(given.n_estimators, devices=devices[:rows]),
        )


@functools.lru_cache(_MOST_PROGRAMS)
def _compiled(*_: Hashable, make: Callable[[], Ensemble]) -> _Compiled:
    """Returns the compiled ensemble of some parameters, the same for equal ones."""
    return _Compiled(make())


def _adam(hyper: Mapping[str, jax.Array]) -> Optimizer:
    return cast(Optimizer, optax.adam(hyper[_LEARNING_RATE]))
