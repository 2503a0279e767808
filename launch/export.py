"""Writes the prediction of a run as one file that jax alone reads: dist-ens export …

dist-ens export --workdir=DIR --output=m.jaxexport [--platforms=cpu,cuda,tpu] [--members]
                [--calibrated] [--conformal=0.9] [--step=N]

The file is a function of inputs of any batch size, from `jax.export`. It returns a dict with what
`predict` of the run returns, such as mean, total, aleatoric and epistemic. The file beside it,
m.jaxexport.json, describes the inputs, the outputs and the members.
"""

from absl import flags

from dist_ens.experiment.exported import PLATFORMS
from dist_ens.experiment.loaded import open_finished
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import counted
from dist_ens.processes import cluster
from launch import cli
from launch.config_flags import ConfigFlags
from launch.path_flags import define_file, define_folder

_WORKDIR = define_folder("workdir", None, "Folder of the run.")
_OUTPUT = define_file("output", None, "File for the exported prediction.")
_PLATFORMS = flags.DEFINE_list("platforms", [*PLATFORMS], "Platforms on which the file will run.")
_MEMBERS = flags.DEFINE_bool("members", False, "Whether to return the members' predictions too.")
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
    """Exports a checkpoint."""
    workdir = cli.required(_WORKDIR, "runs/digits")
    output = cli.required(_OUTPUT, "m.jaxexport")
    cli.check_outputs(_OUTPUT)
    opened = open_finished(workdir, config=_CONFIG.file, step=_STEP.value)
    with cli.reported_writing(_OUTPUT):
        found = opened.export(
            output,
            _PLATFORMS.value,
            members=_MEMBERS.value,
            calibrated=_CALIBRATED.value,
            conformal=_CONFORMAL.value,
        )
    if cluster.is_main():
        names, platforms = found.description["outputs"], found.description["platforms"]
        count = counted(len(found.description["member_ids"]), "member")
        print(f"{quoted(output)}: {', '.join(names)} of {count}, on {', '.join(platforms)}.")
        told = [f"The members are those of step {opened.step:,}.", opened.choice.note]
        print(*filter(None, told), sep="\n")


run = cli.command(main, _CONFIG.prepare)

if __name__ == "__main__":
    run()
