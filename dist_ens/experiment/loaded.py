"""Loading of a finished run, from a config or made in Python."""

import dataclasses
import pathlib
from collections.abc import Sequence

from dist_ens.checkpoint import (
    StepRecord,
    listed,
    moving_on,
    positions_of,
    saved_step,
)
from dist_ens.data import Spec
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.stopping import finished, saved_structures
from dist_ens.experiment.build import (
    build_ensemble,
    layout_elsewhere,
    layout_for,
    record_of_run,
)
from dist_ens.experiment.chosen import KeptChoice, kept_choice
from dist_ens.experiment.config_file import NO_FILE, NOTHING, ConfigFile, OwnParts
from dist_ens.experiment.loaded_run import LoadedRun
from dist_ens.experiment.record import Run
from dist_ens.ground.commands import option, quoted
from dist_ens.ground.errors import UserError
from dist_ens.ground.state import ClassNames
from dist_ens.losses import Objective
from dist_ens.storage import Folder, place_of
from dist_ens.training.run_record import batch_shapes_in, record_of


def load(
    folder: Folder,
    *,
    step: int | None = None,
    members: Sequence[int] | None = None,
    ensemble: Ensemble | None = None,
    config: str | pathlib.Path | None = None,
) -> LoadedRun:
    """Loads a finished run.

    Args:
        folder: Path or address of the run's folder, such as `s3://my-bucket/runs/a`.
        step: Step of the checkpoint. Default: the newest, or that of the best evaluation if `fit`
            returned its state.
        members: Ids of the members to load, in the order of the loaded state. Only their bytes are
            read, and they count equally. Default: all, of which those that `dist-ens members RUN
            choose` chose predict.
        ensemble: Ensemble of the run, if it was made in Python. None for a run from a config.
        config: Config file of the run, if it defines a network, a loss or an optimizer. The file
            is run.

    Returns:
        The run, with `predict`, `evaluate`, `ensemble` and `state`.

    Raises:
        UserError: If the folder has no checkpoint, the run needs `ensemble` or `config` and it is
            not given, or a member or step does not exist.
        RunError: If the checkpoint is damaged.

    >>> import jax, numpy as np, optax, tempfile
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
    file = ConfigFile(None if config is None else str(config))
    return open_finished(folder, step=step, member_ids=members, ensemble=ensemble, config=file)


def open_finished(
    workdir: Folder,
    *,
    step: int | None = None,
    member_ids: Sequence[int] | None = None,
    ensemble: Ensemble | None = None,
    config: ConfigFile | None = None,
    dropout_samples: int | None = None,
) -> LoadedRun:
    """Loads a run as `load` does; `dropout_samples` replaces those of the run, 0 for none."""
    folder = str(place_of(workdir, "folder"))
    file = config or NO_FILE

    def loaded() -> LoadedRun:
        checkpoint = saved_step(folder, step)
        record = StepRecord.from_dict(checkpoint.run)
        members, ids = checkpoint.members, member_ids
        if ids is not None:
            members = tuple(members[position] for position in positions_of(ids, members))
        run, parts = None, NOTHING
        if not record.config:
            own = _given_ensemble(folder, record, ensemble, ids)
        else:
            run = Run.from_dict(checkpoint.run)
            run = run if ids is None else run.with_members(ids)
            parts = parts_of(run, folder, file)
            run, own = described_ensemble(run, parts, folder, dropout_samples)
        batch = batch_shapes_in(record)
        structures = saved_structures(own.abstract_state(batch))
        state = finished(own.with_record(checkpoint.state(*structures, member_ids=ids)))
        if record.class_names:
            state = state._replace(class_names=ClassNames(record.class_names))
        choice = KeptChoice()
        if member_ids is None:
            choice = kept_choice(place_of(workdir, "folder"), checkpoint.step)
        inputs = batch.get(Objective.INPUTS) if isinstance(batch, dict) else None
        spec = run.spec if run else None
        if record.table_spec is not None:
            spec = Spec.from_dict(record.table_spec)
        return LoadedRun(
            run, own, state, checkpoint.step, parts, members, file, folder, choice, inputs, spec
        )

    return moving_on(step, loaded)


def described_ensemble(
    run: Run, parts: OwnParts, folder: str, dropout_samples: int | None
) -> tuple[Run, Ensemble]:
    """Returns a run with its samples with dropout, and its ensemble on these devices."""
    layout = layout_for(run.num_members, layout_elsewhere(run.experiment.layout))
    if dropout_samples is not None:
        experiment = run.experiment
        evaluation = dataclasses.replace(
            experiment.evaluation, dropout_samples=dropout_samples or None
        )
        run = dataclasses.replace(
            run, experiment=dataclasses.replace(experiment, evaluation=evaluation)
        )
    ensemble = build_ensemble(run, layout, parts)
    if dropout_samples is None and run.record and parts.names:
        different = record_of_run(run, ensemble, parts).differences(run.record)
        if different:
            raise UserError(
                f"The parts that were given are not those of the run in {quoted(folder)}: "
                f"{listed(different)}. Give those that it was trained with."
            )
    return run, ensemble


def _given_ensemble(
    folder: str,
    record: StepRecord,
    ensemble: Ensemble | None,
    member_ids: Sequence[int] | None,
) -> Ensemble:
    """Returns the ensemble of a run that was made in Python, with some of its members."""
    parts = f"member {record.member}, optimizer {record.optimizer}, loss {record.loss}"
    if not record.optimizer:
        parts = f"its step is {record.member}"
    if ensemble is None:
        raise UserError(
            f"The run in {quoted(folder)} was made in Python: {parts}. Give them again, as "
            "load(folder, ensemble=...)."
        )
    here = StepRecord.from_dict(record_of(ensemble, batch_shapes_in(record)).to_dict())
    different = here.differences(record)
    if different:
        raise UserError(
            f"The ensemble is not that of the run in {quoted(folder)}: {listed(different)}."
        )
    if member_ids is None or list(member_ids) == ensemble.ids.tolist():
        return ensemble
    return ensemble.with_members(member_ids)


def parts_of(run: Run, workdir: Folder, config: ConfigFile) -> OwnParts:
    """Returns the parts of a run that its experiment does not name, made by its config file."""
    parts = config.own_parts(run.spec)
    if not run.has_own_parts or parts.names or (parts.metrics and not run.parts):
        return parts
    way_out = "in Python. Give a config file that makes them"
    if run.member_file is not None:
        way_out = (
            "by a config file, which is not run unasked. Add "
            f"{option('config', run.member_file)}, in Python "
            f"load({str(workdir)!r}, config={run.member_file!r})"
        )
    names = ", ".join(run.parts.values())
    raise UserError(f"The parts of the run in {quoted(workdir)} ({names}) were given {way_out}.")
