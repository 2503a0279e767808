"""Rows of a run that do not wait for each other: each trains its members in a folder of its own.

The processes of a row are a world of their own for JAX, so a row that is killed is started again
alone. When all rows are done, their members are put together as one run.
"""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from dist_ens.checkpoint import read_members, saved_steps, write_members
from dist_ens.checkpoint.run_digests import write_run_file
from dist_ens.experiment.record import Run
from dist_ens.experiment.schema import Experiment
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import RunError, UserError, counted
from dist_ens.report.files import METRICS, read_metrics, to_json
from dist_ens.storage import Folder, Place, place_of

_FOLDER = "rows"


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


def folder_of_row(workdir: Folder, row: int) -> Place:
    """Returns the folder in which a row trains."""
    return place_of(workdir, "workdir") / _FOLDER / str(row)


def join_rows(run: Run, workdir: Place, num_rows: int) -> None:
    """Writes the newest members of all rows as a checkpoint of the whole run.

    Nothing is written if the run has a checkpoint. Its history is that of all members, without the
    scores of the ensemble, which no row knew.

    Raises:
        UserError: If a row has no checkpoint, or the run has several processes.
        RunError: If the rows are not at the same step.
    """
    if jax.process_count() > 1:
        raise UserError("Rows are joined by one process. Start --rows without --row in one.")
    if not saved_steps(workdir):
        of_rows = [read_members(folder_of_row(workdir, row)) for row in range(num_rows)]
        if len({of_row.step for of_row in of_rows}) > 1:
            of_each = ", ".join(f"row {k} at step {of.step:,}" for k, of in enumerate(of_rows))
            raise RunError(
                f"The rows in {quoted(workdir / _FOLDER)} cannot be joined: {of_each}. Train each "
                "to the same step first, with --row=NUMBER."
            )
        members = of_rows[0].joined(*of_rows[1:])
        members = dataclasses.replace(members, record=run.to_dict())
        write_members(workdir, members, before=lambda: _join_metrics(workdir, num_rows))


def _join_metrics(workdir: Place, num_rows: int) -> None:
    """Writes the history of the members of all rows as that of the run."""
    joined: dict[int, dict[str, list[float]]] = {}
    for row in range(num_rows):
        for record in read_metrics(folder_of_row(workdir, row)):
            names = [name for name in record if name.startswith("train/") or "/member_" in name]
            of_step = joined.setdefault(record["step"], {})
            for name in names:
                of_step.setdefault(name, []).append(record[name])
    lines = (
        {
            "step": step,
            **{name: float(np.array(of_rows, float).mean()) for name, of_rows in of_step.items()},
        }
        for step, of_step in sorted(joined.items())
    )
    write_run_file(workdir, METRICS, "".join(f"{to_json(line)}\n" for line in lines))
