"""The commands. `dist-ens VERB …` is the same as `python -m launch.VERB …`."""

import ast
import importlib
import pathlib
import sys

import dist_ens
from dist_ens.ground.paths import shortened
from launch import glibc_tuning, signals, stdio

_VERBS = (
    "data train evaluate predict export members report replay plan bench doctor local slurm k8s tpu"
)
VERBS = tuple(_VERBS.split())


def _begin() -> None:
    """Prepares this process for a command, before JAX is imported."""
    stdio.begin()
    glibc_tuning.ask()
    signals.begin()


if sys.argv[0] == "-m":  # Python is about to run a module of this package as a command.
    _begin()


def _overview() -> str:
    """Returns a line of help for each verb, from the docstring of its module."""
    lines = []
    for verb in VERBS:
        file = pathlib.Path(__file__).with_name(f"{verb}.py")  # An import would start JAX.
        docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
        what = docstring.partition(": dist-ens")[0].splitlines()[0].rstrip(".")
        lines.append(f"  {verb:<9} {what}")
    flags = "dist-ens help VERB lists the flags of a verb."
    return "\n".join(["dist-ens VERB …", "", *lines, "", flags])


def main() -> None:
    """Runs the verb on the command line."""
    _begin()
    if sys.argv[1:2] == ["help"]:  # `help VERB` is `VERB --help`.
        sys.argv[1:] = [*sys.argv[2:3], "--help"]
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if verb in ("--help", "-h"):
        stdio.show_and_exit(_overview())
    if verb == "--version":
        stdio.show_and_exit(f"dist_ens {dist_ens.__version__}")
    if verb not in VERBS:
        what = f"{shortened(verb)} is not a verb of dist-ens" if verb else "dist-ens needs a verb"
        stdio.fail(
            2,
            f"error: {what}: choose one of {', '.join(VERBS)}. Try: dist-ens train "
            "--config=configs/digits.py --workdir=runs/digits; dist-ens --help says what each "
            "verb does.",
        )
    del sys.argv[1]
    importlib.import_module(f"launch.{verb}").run()
