"""The common parts of the estimators: parameters, training and predictions."""

import abc
import inspect
import warnings
from collections.abc import Hashable, Mapping, Sequence
from numbers import Integral
from typing import Self, cast

import cloudpickle
import jax
import numpy as np
import optax
from numpy.typing import ArrayLike
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    _check_sample_weight,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from dist_ens import losses
from dist_ens.callbacks import EarlyStopping
from dist_ens.data import TreeSplit
from dist_ens.ensemble import Ensemble
from dist_ens.evaluation.calibration import Calibration
from dist_ens.evaluation.fit_calibration import calibrate
from dist_ens.ground.errors import UserError
from dist_ens.ground.numbers import require_share, whole_number
from dist_ens.ground.state import State, select_members
from dist_ens.ground.types import Batch, Network, Optimizer, OptimizerOfMember
from dist_ens.layout import MEMBERS, Layout, to_host
from dist_ens.losses import Objective
from dist_ens.members import as_member
from dist_ens.methods import Method
from dist_ens.metrics.catalogue import NLL, headlines
from dist_ens.models import mlp
from dist_ens.sampling.hyper import Drawn
from dist_ens.training import FitResult, fit

_LEARNING_RATE = "learning_rate"
# Inputs are predicted in parts of this length, the last one filled up, by one program.
_ROWS_AT_A_TIME = 512
# Parameters that may be of the user's own code.
_PARTS = ("model", "optimizer", "loss", "methods", "hyper")
_PATIENCE = 10  # Number of epochs without an improvement, as `n_iter_no_change` of scikit-learn.
_MOST_PROGRAMS = 16  # Largest number of compiled ensembles that are kept.


class _Compiled:
    """An ensemble whose programs are compiled; later fits replace its seed and its settings."""

    def __init__(self, program: tuple[Hashable, ...], ensemble: Ensemble) -> None:
        self.program, self.ensemble = program, ensemble


# Compiled ensembles by the parameters that decide on their programs, the last one used last.
_PROGRAMS: dict[tuple[Hashable, ...], _Compiled] = {}


