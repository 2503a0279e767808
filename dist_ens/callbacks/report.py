"""The report of a run as one HTML page."""

import os
from collections.abc import Sequence

import numpy as np

from dist_ens.callbacks.protocol import RunInfo
from dist_ens.callbacks.summary import summary_of
from dist_ens.data import Split
from dist_ens.ensemble.failures import FailedMember
from dist_ens.evaluation import Evaluation, Scores, curves_of, pictures_of
from dist_ens.ground.errors import UserError
from dist_ens.processes import cluster
from dist_ens.report.files import REPORT_FILES
from dist_ens.storage import place_of


class Report:
    """A callback that writes `report.html` and `summary.json` at the end of a run.

    The page shows the scores of the evaluation data, so `fit` needs `eval_data` or `validation`.
    The data of its figures are written too, as `curves.json` and `pictures.npy`.
    Its training curves are those of `metrics.jsonl` in the same folder, which
    `JsonLines(folder / "metrics.jsonl")` writes.

    Args:
        folder: Path or address of the run's folder, made if it does not exist.

    Raises:
        UserError: When the run begins, if there is no data to score, or a symbolic link is in the
            place of one of the files.
        RunError: When the run ends, if the files cannot be written.

    >>> report = Report("runs/a")
    >>> run = RunInfo(None, member_ids=[0], first_step=0, last_step=10, batch_size=8, directions={})
    >>> report.begin(run)  # no data to score
    Traceback (most recent call last):
    ...
    dist_ens.ground.errors.UserError: Report shows the scores of the evaluation data, and there \
is no data to score. Give fit eval_data or validation, or leave Report out.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = place_of(folder, "folder")
        self._run: RunInfo | None = None
        self._failed: Sequence[FailedMember] = ()

    def begin(self, run: RunInfo) -> None:
        """Checks that there is data to score, and that the files can be written."""
        if not run.directions:
            raise UserError(
                "Report shows the scores of the evaluation data, and there is no data to score. "
                "Give fit eval_data or validation, or leave Report out."
            )
        if cluster.is_main():
            self._folder.require_writable(REPORT_FILES, is_new=True)
        self._run, self._failed = run, ()

    def members_failed(self, members: Sequence[FailedMember]) -> None:
        """Keeps the failed members for the page and the summary."""
        self._failed = members

    def finished(
        self, step: int, scores: Scores, evaluation: Evaluation | None, split: Split
    ) -> None:
        """Writes the page and the summary, on process 0. An evaluation has an objective."""
        if evaluation is None or self._run is None or not cluster.is_main():
            return
        from dist_ens import report  # The page takes a second to import.

        summary = summary_of(self._run.ensemble, step, scores, self._failed) | {"experiment": {}}
        curves = curves_of(evaluation)
        pictures: Sequence[np.ndarray] = pictures_of(evaluation, split, curves)
        self._folder.make()
        report.write_summary(self._folder, summary)
        report.write_report(self._folder, summary, curves, pictures)
