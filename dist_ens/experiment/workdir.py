"""The checkpoints in the folder of a run that was started from a config."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

from dist_ens import cluster
from dist_ens.checkpoint import (
    CheckpointStore,
    Lineage,
    ids_text,
    moving_on,
    positions_of,
    read_newest,
    require_config_record,
)
from dist_ens.commands import option, quoted
from dist_ens.data import Spec
from dist_ens.ensemble import Ensemble
from dist_ens.errors import UserError
from dist_ens.experiment.build import NOTHING, build_ensemble, check_network
from dist_ens.experiment.own_parts import OwnParts
from dist_ens.experiment.record import Run
from dist_ens.layout import Layout
from dist_ens.paths import given_path
from dist_ens.state import State


class Finished(NamedTuple):
    """A checkpoint of a run, on the devices of this process.

    Attributes:
        run: Record of the run.
        ensemble: Ensemble of the run.
        state: State of the ensemble.
        step: Number of updates that the state has seen.
        parts: Parts of the run that its experiment does not name.
        members: Lineage of each member.
    """

    run: Run
    ensemble: Ensemble
    state: State
    step: int
    parts: OwnParts
    members: tuple[Lineage, ...] = ()

    def require_own_members(self) -> None:
        """Checks that the seed of the run and their ids determine what the members have seen.

        Raises:
            UserError: If a member was trained in another run, with another seed or id, or was
                imported.
        """
        seed = self.run.experiment.seed
        others = [member.member_id for member in self.members if member.is_of_other_run(seed)]
        if others:
            raise UserError(
                f"The members {ids_text(others)} were trained in other runs, so that the examples "
                "that they left out are not known. Ask this of the run that trained them."
            )


def saved_run(workdir: pathlib.Path, step: int | None = None) -> tuple[int, Run] | None:
    """Returns the step and the run of a checkpoint in a folder; None if there is no checkpoint.

    Args:
        workdir: Folder of the run.
        step: Step of the checkpoint. Default: the newest.

    Raises:
        UserError: If the checkpoint is of a run that was made in Python, or none of that step is
            saved.
        RunError: If its record cannot be read.
    """
    found, record = read_newest(workdir, step)
    if record is None:
        return None
    require_config_record(record, workdir)
    return found, Run.from_dict(record)


def open_finished(
    workdir: str | pathlib.Path,
    own_parts: Callable[[Spec], OwnParts] | None = None,
    *,
    dropout_samples: int | None = None,
    step: int | None = None,
    member_ids: Sequence[int] | None = None,
) -> Finished:
    """Opens a checkpoint of a run that was started from a config.

    Args:
        workdir: Folder of the run.
        own_parts: Function that makes the parts of the run that its experiment does not name.
        dropout_samples: Number of samples in place of the experiment's
            `evaluation.dropout_samples`; 0 for none.
        step: Step of the checkpoint. Default: the newest.
        member_ids: Ids of the members to read, in the order of the state. Only their bytes are
            read. Default: all members.

    Returns:
        The run, its ensemble, and its state on a layout for these devices.

    Raises:
        UserError: If there is no checkpoint, none of that step, or a member is not in it. Also if a
            part is needed and not given, or given and not needed.
        RunError: If the checkpoint is damaged.
    """
    folder = given_path(workdir, "workdir")
    return moving_on(step, lambda: _opened(folder, own_parts, dropout_samples, step, member_ids))


def _opened(
    workdir: pathlib.Path,
    own_parts: Callable[[Spec], OwnParts] | None,
    dropout_samples: int | None,
    step: int | None,
    member_ids: Sequence[int] | None,
) -> Finished:
    """Opens a checkpoint; see `open_finished`."""
    saved = saved_run(workdir, step)
    if saved is None:
        raise UserError(
            f"There is no checkpoint in {quoted(workdir)}. Train first, or correct --workdir."
        )
    at, run = saved
    checkpoint = CheckpointStore(workdir, read_only=True).at(at)
    members = checkpoint.members
    if member_ids is not None:
        members = tuple(members[position] for position in positions_of(member_ids, members))
    drops = run.experiment.failures.policy == "drop"
    if member_ids is None and drops and len(members) < run.num_members:
        member_ids = [member.member_id for member in members]
    if member_ids is not None:
        run = run.with_members(member_ids)
    if dropout_samples is not None:
        evaluation = dataclasses.replace(
            run.experiment.evaluation, dropout_samples=dropout_samples or None
        )
        experiment = dataclasses.replace(run.experiment, evaluation=evaluation)
        run = dataclasses.replace(run, experiment=experiment)
    parts = parts_of(run, workdir, own_parts)
    count = run.num_members if member_ids is None else len(member_ids)
    layout = Layout.make(count, devices=cluster.devices_for(count))
    ensemble = build_ensemble(run, layout, parts)
    batch = run.batch(run.experiment.data.global_batch_size)
    if parts is not NOTHING and parts.has_objective:
        check_network(run, ensemble, parts, batch)
    state = checkpoint.state(ensemble.abstract_state(batch), member_ids=member_ids)
    return Finished(run, ensemble, state, at, parts, members)


def parts_of(
    run: Run, workdir: pathlib.Path, own_parts: Callable[[Spec], OwnParts] | None
) -> OwnParts:
    """Returns the given parts of a run.

    Args:
        run: Record of the run.
        workdir: Folder of the run, for messages.
        own_parts: Function of the data's description that returns the parts; None for no parts.

    Raises:
        UserError: If parts are needed and not given, or given and not needed.
    """
    parts = own_parts(run.spec) if own_parts else NOTHING
    is_given = parts.member is not None or bool(parts.names)
    if run.has_own_parts and not is_given:
        named = run.names_of_own_parts
        if run.member_file is None:
            raise UserError(
                f"The parts of the run in {quoted(workdir)} ({named}) were given in Python, and "
                "none are given here. Give them again: open_finished(workdir, lambda spec: "
                "OwnParts(member=...))."
            )
        raise UserError(
            f"The run in {quoted(workdir)} has parts ({named}) that its config file defines, which "
            f"is not run unasked. Add {option('config', run.member_file)}."
        )
    is_known = run.examples is not None  # An older version did not record the network.
    if is_known and not run.has_own_parts and is_given:
        given = parts.member.name if parts.member is not None else ", ".join(parts.names.values())
        raise UserError(
            f"The network of the run in {quoted(workdir)} is {run.experiment.model.name!r}, by "
            f"model.name, and other parts are given: {given}. Leave out the config file, or the "
            "parts."
        )
    return parts if is_given or parts.metrics else NOTHING
