"""The answers that a run keeps, and the calibration of its predictions that they hold."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dist_ens.checkpoint import state_digest
from dist_ens.ground.commands import command_line, quoted
from dist_ens.ground.errors import UserError
from dist_ens.ground.json_text import Json
from dist_ens.losses import Distribution
from dist_ens.report import keep_answers, read_answers

if TYPE_CHECKING:
    from dist_ens.evaluation.calibration import Calibration, Predictor

# Flags that fit what a run keeps, each with the name of the latter.
_KINDS = {"calibration": "calibration", "conformal": "conformal rule"}


def keep(
    workdir: pathlib.Path, step: int, answers: Mapping[str, Json], *, is_newest: bool = True
) -> None:
    """Adds answers to those that a run keeps; see `report.keep_answers`."""
    keep_answers(workdir, step, state_digest(workdir, step), answers, is_newest=is_newest)


def kept_calibration(
    workdir: pathlib.Path,
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
