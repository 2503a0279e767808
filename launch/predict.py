"""Predicts with a run.

dist-ens predict --workdir=DIR --input=x.npy --output=p.npz [--calibrated] [--conformal=0.9]
                 [--step=N] [--leave_out_broken]
dist-ens predict --workdir=DIR --input=new.csv --output=p.csv [...]
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

The members' own predictions are never calibrated. A run on a table takes a table, CSV or Parquet,
and can also write one: the name of each row, its prediction, and the arrays above that are not of
single members, one column for each class or level.

The last form writes the ensemble's prediction for each training example, by the members that were
not trained on it. It is NaN if all members were trained on it. `position` is the example's position
in the source's training examples, and `num_predicting` the number of members that predict it.
"""

import io
from collections.abc import Sequence

import numpy as np
from absl import flags

from dist_ens.data import convert_inputs
from dist_ens.data.frames import read_table, write_csv
from dist_ens.evaluation import Evaluator, broken_positions
from dist_ens.evaluation.out_of_bag import held_out_predictions
from dist_ens.experiment.assessment import out_of_bag_of, told_of_broken, without_broken
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.loaded_run import LoadedRun, kept_calibration
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.file_reading import read_npy
from dist_ens.ground.paths import shortened
from dist_ens.ground.types import Inputs
from dist_ens.processes import cluster
from dist_ens.storage import place_of
from launch import cli
from launch.config_flags import ConfigFlags
from launch.path_flags import define_file, define_folder, define_path

_WORKDIR = define_folder("workdir", None, "Folder of the run.")
_INPUT = define_path(
    "input", None, "File of examples in the units of the data: .npy, or a table for a run on one."
)
_OUTPUT = define_file("output", None, "File for the predictions: .npz, or .csv of a table.")
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
    if not str(output).endswith((".npz", ".csv")):
        raise UserError(f"--output={shortened(str(output))} does not end in .npz or .csv.")
    inputs: Inputs | None = None
    if not _OUT_OF_BAG.value:
        inputs = cli.required(_INPUT, "x.npy")
        if inputs.suffix == ".npy":
            inputs = read_npy(inputs, "--input")
    for flag in (_CALIBRATED, _CONFORMAL, _INPUT):
        if inputs is None and flag.present:
            raise UserError(f"--{flag.name} is of no use with --out_of_bag. Leave one out.")
    cli.check_outputs(_OUTPUT)
    opened = open_finished(workdir, config=_CONFIG.file, step=_STEP.value)
    spec = opened.config_run.spec
    table = spec.table
    if str(output).endswith(".csv") and (table is None or inputs is None):
        raise UserError("--output=FILE.csv is for --input of a run on a table. Write .npz.")
    if inputs is None:
        opened.require_own_members()
        predictions, told = _out_of_bag(opened)
    else:
        where = f"--input {shortened(str(_INPUT.value))}"
        if table is not None:
            inputs = read_table(inputs, table.texts)
        if table is None and not isinstance(inputs, np.ndarray):
            raise UserError(f"{where} is no .npy file of examples, as numpy.save writes it.")
        converted = convert_inputs(spec, inputs, where)
        if table is None:
            predictions, told = _of_inputs(opened, converted, converted)
        else:
            numbers = table.numbers(inputs).astype(np.float32)
            predictions, told = _of_inputs(opened, converted, numbers)
            _, predictions["row_id"] = table.row_ids(inputs)
    if spec.class_names is not None:
        predictions["class_names"] = np.array(spec.class_names)
    if not cluster.is_main():
        return

    file = io.BytesIO()
    if table is not None and str(output).endswith(".csv"):
        row_id, _ = table.row_ids(inputs)
        predictions = _columns(predictions, row_id, spec.class_names)
        write_csv(file, predictions)
    else:
        np.savez(file, **predictions)  # type: ignore[arg-type]
    cli.write_file(_OUTPUT, file.getvalue())
    *others, last = predictions
    first, *rest = [*told, *filter(None, [opened.choice.note])]
    print(f"{quoted(output)}: {', '.join(others)} and {last} of {first}.")
    print(f"The members are those of step {opened.step:,}.", *rest, sep="\n")


def _columns(
    predictions: dict[str, np.ndarray], row_id: str, class_names: Sequence[str] | None
) -> dict[str, np.ndarray]:
    """Returns the columns of a table of predictions, [examples] each.

    A column with the name of that of the rows' names is called `predicted_NAME`.
    """
    columns: dict[str, np.ndarray] = {}
    if (probs := predictions.get("probs")) is not None:
        names = np.array(class_names or range(probs.shape[1]))
        columns["prediction"] = names[probs.argmax(axis=1)]
    of_members = {n for n in predictions if n.startswith("member_")}
    others = of_members | {"row_id", "class_names"}
    for name, leaf in predictions.items():
        if name in others:
            continue
        if leaf.ndim == 1:
            columns[name] = leaf
        else:
            ends = class_names if class_names else range(leaf.shape[1])
            columns |= {f"{name}_{end}": leaf[:, i] for i, end in enumerate(ends)}
    if row_id in columns:
        columns[f"predicted_{row_id}"] = columns.pop(row_id)
    return {row_id: predictions["row_id"], **columns}


def _of_inputs(
    opened: LoadedRun, inputs: np.ndarray, given: np.ndarray
) -> tuple[dict[str, np.ndarray], list[str]]:
    """Returns predictions of the ensemble and its members, and sentences about them.

    Conformal sets are drawn by the numbers that were `given`, which a table encodes as inputs.
    """
    evaluator = opened.evaluator()
    predictions = evaluator.predict(opened.state, inputs)
    broken = broken_positions(
        {n: leaf for n, leaf in predictions.items() if n.startswith("member_") and n != "member_id"}
    )
    if broken and _LEAVE_OUT_BROKEN.value:
        evaluator = evaluator.without(broken)
        predictions = evaluator.predict(opened.state, inputs)
    if _CALIBRATED.value or _CONFORMAL.value is not None:
        predictions = _calibrated(opened, evaluator, given, predictions)
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
