"""`load`: loading of a finished run that was started from a config or made in Python."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from dist_ens.checkpoint import (
    CheckpointStore,
    StepRecord,
    listed,
    moving_on,
    positions_of,
    read_newest,
)
from dist_ens.commands import quoted
from dist_ens.data import (
    Source,
    Spec,
    Split,
    TreeSplit,
    convert_inputs,
)
from dist_ens.data.class_names import with_class_numbers
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.failures import frozen_positions, saved_structures
from dist_ens.errors import UserError
from dist_ens.evaluation import Scores, evaluate
from dist_ens.evaluation.examples import Examples, arrays_of, examples_of
from dist_ens.evaluation.scoring import BATCH_SIZE
from dist_ens.experiment.answers import kept_calibration
from dist_ens.experiment.build import NOTHING
from dist_ens.experiment.checks import require_trained_on
from dist_ens.experiment.own_parts import OwnParts
from dist_ens.experiment.record import Run
from dist_ens.experiment.sources import open_source
from dist_ens.experiment.workdir import open_finished
from dist_ens.json_text import JsonDict
from dist_ens.layout import to_host
from dist_ens.losses import Objective, Prediction
from dist_ens.metrics import Metric
from dist_ens.paths import given_path
from dist_ens.state import ClassNames, State, select_members
from dist_ens.training.run_record import record_of
from dist_ens.types import Data, Inputs

if TYPE_CHECKING:
    from dist_ens.experiment.config_file import ConfigFile


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run that was loaded from its folder.

    Attributes:
        ensemble: Ensemble of the run.
        state: State of the ensemble.
        step: Number of updates that the state has seen.
        run: Record of a run that was started from a config; None for one made in Python.
        parts: Parts of the run that its experiment does not name.
        config: Config file of the run; None without one.
        folder: Folder of the run.
    """

    ensemble: Ensemble
    state: State
    step: int
    run: Run | None = None
    parts: OwnParts = NOTHING
    config: "ConfigFile | None" = None
    folder: pathlib.Path = pathlib.Path()

    def predict(
        self, inputs: Inputs, *, calibrated: bool = False, conformal: float | None = None
    ) -> Prediction:
        """Returns the prediction of the ensemble; see `Ensemble.predict`.

        Inputs and targets of a table are in the units of the table, and not standardised, and the
        prediction is in float64 on the host. Frozen members are left out, unless all are frozen.

        Args:
            inputs: Inputs of the examples, in the form of the run's data.
            calibrated: Whether to apply the calibration that the run keeps, which `dist-ens
                evaluate --calibration=METHOD` fits.
            conformal: Coverage of `sets` or `interval`, in (0, 1). They need the rule that the run
                keeps, which `dist-ens evaluate --conformal=METHOD` fits. Default: neither.

        Raises:
            UserError: If the inputs do not fit the run, or its members belong to several groups.
                Also if the run keeps no such calibration of this step and these members.
        """
        prediction = self._predict(inputs)
        if not calibrated and conformal is None:
            return prediction
        objective = self.ensemble.objective
        if self.run is None or objective is None:
            raise UserError(
                "This run keeps no calibration: it was made in Python, or its loss is a function. "
                "Fit one with dist_ens.calibrate, and give it to run.ensemble.predict."
            )
        from dist_ens.evaluation.calibration import Predictor  # It imports scipy.optimize, slowly.

        ensemble, state = self.ensemble.at(self._pooled_state())
        calibration = kept_calibration(
            self.folder,
            Predictor.of(ensemble, state),
            objective.distribution,
            calibrated=calibrated,
            level=conformal,
        )
        return calibration.applied(prediction, ensemble, state, inputs)

    def _predict(self, inputs: Inputs) -> Prediction:
        """Returns the prediction before any calibration; see `predict`."""
        given = self.run.spec.standardization if self.run else None
        if given is not None and len(given.target_mean) > 1:
            raise UserError(
                f"This run has {len(given.target_mean)} groups of members, each trained on a split "
                "of its own, so that their predictions are not pooled. Use dist-ens predict."
            )
        if self.run is not None and self.ensemble.objective is not None:
            inputs = convert_inputs(self.run.spec, np.asarray(inputs), "The argument inputs")
        if given is None:
            return self.ensemble.predict(self._pooled_state(), inputs)
        prediction = self.ensemble.predict(self._pooled_state(), given.of_inputs(inputs)[0])
        # A mean may be far larger than its deviation, which float32 would lose.
        prediction = jax.tree.map(lambda leaf: to_host(leaf).astype(np.float64), prediction)
        return prediction.in_unit(given.target_mean[0], given.target_std[0])

    def _pooled_state(self) -> State:
        """Returns the state of the members that a prediction pools, as an evaluation does."""
        frozen = {*frozen_positions(self.state)}
        pooled = [k for k in range(self.ensemble.num_members) if k not in frozen]
        # Members of several groups are not pooled, which `Ensemble.predict` says.
        if not frozen or not pooled or self.ensemble.num_groups > 1:
            return self.state
        return select_members(self.state, pooled)

    def evaluate(
        self,
        data: Data | None = None,
        *,
        metrics: Sequence[Metric] | None = None,
        batch_size: int | None = None,
        intervals: bool = True,
    ) -> Scores:
        """Returns the scores on some data; see `dist_ens.evaluate`.

        Args:
            data: Data with the keys of the training data. Arrays and batches of a table are in the
                units of the table, and a split is standardised as the run's source does it.
                Default: the test split of the run's own data, if it was started from a config.
            metrics: Metrics beside those of the run.
            batch_size: Number of examples in an evaluation batch. Default: that of the run's
                config, or 1000.
            intervals: Whether to compute 95 % bootstrap intervals.

        Raises:
            UserError: If the data does not fit the run.
        """
        own: tuple[Metric, ...] = ()
        if self.run is None:
            if data is None:
                raise UserError(
                    "This run was made in Python, and knows no data. Give evaluate data."
                )
        else:
            data = self._test_split(self.run) if data is None else _examples(self.run.spec, data)
            own = tuple(self.parts.metrics)
            if batch_size is None:
                batch_size = self.run.experiment.evaluation.global_batch_size
        return evaluate(
            self.ensemble,
            self.state,
            data,
            metrics=(*own, *(metrics or ())),
            batch_size=BATCH_SIZE if batch_size is None else batch_size,
            intervals=intervals,
        )

    def _test_split(self, run: Run) -> Examples:
        """Returns the test split of the data on which a run was trained.

        Raises:
            UserError: If the data has changed since the run was trained.
        """
        config = run.experiment.data
        source = open_source(config) if self.config is None else self.config.open_source(config)
        require_trained_on(run, source)
        return Examples(source.test, run.spec)


