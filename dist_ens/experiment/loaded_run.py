"""A finished run on the devices of this process: it predicts, is scored, and keeps answers."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from dist_ens.checkpoint import Lineage, ids_text, state_digest
from dist_ens.data import Source, Spec, Split, TreeSplit, convert_inputs
from dist_ens.data.class_names import class_numbers, with_class_numbers
from dist_ens.data.frames import read_table
from dist_ens.ensemble import Ensemble
from dist_ens.evaluation import Evaluator, Scores, evaluate
from dist_ens.evaluation.examples import Examples, arrays_of, examples_of
from dist_ens.evaluation.scoring import positions_left_out, without_failed
from dist_ens.experiment.chosen import KeptChoice
from dist_ens.experiment.config_file import NO_FILE, NOTHING, ConfigFile, OwnParts
from dist_ens.experiment.exported import PLATFORMS, Exported, exported
from dist_ens.experiment.record import Run
from dist_ens.ground.commands import command_line, quoted
from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import Json, JsonDict
from dist_ens.ground.state import State, select_members
from dist_ens.ground.types import Data, Inputs, Shapes
from dist_ens.layout import to_host
from dist_ens.losses import Distribution, Objective, Prediction
from dist_ens.metrics import Metric
from dist_ens.processes import cluster
from dist_ens.report import keep_answers, read_answers
from dist_ens.report.files import read_metrics, to_json
from dist_ens.storage import Place, file_at, place_of

if TYPE_CHECKING:
    from dist_ens.evaluation.calibration import Calibration, Predictor

# Flags that fit what a run keeps, each with the name of the latter.
_KINDS = {"calibration": "calibration", "conformal": "conformal rule"}


class LoadedRun(NamedTuple):
    """A run that was loaded from its folder, on the devices of this process.

    Attributes:
        run: Record of a run that was started from a config; None for one made in Python.
        ensemble: Ensemble of the run.
        state: State of the ensemble.
        step: Number of updates that the state has seen.
        parts: Parts of the run that its experiment does not name.
        members: Lineage of each member.
        config: Config file of the run.
        folder: Folder of the run.
        choice: Choice of members with which the run predicts, which `dist-ens members RUN choose`
            makes. Without one, all members count equally.
        inputs: Shapes and types of the inputs of a training batch; None if they are not known.
        spec: Description of the data of a run from a config, or on a table; None of others.
    """

    run: Run | None
    ensemble: Ensemble
    state: State
    step: int
    parts: OwnParts = NOTHING
    members: tuple[Lineage, ...] = ()
    config: ConfigFile = NO_FILE
    folder: str = "."
    choice: KeptChoice = KeptChoice()
    inputs: Shapes = None
    spec: Spec | None = None

    @property
    def history(self) -> list[JsonDict]:
        """Records of the metrics in the folder, each with its `step`; empty if there are none."""
        return read_metrics(place_of(self.folder, "folder"))

    @property
    def config_run(self) -> Run:
        """Record of a run that was started from a config."""
        if self.run is None:
            raise UserError(f"The run in {quoted(self.folder)} was made in Python. Give data.")
        return self.run

    def require_own_members(self) -> None:
        """Raises a `UserError` if a member was trained in another run, or imported."""
        seed = self.config_run.experiment.seed
        others = [member.member_id for member in self.members if member.is_of_other_run(seed)]
        if others:
            raise UserError(f"Members {ids_text(others)} were trained in other runs, not in this.")

    def predict(
        self, inputs: Inputs, *, calibrated: bool = False, conformal: float | None = None
    ) -> Prediction:
        """Returns the prediction of the ensemble; see `Ensemble.predict`.

        Inputs and targets of a table are in the units of the table, and not standardised, and the
        prediction is in float64 on the host. Frozen members are left out, unless all are frozen.
        If `dist-ens members RUN choose` has chosen members of this step, only they are pooled, with
        their weights, unless `load` was given `members`.

        Args:
            inputs: Inputs of the examples, in the form of the run's data. For a run on a table: the
                path of a CSV or Parquet file, a frame, or a dict of columns.
            calibrated: Whether to apply the calibration that the run keeps, which `dist-ens
                evaluate --calibration=METHOD` fits.
            conformal: Coverage of `sets` or `interval`, in (0, 1). They need the rule that the run
                keeps, which `dist-ens evaluate --conformal=METHOD` fits. Default: neither.

        Raises:
            UserError: If the inputs do not fit the run, or its members belong to several groups.
                Also if the run keeps no such calibration of this step and these members.
        """
        table = None if self.spec is None else self.spec.table
        if table is not None:
            inputs = read_table(inputs, table.texts)
        prediction = self._predict(inputs)
        calibration = self._kept_calibration(calibrated=calibrated, level=conformal)
        if calibration is None:
            return prediction
        if table is not None:
            inputs = table.numbers(inputs).astype(np.float32)
        ensemble, state = self.ensemble.at(self._pooled_state())
        return calibration.applied(prediction, ensemble, state, inputs, self._pooled_weights())

    def export(
        self,
        path: str | os.PathLike[str],
        platforms: Sequence[str] = PLATFORMS,
        *,
        members: bool = False,
        calibrated: bool = False,
        conformal: float | None = None,
        inputs: Inputs | None = None,
    ) -> Exported:
        """Writes the prediction of the ensemble as one file, which `jax` alone reads and runs.

        The file holds what `predict` does, from inputs to uncertainty, in float32 and for any batch
        size: `jax.export.deserialize(bytearray(content)).call(inputs)` returns a dict with the
        fields of `Prediction` that are not None. The file `PATH.json` beside it describes inputs,
        outputs and members. Of a run on a table, the inputs are the numbers of its columns, which
        `TableRule.numbers` returns; they are encoded inside.

        Args:
            path: Path or address of the file.
            platforms: Platforms of JAX on which the file will run, of "cpu", "cuda", "rocm", "tpu".
            members: Whether the outputs include `members` and `member_variance`.
            calibrated: Whether to calibrate; see `predict`.
            conformal: Coverage of `sets` or `interval`, in (0, 1); see `predict`. Default: neither.
            inputs: Inputs, or their shapes and types, leaves [batch, ...]. Default: those of the
                training data.

        Returns:
            The bytes that were written, `content`, and their `description`.

        Raises:
            UserError: If the ensemble cannot be exported, or the run keeps no such calibration.
        """
        shapes = self.inputs if inputs is None else inputs
        if self.spec is not None and self.spec.table is not None:
            columns = len(self.spec.table.columns)
            shapes = jax.ShapeDtypeStruct((1, columns), np.float32)
        if shapes is None:
            raise UserError("The inputs of this run are not known. Give inputs=, such as an array.")
        found = exported(
            self.ensemble,
            self._pooled_state(),
            shapes,
            platforms=platforms,
            weights=self._pooled_weights(),
            calibration=self._kept_calibration(calibrated=calibrated, level=conformal),
            members=members,
            spec=self.spec,
        )
        if cluster.is_main():
            place, name = file_at(path, "path")
            place.write(name, found.content)
            place.write(f"{name}.json", to_json(found.description, indent=2).encode())
        return found

    def _kept_calibration(self, *, calibrated: bool, level: float | None) -> "Calibration | None":
        """Returns the calibration that the run keeps for the members that predict; as `predict`."""
        if not calibrated and level is None:
            return None
        objective = self.ensemble.objective
        if self.run is None or objective is None:
            raise UserError("This run keeps no calibration. Fit one with dist_ens.calibrate.")
        from dist_ens.evaluation.calibration import Predictor  # It imports scipy.optimize, slowly.

        ensemble, state = self.ensemble.at(self._pooled_state())
        return kept_calibration(
            place_of(self.folder, "folder"),
            Predictor.of(ensemble, state, weights=self._pooled_weights()),
            objective.distribution,
            calibrated=calibrated,
            level=level,
        )

    def _predict(self, inputs: Inputs) -> Prediction:
        """Returns the prediction before any calibration; as `predict`."""
        given = self.spec.standardization if self.spec else None
        if given is not None and len(given.target_mean) > 1:
            raise UserError("Predictions of several groups are not pooled. Use dist-ens predict.")
        if self.spec is not None and (self.spec.table or self.ensemble.objective is not None):
            inputs = convert_inputs(self.spec, inputs, "The argument inputs")
        state, weights = self._pooled_state(), self._pooled_weights()
        if given is None:
            return self.ensemble.predict(state, inputs, weights=weights)
        inputs = given.of_inputs(inputs)[0]
        prediction = self.ensemble.predict(state, inputs, weights=weights)
        # A mean may be far larger than its deviation, which float32 would lose.
        prediction = jax.tree.map(lambda leaf: to_host(leaf).astype(np.float64), prediction)
        return prediction.in_unit(np.array(given.target_mean[0]), np.array(given.target_std[0]))

    def _chosen_weights(self) -> np.ndarray | None:
        """Returns the weights of all predictors by the choice; None without one."""
        return self.choice.weights_of(self.ensemble.predictor_ids(self.state))

    def _pooled_positions(self) -> list[int]:
        """Returns the positions of the members that a prediction pools, as an evaluation does."""
        weights = self._chosen_weights()
        if weights is not None:
            return np.unique(np.flatnonzero(weights) // (self.ensemble.heads or 1)).tolist()
        left_out = positions_left_out(self.ensemble, self.state)
        return np.delete(np.arange(self.ensemble.num_members), left_out).tolist()

    def _pooled_state(self) -> State:
        positions = self._pooled_positions()
        is_whole = len(positions) == self.ensemble.num_members
        return self.state if is_whole else select_members(self.state, positions)

    def _pooled_weights(self) -> np.ndarray | None:
        """Returns the weights of the predictors of `_pooled_state`; None if they are equal."""
        weights = self._chosen_weights()
        pooled = self.ensemble.predictors_of(self._pooled_positions())
        return None if weights is None else weights[pooled]

    def evaluate(
        self,
        data: Data | None = None,
        *,
        metrics: Sequence[Metric | str] | None = None,
        batch_size: int | None = None,
        intervals: bool = True,
    ) -> Scores:
        """Returns the scores on some data; see `dist_ens.evaluate`, and `predict` for the pool.

        Args:
            data: Data with the keys of the training data; for a run on a table, another table in
                its units, or a source of the same rule. A split is standardised as the run's source
                does it. Default: the test split of the run's own data, if it was started from a
                config.
            metrics: Metrics beside those of the run, or names; see `dist_ens.evaluate`.
            batch_size: Number of examples in an evaluation batch. Default: that of the run's
                config, or that of `dist_ens.evaluate`.
            intervals: Whether to compute 95 % bootstrap intervals.

        Raises:
            UserError: If the data does not fit the run.
        """
        if data is None:
            source = self.open_source()
            data = Examples(source.test, source.spec)
        elif self.spec is not None:
            data = _examples(self.spec, data)
        asked = self.run.experiment.evaluation if self.run else None
        of_config = () if asked is None else asked.metrics
        if batch_size is None and asked is not None:
            batch_size = asked.global_batch_size
        return evaluate(
            self.ensemble,
            self.state,
            data,
            metrics=(*of_config, *self.parts.metrics, *(metrics or ())),
            batch_size=batch_size,
            intervals=intervals,
            weights=self._chosen_weights(),
        )

    def evaluator(self, pooling: str | None = None) -> Evaluator:
        """Returns the evaluator of a run from a config, of the members that predict."""
        evaluator = self.config_run.evaluator(self.ensemble, pooling, self.parts.metrics)
        weights = self._chosen_weights()
        if weights is not None:
            evaluator = evaluator.pooling(np.flatnonzero(weights == 0).tolist(), weights)
        return without_failed(evaluator, self.state)

    def open_source(self) -> Source:
        """Returns the data on which a run from a config was trained."""
        run = self.config_run
        source = self.config.open_source(run.experiment.data)
        run.require_trained_on(source)
        return source


def _examples(spec: Spec, data: Data) -> Examples:
    """Returns data as examples in the units of a run's members."""
    given = spec.standardization
    if isinstance(data, Source | Split):
        found = examples_of(data)
        has_rule = found.spec is not None and found.spec.table is not None
        if found.spec is not None and (
            found.spec.standardization != given or (has_rule and found.spec.table != spec.table)
        ):
            raise UserError("The source standardises its inputs and labels by other numbers.")
        return Examples(found.split, spec)
    if spec.table is not None:
        data = read_table(data, spec.table.texts)
        labels = spec.table.labels(data)
        if spec.num_classes is not None:
            names = spec.class_names or tuple(map(str, range(spec.num_classes)))
            labels = class_numbers(labels, names, f"The target {spec.table.target!r}")
        inputs = convert_inputs(spec, data, "The table")
        data = {Objective.INPUTS: inputs, Objective.LABELS: labels}
    arrays = with_class_numbers(
        arrays_of(data), Objective.LABELS, spec.class_names or (), "The data"
    )
    if spec.num_groups == 1 and given is None:
        return Examples(TreeSplit(arrays), spec)
    # Every group of members scores all examples.
    of_groups = jax.tree.map(lambda leaf: np.stack([leaf] * spec.num_groups), arrays)
    names = (Objective.INPUTS, Objective.LABELS)
    if given is not None and isinstance(arrays, Mapping) and all(n in arrays for n in names):
        inputs, labels = (np.asarray(arrays[name]) for name in names)
        if spec.table is None:  # The rule of a table has converted them.
            inputs = convert_inputs(spec, inputs, "inputs")
        inputs = given.of_inputs(inputs)
        of_groups |= dict(zip(names, (inputs, given.of_targets(labels)), strict=True))
    joined = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), of_groups)
    return Examples(TreeSplit(joined), spec)


