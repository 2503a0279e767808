"""Predicts with a run.

dist-ens predict --workdir=DIR --input=x.npy --output=p.npz [--calibrated] [--conformal=0.9]
                 [--step=N] [--leave_out_broken]
dist-ens predict --workdir=DIR --out_of_bag --output=p.npz [--step=N] [--leave_out_broken]

The first form predicts the examples in a file. It writes these arrays:

  probs                   of classes: probabilities [examples, classes]
  mean, variance          of real targets: [examples], in the targets' own unit
  quantiles               of the loss quantiles: [examples, levels]
  member_probs, ...       each of these by member: [members, examples, ...]
  member_id               ids of the members: [members]
  class_names             names of the classes, if they have any: [classes]
  sets                    with --conformal, whether a class is in the set: [examples, classes]
  lower, upper            with --conformal, ends of the intervals of real targets: [examples]

Several targets are the axis after [examples]: mean [examples, targets], quantiles
[examples, targets, levels]. Of labels that are 0 or 1, probs are those of 1, [examples, labels],
and sets are [examples, labels, 2].

The members' own predictions are never calibrated.

The second form writes the ensemble's prediction for each training example, by the members that were
not trained on it. It is NaN if all members were trained on it. `position` is the example's position
in the source's training examples, and `num_predicting` the number of members that predict it.
"""

import io

import numpy as np
from absl import flags

from dist_ens.data import convert_inputs
from dist_ens.evaluation import Evaluator, broken_positions
from dist_ens.evaluation.out_of_bag import held_out_predictions
from dist_ens.experiment.assessment import out_of_bag_of, told_of_broken, without_broken
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.loaded_run import LoadedRun, kept_calibration
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.file_reading import read_npy
from dist_ens.ground.paths import shortened
from dist_ens.processes import cluster
from dist_ens.storage import place_of
from launch import cli
from launch.config_flags import ConfigFlags
from launch.path_flags import define_file, define_folder, define_path

_WORKDIR = define_folder("workdir", None, "Folder of the run.")
_INPUT = define_path("input", None, ".npy file of examples, unscaled, in the units of the data.")
_OUTPUT = define_file("output", None, ".npz file for the predictions.")
_OUT_OF_BAG = flags.DEFINE_bool(
    "out_of_bag", False, "Whether to predict training examples by the members that left them out."
)
_LEAVE_OUT_BROKEN = flags.DEFINE_bool(
    "leave_out_broken", False, "Whether to leave out members that predict NaN."
)
_CALIBRATED = flags.DEFINE_bool(
    "calibrated", False, "Whether to calibrate, as fitted by evaluate --calibration=METHOD."
)
_CONFORMAL = flags.DEFINE_float(
    "conformal", None, "Coverage in (0, 1) of the rule fitted by evaluate --conformal=METHOD."
)
_STEP = flags.DEFINE_integer(
    "step", None, "Step of a checkpoint. Default: the newest, or the best.", lower_bound=1
)
_CONFIG = ConfigFlags(overridable=False)


def main() -> None:
    """Predicts with a checkpoint on the devices of this machine."""
    workdir = cli.required(_WORKDIR, "runs/digits")
    output = cli.required(_OUTPUT, "predictions.npz")
    if not str(output).endswith(".npz"):
        raise UserError(f"--output={shortened(str(output))} does not end in .npz.")
    inputs = None
    if not _OUT_OF_BAG.value:
        inputs = read_npy(cli.required(_INPUT, "x.npy"), "--input")
    for flag in (_CALIBRATED, _CONFORMAL, _INPUT):
        if inputs is None and flag.present:
            raise UserError(f"--{flag.name} is of no use with --out_of_bag. Leave one out.")
    cli.check_outputs(_OUTPUT)
    opened = open_finished(workdir, config=_CONFIG.file, step=_STEP.value)
    spec = opened.config_run.spec
    if inputs is None:
        opened.require_own_members()
        predictions, told = _out_of_bag(opened)
    else:
        inputs = convert_inputs(spec, inputs, f"--input {shortened(str(_INPUT.value))}")
        predictions, told = _of_inputs(opened, inputs)
    if spec.class_names is not None:
        predictions["class_names"] = np.array(spec.class_names)
    if not cluster.is_main():
        return

    file = io.BytesIO()
    np.savez(file, **predictions)  # type: ignore[arg-type]
    cli.write_file(_OUTPUT, file.getvalue())
    *others, last = predictions
    first, *rest = [*told, *filter(None, [opened.choice.note])]
    print(f"{quoted(output)}: {', '.join(others)} and {last} of {first}.")
    print(f"The members are those of step {opened.step:,}.", *rest, sep="\n")


