"""Rows of a run that do not wait for each other: each trains its members in a folder of its own.

The processes of a row are a world of their own for JAX, so a row that is killed is started again
alone. When all rows are done, their members are put together as one run.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from dist_ens.checkpoint import SavedMembers, read_members, saved_steps, write_members
from dist_ens.checkpoint.run_digests import write_run_file
from dist_ens.ensemble.failures import FAILED_UPDATES, IS_FROZEN
from dist_ens.experiment.record import Run
from dist_ens.experiment.schema import Experiment
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import RunError, UserError, counted
from dist_ens.ground.json_text import JsonDict
from dist_ens.report.files import METRICS, read_metrics, read_run, to_json
from dist_ens.storage import Folder, Place, place_of
from dist_ens.training.saving import EVALUATION_IS_OWED

_FOLDER = "rows"


@dataclasses.dataclass(frozen=True)
class Joined:
    """A run that was put together from rows: its step, and what its summary says of the rows."""

    step: int
    summary: JsonDict


def experiment_of_row(
    experiment: Experiment, member_ids: Sequence[int], row: int, num_rows: int
) -> Experiment:
    """Returns the experiment of one row's members.

    Raises:
        UserError: If the rows do not divide the members or the ensemble axis.
    """
    count, axis = len(member_ids), experiment.layout.ensemble_axis
    if count % num_rows or (axis or num_rows) % num_rows or not 0 <= row < num_rows:
        raise UserError(
            f"Row {row} of {num_rows} rows cannot have its share of {counted(count, 'member')}"
            f"{f' and of an ensemble axis of {axis}' if axis else ''}. Use a number of rows that "
            "divides them, and rows from 0 on."
        )
    per_row = count // num_rows
    layout = dataclasses.replace(experiment.layout, ensemble_axis=axis and axis // num_rows)
    of_row = experiment.with_members(member_ids[row * per_row : (row + 1) * per_row])
    return dataclasses.replace(of_row, layout=layout)


def folder_of_row(workdir: Folder, row: int, num_rows: int) -> Place:
    """Returns the folder in which a row trains. Other numbers of rows have other folders."""
    return place_of(workdir, "workdir") / _FOLDER / f"{row}_of_{num_rows}"


def join_rows(run: Run, workdir: Place, num_rows: int) -> Joined | None:
    """Writes the newest members of all rows as a checkpoint of the whole run.

    Its history is that of all members, without the scores of the ensemble, which no row knew. None
    is returned, and nothing is written, if the run has a checkpoint already.

    Raises:
        UserError: If a row has no checkpoint or is of another run, or there are several processes.
        RunError: If a row has not ended.
    """
    if jax.process_count() > 1:
        raise UserError("Rows are joined by one process. Start --rows without --row in one.")
    if saved_steps(workdir):
        return None
    folders = [folder_of_row(workdir, row, num_rows) for row in range(num_rows)]
    ids = run.experiment.member_ids or range(run.num_members)
    of_rows = [_read_row(run, ids, row, folder, num_rows) for row, folder in enumerate(folders)]
    members = of_rows[0].joined(*of_rows[1:])
    # Members of a row that a callback has ended have taken fewer updates than their step says, as
    # those that have stopped in a run.
    step = max(of_row.step for of_row in of_rows)
    leaves = {**members.leaves, "step": np.full_like(members.leaves["step"], step)}
    record = run.to_dict() | {"execution": of_rows[0].record["execution"]}
    members = dataclasses.replace(
        members, step=step, leaves=leaves, record=record, host_files=EVALUATION_IS_OWED
    )
    write_members(workdir, members, before=lambda: _join_metrics(workdir, folders))
    return Joined(step, _joined_summary(folders))


def _read_row(
    run: Run, member_ids: Sequence[int], row: int, folder: Place, num_rows: int
) -> SavedMembers:
    """Reads the members of a row that has ended, if it is one of this run."""
    remedy = f"Train it with --rows={num_rows} --row={row}, and then join the rows."
    if not saved_steps(folder):
        raise UserError(f"Row {row} has no checkpoint in {quoted(folder)}. {remedy}")
    of_row = read_members(folder)
    experiment = experiment_of_row(run.experiment, member_ids, row, num_rows)
    dataclasses.replace(run, experiment=experiment).check_resumes(of_row.record, folder)
    has_all_steps = Run.from_dict(of_row.record).num_steps == run.num_steps
    if not has_all_steps or read_run(folder).summary.get("steps") != of_row.step:
        raise RunError(
            f"Row {row} in {quoted(folder)} has not ended: it is at step {of_row.step:,} of "
            f"{run.num_steps:,}. {remedy}"
        )
    return of_row


def _join_metrics(workdir: Place, folders: Sequence[Place]) -> None:
    """Writes the history of the members of all rows as that of the run."""
    joined: dict[int, dict[str, float]] = {}
    for folder in folders:
        for record in read_metrics(folder):
            of_members = {name: value for name, value in record.items() if "/member_" in name}
            joined.setdefault(record["step"], {}).update(of_members)
    lines = ({"step": step, **_means(of), **of} for step, of in sorted(joined.items()))
    write_run_file(workdir, METRICS, "".join(f"{to_json(line)}\n" for line in lines))


def _means(of_members: dict[str, float]) -> dict[str, float]:
    """Returns the training metrics of the ensemble from those of its members."""
    values: dict[str, list[float]] = {}
    for name, value in of_members.items():
        if name.startswith("train/"):
            values.setdefault(name.rpartition("/")[0], []).append(value)
    counts = {f"train/{FAILED_UPDATES}", f"train/{IS_FROZEN}"}
    return {
        name: float((np.sum if name in counts else np.mean)(np.array(of_name, float)))
        for name, of_name in values.items()
    }


def _joined_summary(folders: Sequence[Place]) -> JsonDict:
    """Returns what the summaries of the rows say of the whole run."""
    summaries = [read_run(folder).summary for folder in folders]
    stopped = {id_: at for each in summaries for id_, at in each.get("stopped_members", {}).items()}
    pace = "member_examples_per_second"
    return {
        "seconds": max(each["seconds"] for each in summaries),
        pace: sum(each[pace] for each in summaries),
        **({"stopped_members": stopped} if stopped else {}),
    }
