"""Scores a run on its test split, and measures how reliable its uncertainty is.

dist-ens evaluate --workdir=DIR [--json=FILE] [--ood=SOURCE] [--shift] [--pooling=WAY]
                  [--dropout_samples=N] [--calibration=METHOD] [--out_of_bag]
                  [--conformal=METHOD --level=0.9] [--leave_out_broken] [--step=N]
"""

import os
import pathlib

from absl import flags

from dist_ens import report
from dist_ens.experiment import POOLINGS
from dist_ens.experiment.answers import keep
from dist_ens.experiment.assess import assess
from dist_ens.experiment.assessment import CALIBRATIONS, CONFORMAL, Assessment, EvaluationRequest
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.loaded_run import LoadedRun
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError
from dist_ens.ground.file_writing import require_regular_files
from dist_ens.ground.paths import shortened
from dist_ens.ground.terminal import PlainConsole
from dist_ens.metrics.table import print_table
from dist_ens.processes import cluster
from dist_ens.report.files import CURVES, REPORT_FILES
from launch import cli
from launch.config_flags import ConfigFlags
from launch.path_flags import define_path

_WORKDIR = define_path("workdir", None, "Folder of the run.")
_JSON = define_path("json", None, "File to write the scores to.")
_OOD = flags.DEFINE_string(
    "ood", None, "Source whose test split is out of distribution, such as idx:DIR."
)
_SHIFT = flags.DEFINE_bool(
    "shift", False, "Whether to score under noise, blur, low contrast and rotation."
)
_POOLING = flags.DEFINE_enum(
    "pooling", None, POOLINGS, "Pooling of the members' predictions; default: that of the run."
)
_DROPOUT_SAMPLES = flags.DEFINE_integer(
    "dropout_samples",
    None,
    "Number of predictions with dropout that are averaged for each member, 0 to predict once "
    "without dropout; default: that of the run.",
    lower_bound=0,
)
_CALIBRATION = flags.DEFINE_enum(
    "calibration",
    None,
    CALIBRATIONS,
    "Calibration method of the pooled prediction, fitted on validation data. For classes: "
    "temperature (one factor of all log-probabilities), vector (a factor and an offset for each "
    "class) or isotonic (an increasing step function of each class's probability). For real "
    "targets: variance (one factor of all variances).",
)
_CONFORMAL = flags.DEFINE_enum(
    "conformal",
    None,
    CONFORMAL,
    "Method for conformal sets or intervals, made to hold the right answer with probability "
    "--level. Their coverage is measured on the test split. For sets of classes: lac (every class "
    "whose probability is above a threshold; the smallest sets), aps (the most probable classes, "
    "until their sum reaches a threshold; larger sets for harder examples) or raps (aps with a "
    "penalty on large sets). For intervals of real targets: cqr (the quantiles of the loss "
    "quantiles, widened), cv+ (residuals of the folds that a member left out) or jackknife+ "
    "(out-of-bag residuals of bootstrap samples).",
)
_LEVEL = flags.DEFINE_float(
    "level", 0.9, "Coverage that --conformal aims at, in (0, 1).", lower_bound=0, upper_bound=1
)
_OUT_OF_BAG = flags.DEFINE_bool(
    "out_of_bag", False, "Whether to score training examples by the members that left them out."
)
_LEAVE_OUT_BROKEN = flags.DEFINE_bool(
    "leave_out_broken", False, "Whether to leave out members that predict NaN."
)
_STEP = flags.DEFINE_integer(
    "step",
    None,
    "Step of the checkpoint. Default: the newest, or the best if the run ended with its state.",
    lower_bound=1,
)
_CONFIG = ConfigFlags(overridable=False)
# Flags that ask for predictions, which a loss function does not make.
_OF_PREDICTIONS = (_OOD, _SHIFT, _POOLING, _DROPOUT_SAMPLES, _CALIBRATION, _CONFORMAL, _OUT_OF_BAG)


def main() -> None:
    """Scores a checkpoint on the devices of this machine."""
    workdir = cli.required(_WORKDIR, "runs/digits")
    cli.check_outputs(_JSON)
    request = EvaluationRequest(
        ood=_OOD.value,
        shift=_SHIFT.value,
        calibration=_CALIBRATION.value,
        conformal=_CONFORMAL.value,
        level=_LEVEL.value,
        out_of_bag=_OUT_OF_BAG.value,
        leave_out_broken=_LEAVE_OUT_BROKEN.value,
    )
    opened = open_finished(
        workdir, config=_CONFIG.file, dropout_samples=_DROPOUT_SAMPLES.value, step=_STEP.value
    )
    # The page shows the run's own predictions at its newest step, which other pooling or dropout
    # samples, or those of another step, must not replace.
    own_pooling = opened.config_run.experiment.evaluation.pooling
    is_own = _POOLING.value in (None, own_pooling) and _DROPOUT_SAMPLES.value is None
    has_page = is_own and opened.ensemble.objective is not None
    is_newest = _STEP.value is None
    is_kept = has_page and (is_newest or request.asks_more)
    if is_kept:
        _check_page(workdir)
    found = _assessed(opened, request)
    if not cluster.is_main():
        return
    console = PlainConsole()
    console.print(f"Scores of step {opened.step:,}:")
    print_table(console, found.scores.table())
    for sentence in found.sentences():
        console.print(sentence, soft_wrap=True)
    if _JSON.value is not None:
        as_json = found.to_dict()
        cli.write_file(_JSON, lambda path: report.write_scores(path, as_json))
    if is_kept:
        cli.write_file(_WORKDIR, lambda path: _keep(path, opened.step, found, is_newest))
    if is_kept and is_newest:
        console.print(f"Wrote {report.PAGE} in {quoted(workdir)}.", soft_wrap=True)
    elif opened.ensemble.objective is not None:
        shown = "the newest step" if is_own else "the run's own predictions"
        console.print(f"{report.PAGE} still shows {shown}.", soft_wrap=True)


def _assessed(opened: LoadedRun, request: EvaluationRequest) -> Assessment:
    """Returns the results; of a run whose loss is a function only the mean losses."""
    if opened.ensemble.objective is None:
        for flag in _OF_PREDICTIONS:
            if flag.present:
                raise UserError(
                    f"--{flag.name} asks for predictions, and the loss of this run is a function."
                )
        return Assessment(opened.evaluate(), {}, {}, ())
    if request.needs_own_members:
        opened.require_own_members()
    source = opened.open_source()
    evaluator = opened.evaluator(_POOLING.value)
    return assess(opened.config_run, evaluator, opened.state, source, request)


def _check_page(workdir: pathlib.Path) -> None:
    """Checks, before anything is computed, that the page of a run can be written."""
    if not os.access(workdir, os.W_OK | os.X_OK):
        raise UserError(
            f"Nothing can be written in --workdir={shortened(str(workdir))}, where the report "
            "goes. Make it writable, or copy the run."
        )
    require_regular_files(workdir, REPORT_FILES)
    report.read_answers(workdir)  # It raises an error for a damaged file.


def _keep(workdir: pathlib.Path, step: int, found: Assessment, is_newest: bool) -> None:
    """Adds the answers to those that the run keeps, and draws the page with all of them."""
    answers = {report.SCORES: found.scores_to_dict(), **found.answers}
    keep(workdir, step, answers, is_newest=is_newest)
    if is_newest:
        report.write_report(workdir, found.scores_to_dict(), found.curves, found.pictures)
    elif (workdir / CURVES).exists():
        report.redraw(workdir)


def run() -> None:
    """Runs the command."""
    cli.run(main, _CONFIG.prepare)


if __name__ == "__main__":
    run()