def _of_inputs(opened: LoadedRun, inputs: np.ndarray) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns predictions of the ensemble and its members, and sentences about them."""
    evaluator = opened.evaluator()
    predictions = evaluator.predict(opened.state, inputs)
    broken = broken_positions(
        {n: leaf for n, leaf in predictions.items() if n.startswith("member_") and n != "member_id"}
    )
    if broken and _LEAVE_OUT_BROKEN.value:
        evaluator = evaluator.without(broken)
        predictions = evaluator.predict(opened.state, inputs)
    if _CALIBRATED.value or _CONFORMAL.value is not None:
        predictions = _calibrated(opened, evaluator, inputs, predictions)
    member_ids = predictions["member_id"]
    told = [f"{counted(len(member_ids), 'member')}, {counted(len(inputs), 'example')}"]
    if broken:
        told.append(
            told_of_broken(
                member_ids[broken].tolist(),
                left_out=_LEAVE_OUT_BROKEN.value,
                num_members=len(member_ids),
                num_groups=opened.ensemble.num_groups,
            )
        )
    return predictions, told


def _calibrated(
    opened: LoadedRun, evaluator: Evaluator, inputs: np.ndarray, predictions: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns the arrays of a prediction after the calibration that the run keeps."""
    from dist_ens.evaluation.fit_calibration import predictor_of  # It imports scipy, slowly.

    distribution = evaluator.distribution
    calibration = kept_calibration(
        place_of(opened.folder, "folder"),
        predictor_of(evaluator, opened.state),
        distribution,
        calibrated=_CALIBRATED.value,
        level=_CONFORMAL.value,
    )
    shown = {name: leaf for name, leaf in predictions.items() if f"member_{name}" in predictions}

    def points() -> np.ndarray:
        members = {name: predictions[f"member_{name}"] for name in shown}
        return np.delete(distribution.point(members), evaluator.left_out, axis=0)

    calibrated, found = calibration.arrays(distribution, shown, points, inputs)
    if "interval" in found:
        found["lower"], found["upper"] = found.pop("interval")
    calibrated = {n: leaf.astype(predictions[n].dtype) for n, leaf in calibrated.items()}
    return {**predictions, **calibrated, **found}


def _out_of_bag(opened: LoadedRun) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns out-of-bag predictions of the training examples, and sentences about them."""
    run, state, source = opened.config_run, opened.state, opened.open_source()

    def predictions_of(evaluator: Evaluator) -> dict[str, np.ndarray]:
        out_of_bag = out_of_bag_of(run, evaluator, state)
        dtype = np.float64 if run.spec.standardization else np.float32
        parts: dict[str, list[np.ndarray]] = {}
        for summary, counts in held_out_predictions(evaluator, state, source.train, out_of_bag):
            of_group = {name: leaf[None] for name, leaf in summary.items()}
            for name, (leaf,) in evaluator.shown(of_group).items():
                some = counts.reshape(-1, *(1,) * (leaf.ndim - 1))
                parts.setdefault(name, []).append(np.where(some, leaf, np.nan))
        return {
            **{n: np.concatenate(leaves).astype(dtype) for n, leaves in parts.items()},
            "position": source.train_positions,
            "num_predicting": out_of_bag.sum(axis=0).astype(np.int32),
        }

    predictions, broken = without_broken(
        opened.evaluator(), state, predictions_of, leave_out=_LEAVE_OUT_BROKEN.value
    )
    told = [f"{len(source.train):,} training examples, by the members that left each out"]
    missing = int((predictions["num_predicting"] == 0).sum())
    if missing:
        told.append(f"No member left out {missing:,} of them, whose predictions are NaN.")
    if broken:
        told.append(told_of_broken(broken, left_out=True, num_members=run.num_members))
    return predictions, told


run = cli.command(main, _CONFIG.prepare)

if __name__ == "__main__":
    run()