def load(
    folder: str | pathlib.Path,
    *,
    step: int | None = None,
    members: Sequence[int] | None = None,
    ensemble: Ensemble | None = None,
    config: str | pathlib.Path | None = None,
) -> LoadedRun:
    """Loads a finished run.

    Args:
        folder: Folder of the run.
        step: Step of the checkpoint. Default: the newest, or that of the best evaluation if `fit`
            returned its state.
        members: Ids of the members to load, in the order of the loaded state. Only their bytes are
            read. Default: all.
        ensemble: Ensemble of the run, if it was made in Python. None for a run from a config.
        config: Config file of the run, if it defines a network, a loss or an optimizer. The file
            is run.

    Returns:
        The run, with `predict`, `evaluate`, `ensemble` and `state`.

    Raises:
        UserError: If the folder has no checkpoint, the run needs `ensemble` or `config` and it is
            not given, or a member or step does not exist.
        RunError: If the checkpoint is damaged.

    >>> import jax, optax, tempfile
    >>> from dist_ens import Checkpoints, fit, losses
    >>> network = (
    ...     lambda key: {"w": jax.random.normal(key, (3, 2))},
    ...     lambda params, inputs: inputs @ params["w"],
    ... )
    >>> ensemble = Ensemble(network, optax.sgd(0.1), losses.categorical(2), num_members=4)
    >>> data = {"inputs": np.ones((8, 3)), "labels": np.ones(8, int)}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = fit(
    ...         ensemble, data, steps=3, checkpoints=Checkpoints(folder), progress=False
    ...     )
    ...     run = load(folder, ensemble=ensemble)
    >>> run.step, run.predict(data["inputs"]).mean.shape
    (3, (8, 2))
    """
    place = given_path(folder, "folder")
    return moving_on(step, lambda: _loaded(place, step, members, ensemble, config))


def _loaded(
    folder: pathlib.Path,
    step: int | None,
    members: Sequence[int] | None,
    ensemble: Ensemble | None,
    config: str | pathlib.Path | None,
) -> LoadedRun:
    """Loads a run; see `load`."""
    at, record = read_newest(folder, step)
    if record is None:
        raise UserError(
            f"There is no checkpoint in {quoted(folder)}. Give the folder of a run, which has a "
            "folder checkpoints/."
        )
    if "experiment" in record:
        if ensemble is not None:
            raise UserError(
                f"The run in {quoted(folder)} was started from a config, which describes its "
                "ensemble. Leave ensemble out."
            )
        file, run = _config_file(config), Run.from_dict(record)
        if file is None and run.member_file is not None:
            raise UserError(
                f"The run in {quoted(folder)} has parts ({run.names_of_own_parts}) that its config "
                f"file defines, which is not run unasked. Give the file: load({str(folder)!r}, "
                f"config={run.member_file!r})."
            )
        finished = open_finished(
            folder, file.own_parts if file else None, step=step, member_ids=members
        )
        state = _named(finished.state, finished.run.spec.class_names)
        return LoadedRun(
            finished.ensemble, state, finished.step, finished.run, finished.parts, file, folder
        )
    return _loaded_in_python(folder, at, record, ensemble, members)


