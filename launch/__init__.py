"""The commands: `dist-ens VERB …` is `python -m launch.VERB …`."""

import importlib
import os
import signal
import sys
from typing import NoReturn

from launch import allocator

VERBS = ("train", "evaluate", "predict", "report", "plan", "bench")


def _interrupted(*_: object) -> NoReturn:
    """Ends a command that is still importing its libraries; there is nothing to tell."""
    os._exit(130)


if sys.argv[0] == "-m":  # Python is about to run a module of this package as a command
    allocator.ask()
    signal.signal(signal.SIGINT, _interrupted)


def main() -> None:
    """Runs the verb on the command line."""
    allocator.ask()
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
    signal.signal(signal.SIGINT, _interrupted)
    importlib.import_module(f"launch.{verb}").run()
