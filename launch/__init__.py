"""The commands. `dist-ens VERB …` is the same as `python -m launch.VERB …`."""

import importlib
import sys

from dist_ens.paths import shortened
from launch import ends, environment, glibc_tuning, signals

VERBS = (
    "train",
    "evaluate",
    "predict",
    "members",
    "report",
    "replay",
    "plan",
    "bench",
    "doctor",
    "local",
    "slurm",
    "k8s",
    "tpu",
    "sky",
)


if sys.argv[0] == "-m":  # Python is about to run a module of this package as a command.
    ends.begin()
    glibc_tuning.ask()
    signals.begin()
    environment.import_jax()


def main() -> None:
    """Runs the verb on the command line."""
    ends.begin()
    glibc_tuning.ask()
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if verb in ("--help", "-h"):
        ends.show_and_exit(
            f"dist-ens VERB …, where VERB is one of {', '.join(VERBS)}; VERB --help says more."
        )
    if verb not in VERBS:
        what = f"{shortened(verb)} is not a verb of dist-ens" if verb else "dist-ens needs a verb"
        ends.fail(
            2,
            f"error: {what}: choose one of {', '.join(VERBS)}. Try: dist-ens train "
            "--config=configs/digits.py --workdir=runs/digits; dist-ens VERB --help lists the "
            "flags of a verb.",
        )
    del sys.argv[1]
    signals.begin()
    environment.import_jax()
    importlib.import_module(f"launch.{verb}").run()