def _config_file(path: str | pathlib.Path | None) -> "ConfigFile | None":
    """Returns the config file of a path; None without a path."""
    if path is None:
        return None
    from dist_ens.experiment.config_file import ConfigFile  # It imports ml_collections, slowly.

    return ConfigFile(str(path))


def _examples(spec: Spec, data: Data | None) -> Examples:
    """Returns data as examples in the units of a run's members.

    Args:
        spec: Description of the run's data.
        data: Data to score: a source, a split, arrays or batches.

    Raises:
        UserError: If a source standardises its examples by other numbers than the run's.
    """
    given = spec.standardization
    if isinstance(data, Source | Split):
        found = examples_of(data)
        if found.spec is not None and found.spec.standardization != given:
            raise UserError(
                "The source standardises its inputs and labels by other numbers than the data that "
                "the run was trained on. Give its inputs and labels as arrays, in their own units."
            )
        return Examples(found.split, spec)
    names = spec.class_names or ()
    arrays = with_class_numbers(arrays_of(data), Objective.LABELS, names, "The data")
    if spec.num_groups == 1 and given is None:
        return Examples(TreeSplit(arrays), spec)
    # Every group of members scores all examples.
    of_groups = jax.tree.map(lambda leaf: np.stack([leaf] * spec.num_groups), arrays)
    names = (Objective.INPUTS, Objective.LABELS)
    if given is not None and isinstance(arrays, Mapping) and all(n in arrays for n in names):
        inputs, labels = (np.asarray(arrays[name]) for name in names)
        inputs = given.of_inputs(convert_inputs(spec, inputs, "inputs"))
        of_groups |= dict(zip(names, (inputs, given.of_targets(labels)), strict=True))
    joined = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), of_groups)
    return Examples(TreeSplit(joined), spec)


def _loaded_in_python(
    folder: pathlib.Path,
    step: int,
    record: JsonDict,
    ensemble: Ensemble | None,
    members: Sequence[int] | None,
) -> LoadedRun:
    """Returns a run that was made in Python.

    Args:
        folder: Folder of the run.
        step: Step of the checkpoint to load.
        record: Record of that checkpoint.
        ensemble: Ensemble that was given.
        members: Ids of the members to load. None for all.

    Raises:
        UserError: If no ensemble was given, it is not that of the run, or a member does not exist.
    """
    saved = StepRecord.from_dict(record)
    if ensemble is None:
        parts = f"member {saved.member}, optimizer {saved.optimizer}, loss {saved.loss}"
        made = "Ensemble(...)"
        if not saved.optimizer:
            parts, made = f"its step is {saved.member}", "Ensemble.from_step(...)"
        raise UserError(
            f"The run in {quoted(folder)} was made in Python: {parts}. Give them again: "
            f"load(folder, ensemble={made})."
        )
    batch = saved.batch_shapes()
    different = StepRecord.from_dict(record_of(ensemble, batch).to_dict()).differences(saved)
    if different:
        raise UserError(
            f"The ensemble is not that of the run in {quoted(folder)}: {listed(different)}. Give "
            "the ensemble with which the run was trained."
        )
    checkpoint = CheckpointStore(folder, read_only=True).at(step)
    there = [member.member_id for member in checkpoint.members]
    if members is not None:
        positions_of(members, checkpoint.members)
    has_dropped = {*there} < {*ensemble.ids.tolist()}  # By the policy `drop`, now or before.
    ids = ensemble.ids.tolist() if members is None and not has_dropped else list(members or there)
    if ids != ensemble.ids.tolist():
        ensemble = ensemble.with_members(ids)
    structures = saved_structures(ensemble.abstract_state(batch))
    state = checkpoint.state(*structures, member_ids=ids)
    state = _named(ensemble.with_record(state), saved.class_names)
    return LoadedRun(ensemble, state, step, folder=folder)


def _named(state: State, names: Sequence[str] | None) -> State:
    """Returns a state with the names of the classes, if they have any."""
    return state._replace(class_names=ClassNames(names)) if names else state
