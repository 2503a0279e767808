"""The commands: `dist-ens VERB …` is `python -m launch.VERB …`."""

import importlib
import sys

from launch import huge_pages

VERBS = ("train", "evaluate", "predict", "report", "plan", "bench")

if sys.argv[0] == "-m":  # Python is about to run a module of this package as a command
    huge_pages.ask()


def main() -> None:
    """Runs the verb on the command line."""
    huge_pages.ask()
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if verb in ("--help", "-h"):
        print(f"dist-ens VERB …, where VERB is one of {', '.join(VERBS)}; VERB --help says more.")
        sys.exit(0)
    if verb not in VERBS:
        print(
            f"dist-ens takes a verb first: {', '.join(VERBS)}. Received: {verb or 'none'!r}. "
            f"Try: dist-ens train --config=configs/digits.py --workdir=runs/digits; "
            "dist-ens VERB --help lists the flags of a verb.",
            file=sys.stderr,
        )
        sys.exit(2)
    del sys.argv[1]
    try:
        importlib.import_module(f"launch.{verb}").run()
    except KeyboardInterrupt:  # while the libraries are imported
        sys.exit(130)