def keep(workdir: Place, step: int, answers: Mapping[str, Json], *, is_newest: bool = True) -> None:
    """Adds answers to those that a run keeps; see `report.keep_answers`."""
    keep_answers(workdir, step, state_digest(workdir, step), answers, is_newest=is_newest)


def kept_calibration(
    workdir: Place,
    predictor: "Predictor",
    distribution: Distribution,
    *,
    calibrated: bool,
    level: float | None,
) -> "Calibration":
    """Returns the newest calibration that a run keeps for the step that predicts."""
    from dist_ens.evaluation.calibration import Calibration  # It imports scipy.optimize, slowly.

    step = predictor.step
    entry = read_answers(workdir).get(str(step), {"state": None, "answers": {}})
    answers = entry["answers"] if entry["state"] == state_digest(workdir, step) else {}

    def newest(kind: str, methods: Sequence[str]) -> Calibration:
        found = [answer for question, answer in answers.items() if question.startswith(f"{kind}=")]
        if not found:
            method = next(iter(methods), "METHOD")
            evaluate = command_line("dist-ens", "evaluate", workdir=workdir, **{kind: method})
            raise UserError(
                f"The run in {quoted(workdir)} has no {_KINDS[kind]} of step {step:,}, whose "
                f"members predict here. Fit one first: {evaluate}."
            )
        calibration = Calibration.from_dict(found[-1]["calibration"])
        calibration.require_of(predictor)
        return calibration

    calibration = Calibration(predictor=predictor)
    if calibrated:
        calibration = newest("calibration", distribution.calibrations)
    if level is not None:
        rule = newest("conformal", distribution.conformal).conformal
        calibration = dataclasses.replace(calibration, conformal=rule, level=level)
    return calibration
