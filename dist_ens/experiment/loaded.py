"""`load`: a finished run, from the command line or from Python."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dist_ens.checkpoint import CheckpointStore, StepRecord, read_newest
from dist_ens.commands import quoted
from dist_ens.config.own_parts import OwnParts
from dist_ens.data import Spec, open_source
from dist_ens.ensemble import Ensemble
from dist_ens.errors import UserError
from dist_ens.evaluation import Scores, evaluate
from dist_ens.experiment.build import NOTHING, evaluator_of_run
from dist_ens.experiment.record import Run
from dist_ens.experiment.workdir import open_finished
from dist_ens.layout import MEMBERS, to_host
from dist_ens.losses import Prediction
from dist_ens.paths import given_path
from dist_ens.state import State, select_members


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run that was loaded from its folder.

    Attributes:
        ensemble: Ensemble of the run.
        state: State of the ensemble.
        step: Number of updates that the state has seen.
        run: Record of a run that was started from a config; None for one made in Python.
        parts: Parts that were given.
    """

    ensemble: Ensemble
    state: State
    step: int
    run: Run | None = None
    parts: OwnParts = NOTHING

    def predict(self, inputs: Any) -> Prediction:
        """Returns the prediction for inputs as the run's data has them; see `Ensemble.predict`.

        Inputs and targets of a table are in their own units.
        """
        given = self.run.spec.standardization if self.run else None
        if given is None:
            return self.ensemble.predict(self.state, inputs)
        if len(given.target_mean) > 1:
            raise UserError(
                f"This run has {len(given.target_mean)} groups of members, each trained on a split "
                "of its own, so that their predictions are not pooled. Use dist-ens predict."
            )
        standard = given.of_inputs(np.asarray(inputs, np.float64))[0]
        prediction = self.ensemble.predict(self.state, standard)
        return prediction.in_unit(given.target_mean[0], given.target_std[0])

    def evaluate(self, data: Any = None, **options: Any) -> Scores:
        """Returns the scores on some data; see `dist_ens.evaluate`.

        Args:
            data: Data with the keys of the training data. Default: the test split of the run's
                own data, if it was started from a config.
            **options: Options of `dist_ens.evaluate`.
        """
        if data is None:
            if self.run is None:
                raise UserError(
                    "This run was made in Python, and knows no data. Give evaluate data."
                )
            source = open_source(self.run.experiment.data)
            if self.ensemble.objective is not None and not options:
                evaluator = evaluator_of_run(self.run, self.ensemble, parts=self.parts)
                return evaluator.evaluate(self.state, source.test).scores(intervals=True)
            data = source
        return evaluate(self.ensemble, self.state, data, **options)


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
        step: Step of the checkpoint. Default: the newest.
        members: Ids of the members to load. Default: all.
        ensemble: Ensemble of the run, if it was made in Python.
        config: Config file of the run, if it defines a network, a loss or an optimizer. The file
            is run.

    Returns:
        The run, with `predict`, `evaluate`, `ensemble` and `state`.

    Raises:
        UserError: If the folder has no checkpoint, the run needs `ensemble` or `config` and it is
            not given, or a member or step does not exist.

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
    folder = given_path(folder, "folder")
    newest, record = read_newest(folder)
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
        finished = open_finished(folder, _parts_from(config), step=step)
        loaded = LoadedRun(
            finished.ensemble, finished.state, finished.step, finished.run, finished.parts
        )
    else:
        loaded = _loaded_in_python(folder, newest if step is None else step, record, ensemble)
    return loaded if members is None else _with_members(loaded, members)


def _parts_from(config: str | pathlib.Path | None) -> Callable[[Spec], OwnParts] | None:
    """Returns the function that makes the parts that a config file defines."""
    if config is None:
        return None
    from dist_ens.experiment.config_file import ConfigFile

    return ConfigFile(str(config)).own_parts


def _loaded_in_python(
    folder: pathlib.Path, step: int, record: dict[str, Any], ensemble: Ensemble | None
) -> LoadedRun:
    saved = StepRecord.from_dict(record)
    if ensemble is None:
        raise UserError(
            f"The run in {quoted(folder)} was made in Python: member {saved.member}, optimizer "
            f"{saved.optimizer}, loss {saved.loss}. Give them again: load(folder, "
            "ensemble=Ensemble(...))."
        )
    if ensemble.num_members != saved.num_members:
        raise UserError(
            f"The run in {quoted(folder)} has {saved.num_members} members, and the ensemble "
            f"{ensemble.num_members}. Give an ensemble with num_members={saved.num_members}."
        )
    abstract = ensemble.abstract_state(saved.batch_shapes())
    state = CheckpointStore(folder, read_only=True).restore_state(step, abstract)
    return LoadedRun(ensemble, state, step)


def _with_members(loaded: LoadedRun, members: Sequence[int]) -> LoadedRun:
    """Returns a run with some of its members, in the order in which they are asked for."""
    ids = to_host(loaded.state.member_id).tolist()
    missing = [member for member in members if member not in ids]
    if missing or not members:
        raise UserError(
            f"The run has the members {ids}, and members={list(members)} were asked for. Leave out "
            f"{missing}."
            if missing
            else "members is empty. Give at least one id."
        )
    positions = [ids.index(member) for member in members]
    ensemble = loaded.ensemble.with_members([ids[position] for position in positions])
    state = ensemble.layout.moved(select_members(loaded.state, positions), MEMBERS)
    return dataclasses.replace(loaded, ensemble=ensemble, state=state)