class EnsembleEstimator(BaseEstimator):
    """The common parts of both estimators."""

    _labels_shape: tuple[int, ...]  # Number of targets or labels of a row, () for one.

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

    @property
    @abc.abstractmethod
    def _default_loss(self) -> str:
        """Name of the loss that the labels call for."""

    @property
    @abc.abstractmethod
    def _loss_options(self) -> dict[str, int | bool]:
        """Arguments of a loss that the labels decide."""

    def __getstate__(self) -> dict[str, object]:
        # Compiled programs belong to this process. A loaded estimator makes them anew.
        state = {n: value for n, value in super().__getstate__().items() if n != "_compiled"}
        # Networks, optimizers and methods often are functions within functions.
        parts = {name: state.pop(name) for name in _PARTS}
        return state | {"_parts": cloudpickle.dumps(parts)}

    def __setstate__(self, state: dict[str, object]) -> None:
        parts = cloudpickle.loads(cast(bytes, state["_parts"]))
        super().__setstate__({n: value for n, value in state.items() if n != "_parts"} | parts)

    def _drawn_seed(self) -> int:
        return int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))

    def _checked(
        self, x: ArrayLike, y: ArrayLike, weights: ArrayLike | None, *, reset: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Returns checked arrays: inputs, labels and weights. With `reset`, they are the first."""
        is_numeric = not isinstance(self, ClassifierMixin)
        found = validate_data(
            self, x, y, dtype=np.float32, multi_output=True, y_numeric=is_numeric, reset=reset
        )
        inputs = np.asarray(found[0])
        labels = found[1].toarray() if issparse(found[1]) else np.asarray(found[1])
        if labels.ndim == 2 and labels.shape[1] == 1:
            labels = column_or_1d(labels, warn=True)
        if not reset and labels.shape[1:] != self._labels_shape:
            raise ValueError(
                f"`y` has the shape {labels.shape}, and that of the first call has "
                f"{('rows', *self._labels_shape)}."
            )
        if weights is None:
            return inputs, labels, None
        return inputs, labels, _check_sample_weight(weights, inputs, ensure_non_negative=True)

    def _begin(self, labels: np.ndarray) -> None:
        """Forgets an earlier fit, before one to labels of another form."""
        for name in ("_compiled", "state_"):
            self.__dict__.pop(name, None)
        self._labels_shape = labels.shape[1:]

    def _fit(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray | None) -> Self:
        """Trains on checked arrays, `y` in the form that the objective takes."""
        self._seed = self._drawn_seed()
        data: dict[str, np.ndarray] = {"inputs": x, "labels": y}
        data |= {} if weights is None else {"weights": weights}
        stops_on = calibrates_on = None
        if self.early_stopping or self.calibration is not None:
            require_share("validation_fraction", self.validation_fraction, "0.1 is usual.")
        if self.early_stopping:
            data, stops_on = self._divided(data)
        if self.calibration is not None:
            # Rows on which training has stopped would make intervals too short.
            data, calibrates_on = self._divided(data)
        self._train(data, stops_on=stops_on)
        self.calibration_: Calibration | None = None
        if self.calibration is not None and calibrates_on is not None:
            counts = calibrates_on.get("weights", np.ones(1)) > 0  # A calibration has no weights.
            rows = np.flatnonzero(np.broadcast_to(counts, len(calibrates_on["labels"])))
            unweighted = {name: calibrates_on[name][rows] for name in ("inputs", "labels")}
            is_rule = self.calibration in self._objective.distribution.conformal
            self.calibration_ = calibrate(
                *self._predictors(),
                unweighted,
                method=None if is_rule else self.calibration,
                conformal=self.calibration if is_rule else None,
            )
            if told := self.calibration_.warnings:
                self.calibration_ = None
                warnings.warn(
                    f"{len(rows):,} held-out rows do not determine the calibration, and none is "
                    f"applied. {' '.join(told)}",
                    stacklevel=3,
                )
        return self

    def _fit_on(self, x: np.ndarray, y: np.ndarray, weights: np.ndarray | None) -> Self:
        """Trains by one pass over some rows, from the beginning if there is no state yet."""
        data = {"inputs": x, "labels": y} | ({} if weights is None else {"weights": weights})
        data = _in_equal_batches(data, self._num_batches(len(y)))
        is_first = not hasattr(self, "state_")
        if any(getattr(method, "uses_positions", False) for method in self.methods):
            raise ValueError(
                "A method such as bootstrap() draws from all rows, and partial_fit sees some of "
                "them. Use fit."
            )
        if is_first:
            self._seed = self._drawn_seed()
        elif hasattr(self, "_compiled") and self._program != self._compiled.program:
            raise ValueError(
                "n_estimators, model, optimizer, loss, methods or the names in hyper have changed "
                "since the first call. Call fit, which begins anew."
            )
        if not is_first:
            # The settings may have been changed by `set_params`.
            state = self.state_._replace(hyper=dict(self._ensemble.hyper) or ())
            state = self._ensemble.layout.moved(state, MEMBERS)
        else:
            state = self._ensemble.init(TreeSplit(data).take(np.arange(min(2, len(x)))))
        self._train(data, state)
        self.calibration_ = None  # It was that of the state before.
        return self

    def _train(
        self, data: Batch, state: State | None = None, stops_on: Batch | None = None
    ) -> FitResult:
        """Trains the ensemble, from a state or from the beginning, and keeps what it returns."""
        steps, count, batches = self.steps, len(data["labels"]), None
        num_batches = self._num_batches(count)
        batch_size = min(self.batch_size, count)
        if state is not None:
            first, batch_size = int(to_host(state.step)[0]), count // num_batches
            if first:
                # An order of rows counts its epochs from step 0, and these rows are new.
                rows = np.random.default_rng([self._seed, first]).permutation(count)
                parts = np.split(rows, num_batches)
                batches = [{name: leaf[part] for name, leaf in data.items()} for part in parts]
            steps = first + num_batches
        elif num_batches == 1 and self._is_mlp and not self.methods:
            data = _with_rows_counted(data)
            batch_size = len(data["labels"])
        result = fit(
            self._ensemble,
            data if batches is None else batches,
            steps=steps,
            epochs=self.max_epochs if steps is None else None,
            batch_size=batch_size if batches is None else None,
            state=state,
            callbacks=[EarlyStopping(self._score, patience=_PATIENCE)] if stops_on else [],
            eval_data=stops_on,
            eval_every="epoch" if stops_on else None,
            progress=bool(self.verbose),
        )
        # The execution that was chosen serves later fits of the same shapes too.
        self._compiled.ensemble = result.ensemble
        state = to_host(result.state)
        self._sound = self._sound_members(result, state)
        self.state_, self.n_iter_ = state, result.step
        return result

    def _num_batches(self, count: int) -> int:
        return -(-count // whole_number("batch_size", self.batch_size, least=1))

    def _sound_members(self, result: FitResult, state: State) -> list[int]:
        """Returns the positions of the members that have not failed, and warns of the others."""
        ids = state.member_id.tolist()
        failed = {
            each.member_id
            for each in result.failed_members
            if each.first_step <= result.step <= each.last_step
        }
        for leaf in jax.tree.leaves(state.params):
            is_finite = np.isfinite(leaf).reshape(len(ids), -1).all(axis=1)
            failed |= {ids[at] for at in np.flatnonzero(~is_finite)}
        sound = [at for at, member in enumerate(ids) if member not in failed]
        if not sound:
            raise ValueError(
                f"All {len(ids)} members have failed: their losses or parameters are not finite. "
                "Lower the learning rate, and look for very large numbers in the data."
            )
        if failed:
            warnings.warn(
                f"{len(failed)} of {len(ids)} members have failed, with the ids {sorted(failed)}: "
                "their losses or parameters are not finite. They are left out of predictions. "
                "Lower the learning rate.",
                ConvergenceWarning,
                stacklevel=5,
            )
        return sound

    def _predictors(self) -> tuple[Ensemble, State]:
        """Returns the ensemble of the members that predict, and its state."""
        ensemble, state = self._ensemble, self.state_
        if len(self._sound) < ensemble.num_members:
            return ensemble.at(select_members(state, self._sound))
        return ensemble, ensemble.layout.moved(state, MEMBERS)

    def _divided(self, data: Batch) -> tuple[Batch, Batch]:
        """Returns training and held-out data, with a share of each class."""
        labels = None
        if isinstance(self, ClassifierMixin) and not self._labels_shape:
            counts = np.unique(data["labels"], return_counts=True)[1]
            held_out = np.ceil(self.validation_fraction * counts.sum())
            # A class of one row, or more classes than rows, cannot be divided.
            labels = data["labels"] if counts.min() > 1 and len(counts) <= held_out else None
        parts = train_test_split(
            *data.values(),
            test_size=self.validation_fraction,
            stratify=labels,
            random_state=self._seed,
        )
        named = [dict(zip(data, parts[at::2], strict=True)) for at in (0, 1)]
        return named[0], named[1]

    @property
    def ensemble_(self) -> Ensemble:
        """The ensemble, for `predict`, `evaluate`, `select` and others, with `state_`."""
        return self._ensemble

    @property
    def _objective(self) -> Objective:
        loss = self._default_loss if self.loss is None else self.loss
        if not isinstance(loss, str):
            return loss
        make = getattr(losses, loss) if loss in losses.__all__ else None
        takes = inspect.signature(make).parameters if make else ()
        if make is None or not {*self._loss_options} <= {*takes}:
            raise UserError(
                f"loss={loss!r} does not fit {type(self).__name__} with these labels. Give "
                f"{self._default_loss!r}, another loss of dist_ens.losses by its name, or an "
                "objective."
            )
        return make(**self._loss_options)

    @property
    def _score(self) -> str:
        """Name of the score by which training stops early."""
        distribution = self._objective.distribution
        if distribution.calibrations:  # It predicts probabilities or variances.
            return NLL.name
        return next(m.name for m in headlines(m.name for m in distribution.metrics) if m is not NLL)

    @property
    def _settings(self) -> dict[str, Drawn | ArrayLike | str]:
        # A finished optimizer of Optax, init and update, reads no settings.
        if self.learning_rate is None or isinstance(self.optimizer, tuple):
            return {**(self.hyper or {})}
        return {_LEARNING_RATE: self.learning_rate, **(self.hyper or {})}

    @property
    def _program(self) -> tuple[Hashable, ...]:
        """The parameters that decide on the compiled programs."""
        return (
            self.n_estimators,
            cast(Hashable, tuple(self.model) if isinstance(self.model, list) else self.model),
            cast(Hashable, self.optimizer or _adam),
            cast(Hashable, self.loss or self._default_loss),
            tuple(self.methods),
            tuple(sorted(self._settings)),
            self.n_features_in_,
            tuple(self._loss_options.items()),
        )

    @property
    def _ensemble(self) -> Ensemble:
        """The ensemble of these parameters, with the programs of an earlier fit if they fit."""
        if not hasattr(self, "_compiled"):
            given = self._program
            try:
                hash(given)
            except TypeError:  # A part of the user's has no hash, so nothing can be found by it.
                self._compiled = _Compiled(given, self._new_ensemble())
            else:
                found = _PROGRAMS.pop(given, None)
                self._compiled = _PROGRAMS[given] = found or _Compiled(given, self._new_ensemble())
                while len(_PROGRAMS) > _MOST_PROGRAMS:  # The first one was used longest ago.
                    del _PROGRAMS[next(iter(_PROGRAMS))]
        return self._compiled.ensemble.with_values(self._seed, self._settings)

    @property
    def _is_mlp(self) -> bool:
        """Whether `model` is sizes of hidden layers."""
        sizes = self.model
        return isinstance(sizes, Sequence) and all(isinstance(each, Integral) for each in sizes)

    def _new_ensemble(self) -> Ensemble:
        """Returns the ensemble, whose programs are not compiled yet."""
        objective, model = self._objective, self.model
        if self._is_mlp:
            sizes = tuple(int(size) for size in model)
            model = mlp((self.n_features_in_,), objective.num_outputs, hidden_sizes=sizes)
        # Each device holds whole members, so any number of rows is a batch.
        devices, count = jax.devices(), whole_number("n_estimators", self.n_estimators, least=1)
        rows = max(k for k in range(1, len(devices) + 1) if count % k == 0)
        return Ensemble(
            as_member(model),
            self.optimizer or _adam,
            objective,
            num_members=count,
            methods=tuple(self.methods),
            hyper=self._settings,
            layout=Layout.make(count, devices=devices[:rows]),
        )

    def _predicted(self, x: ArrayLike, level: float | None = None) -> dict[str, np.ndarray]:
        """Returns the fields of the prediction, float64[rows, ...], with intervals of a level."""
        check_is_fitted(self, "state_")
        inputs = np.asarray(validate_data(self, x, dtype=np.float32, reset=False))
        count = len(inputs)
        rows = np.zeros((-(-count // _ROWS_AT_A_TIME) * _ROWS_AT_A_TIME, inputs.shape[1]), "f4")
        rows[:count] = inputs
        (ensemble, state), found, calibration = self._predictors(), [], self.calibration_
        if level is not None and calibration is not None:
            calibration = calibration.at(level)
        for first in range(0, len(rows), _ROWS_AT_A_TIME):
            part = rows[first : first + _ROWS_AT_A_TIME]
            prediction = ensemble.predict(state, part, calibration=calibration)
            names = ("mean", "aleatoric", "total", "interval")
            values = {name: getattr(prediction, name) for name in names}
            if values["interval"] is not None:
                values["interval"] = np.moveaxis(values["interval"], 0, -1)
            found.append({n: np.asarray(v, np.float64) for n, v in values.items() if v is not None})
        return {name: np.concatenate([f[name] for f in found])[:count] for name in found[0]}


def _in_equal_batches(data: Batch, num_batches: int) -> Batch:
    """Returns rows for batches of equal length, the last ones filled up by rows of weight 0."""
    count = len(data["labels"])
    added = -count % num_batches
    if not added:
        return data
    weights = np.asarray(data.get("weights", np.ones(count)), np.float64)
    filled = {name: np.concatenate([leaf, leaf[:added]]) for name, leaf in data.items()}
    return filled | {"weights": np.concatenate([weights, np.zeros(added)])}


def _with_rows_counted(data: Batch) -> Batch:
    """Returns the same batch with equal rows as one row of their weight, in a fixed order.

    So a row of weight 3 is three such rows, and the order of the rows does not matter, both to the
    last bit: float32 would round the sums of other rows differently.
    """
    weights = np.asarray(data.get("weights", np.ones(len(data["labels"]))), np.float64)
    whole = np.column_stack([data["inputs"], data["labels"]])[weights > 0]
    _, first, same = np.unique(whole, axis=0, return_index=True, return_inverse=True)
    rows = np.flatnonzero(weights > 0)[first]
    found = {name: data[name][rows] for name in ("inputs", "labels")}
    total = np.bincount(same.ravel(), weights[weights > 0])
    return found if (total == 1).all() else found | {"weights": total}


def _adam(hyper: Mapping[str, jax.Array]) -> Optimizer:
    return cast(Optimizer, optax.adam(hyper[_LEARNING_RATE]))
