"""Scores a run on its test split, and measures how reliable its uncertainty is.

dist-ens evaluate --workdir=DIR [--json=FILE] [--ood=SOURCE] [--shift] [--pooling=WAY]
                  [--dropout_samples=N] [--calibration=METHOD] [--out_of_bag]
                  [--conformal=METHOD --level=0.9] [--leave_out_broken] [--step=N]
"""

from collections.abc import Sequence

from absl import flags

from dist_ens import report
from dist_ens.experiment import POOLINGS
from dist_ens.experiment.assessment import (
    CALIBRATIONS,
    CONFORMAL,
    Assessment,
    EvaluationRequest,
    assess,
)
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.loaded_run import LoadedRun, keep
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError
from dist_ens.ground.terminal import PlainConsole, print_table
from dist_ens.processes import cluster
from dist_ens.report.files import CURVES, REPORT_FILES, to_json
from dist_ens.storage import Place
from launch import cli
from launch.config_flags import ConfigFlags
from launch.path_flags import define_file, define_folder

_WORKDIR = define_folder("workdir", None, "Folder of the run.")
_JSON = define_file("json", None, "File to write the scores to.")
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
    "Number of predictions with dropout for each member, 0 for one without; default: of the run.",
    lower_bound=0,
)
_CALIBRATION = flags.DEFINE_enum(
    "calibration",
    None,
    CALIBRATIONS,
    "Calibration method of the pooled prediction, fitted on validation data. For classes: "
    "temperature (one factor of all log-probabilities), vector (a factor and an offset for each) "
    "or isotonic (an increasing step function for each). For real targets: variance (one factor).",
)
_CONFORMAL = flags.DEFINE_enum(
    "conformal",
    None,
    CONFORMAL,
    "Method for conformal sets or intervals, which hold the right answer with probability --level. "
    "For classes: lac (the smallest sets), aps (larger sets for harder examples) or raps (aps with "
    "a penalty on large sets). For real targets: cqr (the predicted interval, widened), "
    "cv+ (residuals of left-out folds) or jackknife+ (residuals of bootstrap samples).",
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
    "step", None, "Step of a checkpoint. Default: the newest, or the best.", lower_bound=1
)
_CONFIG = ConfigFlags(overridable=False)
_REQUEST: Sequence[flags.FlagHolder] = (
    _OOD,
    _SHIFT,
    _CALIBRATION,
    _CONFORMAL,
    _LEVEL,
    _OUT_OF_BAG,
    _LEAVE_OUT_BROKEN,
)
# Flags that ask for predictions, which a loss function does not make.
_OF_PREDICTIONS = (_OOD, _SHIFT, _POOLING, _DROPOUT_SAMPLES, _CALIBRATION, _CONFORMAL, _OUT_OF_BAG)


def main() -> None:
    """Scores a checkpoint on the devices of this machine."""
    workdir = cli.required(_WORKDIR, "runs/digits")
    cli.check_outputs(_JSON)
    request = EvaluationRequest(**{flag.name: flag.value for flag in _REQUEST})
    opened = open_finished(
        workdir, config=_CONFIG.file, dropout_samples=_DROPOUT_SAMPLES.value, step=_STEP.value
    )
    is_kept = _shows_own(opened) and (_STEP.value is None or request.asks_more)
    if is_kept:
        # Before anything is computed. `read_answers` raises an error for a damaged file.
        if cluster.is_main():
            workdir.require_writable(REPORT_FILES)
        report.read_answers(workdir)
    found = _assessed(opened, request)
    if cluster.is_main():
        _print_scores(opened, found)
        if is_kept:
            with cli.reported_writing(_WORKDIR):
                _keep(workdir, opened.step, found)
        if opened.ensemble.objective is not None:
            _print_page(opened, workdir)


def _shows_own(opened: LoadedRun) -> bool:
    """Returns whether the predictions are the run's own, which its page shows.

    Other pooling or dropout samples must not replace them.
    """
    own_pooling = opened.config_run.experiment.evaluation.pooling
    is_own = _POOLING.value in (None, own_pooling) and _DROPOUT_SAMPLES.value is None
    return is_own and opened.ensemble.objective is not None


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


def _print_scores(opened: LoadedRun, found: Assessment) -> None:
    """Prints the scores, and writes them to the file of --json."""
    console = PlainConsole()
    console.print(f"Scores of step {opened.step:,}:")
    print_table(console, found.scores.table())
    for sentence in filter(None, (opened.choice.note, *found.sentences())):
        console.print(sentence, soft_wrap=True)
    if _JSON.value is not None:
        cli.write_file(_JSON, to_json(found.to_dict(), indent=2) + "\n")


def _keep(workdir: Place, step: int, found: Assessment) -> None:
    """Adds the answers to those that the run keeps, and draws the page with all of them."""
    answers = {report.SCORES: found.scores_to_dict(), **found.answers}
    is_newest = _STEP.value is None
    keep(workdir, step, answers, is_newest=is_newest)
    if is_newest:
        report.write_report(workdir, found.scores_to_dict(), found.curves, found.pictures)
    elif CURVES in workdir.names():
        report.redraw(workdir)


def _print_page(opened: LoadedRun, workdir: Place) -> None:
    """Prints what the page of the run shows now."""
    if not _shows_own(opened):
        sentence = f"{report.PAGE} still shows the run's own predictions."
    elif _STEP.value is not None:
        sentence = f"{report.PAGE} still shows the newest step."
    else:
        sentence = f"Wrote {report.PAGE} in {quoted(workdir)}."
    PlainConsole().print(sentence, soft_wrap=True)


run = cli.command(main, _CONFIG.prepare)

if __name__ == "__main__":
    run()
