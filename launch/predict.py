"""Predicts with a run.

dist-ens predict --workdir=DIR --input=x.npy --output=p.npz [--leave_out_broken]
"""

import pathlib

import numpy as np
from absl import flags

from dist_ens import cluster
from dist_ens.assess import told_of_broken
from dist_ens.data import convert_inputs
from dist_ens.errors import UserError, first_line
from dist_ens.evaluate import broken_positions
from dist_ens.run import open_finished
from launch import front
from launch.config_file import ConfigFlags

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_INPUT = flags.DEFINE_string("input", None, ".npy file of examples, unscaled, in their own units.")
_OUTPUT = flags.DEFINE_string("output", None, ".npz file for the predictions.")
_LEAVE_OUT_BROKEN = flags.DEFINE_bool(
    "leave_out_broken", False, "Pool without members whose predictions are no numbers."
)
_CONFIG = ConfigFlags(overridable=False)


def main() -> None:
    """Predicts with the newest checkpoint on the devices at hand."""
    workdir, output = pathlib.Path(front.required(_WORKDIR)), front.required(_OUTPUT)
    path = front.required(_INPUT)
    inputs = _load(path)
    if pathlib.Path(output).resolve() == pathlib.Path(path).resolve():
        raise UserError(
            "The predictions go to a file of their own. Received: --input and --output, both "
            f"{output}. Choose another --output."
        )
    front.check_outputs(_OUTPUT)
    run, ensemble, state = open_finished(workdir, _CONFIG.make_member)
    inputs = convert_inputs(run.spec, inputs, path)
    evaluator = run.evaluator(ensemble)
    predictions = evaluator.predict(state, inputs)
    broken = broken_positions(
        {n: leaf for n, leaf in predictions.items() if n.startswith("member_") and n != "member_id"}
    )
    if broken and _LEAVE_OUT_BROKEN.value:
        predictions = evaluator.without(broken).predict(state, inputs)
    if not cluster.is_main():
        return

    def write(path: pathlib.Path) -> None:
        unfinished = path.with_name(path.name + ".unfinished")
        with unfinished.open("wb") as file:  # savez would add an ending to a path without one
            np.savez(file, **predictions)  # type: ignore[arg-type]
        unfinished.replace(path)

    front.write_file(_OUTPUT, write)
    *others, last = predictions
    members = len(predictions["member_id"])
    print(f"{output}: {', '.join(others)} and {last} of {members} members, {len(inputs)} examples.")
    if broken:
        ids = predictions["member_id"][broken].tolist()
        print(
            told_of_broken(
                ids,
                left_out=_LEAVE_OUT_BROKEN.value,
                num_members=members,
                num_groups=run.spec.num_groups,
            )
        )


def _load(path: str) -> np.ndarray:
    try:
        with open(path, "rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(
            f"The input is an .npy file, written by numpy.save without pickled objects. Received: "
            f"--input={path}: {first_line(error)} Correct the path, or write the file again."
        ) from error


def run() -> None:
    """The whole command."""
    front.run(main, _CONFIG.prepare)


if __name__ == "__main__":
    run()
