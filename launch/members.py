"""Works on the members in the checkpoints of a run: dist-ens members RUN verify [--step=N].

`verify` reads every saved step, or the step N, and compares every byte with what was saved. It
names each member and leaf that has changed, and each file that has changed, is missing or was
added. It ends with exit code 44 if it finds any, and with 0 if all is sound.
"""

import pathlib
from collections.abc import Sequence

from absl import flags
from rich.console import Console

from dist_ens.checkpoint import FOLDER, CheckpointStore
from dist_ens.checkpoint.verify import faults_of
from dist_ens.commands import quoted
from dist_ens.config import did_you_mean
from dist_ens.errors import UserError, counted
from dist_ens.exit_codes import ExitCode
from dist_ens.paths import given_path, shortened
from launch import cli

_STEP = flags.DEFINE_integer(
    "step", None, "Step of the checkpoint. Default: every saved step.", lower_bound=0
)
_ACTIONS = ("verify",)


class _CommandLine:
    """The arguments of the command that are not flags: the folder of a run, and an action.

    Attributes:
        workdir: Folder of the run.
        action: One of `_ACTIONS`.
    """

    def __init__(self) -> None:
        self.workdir = pathlib.Path()
        self.action = ""

    def prepare(self, argv: Sequence[str]) -> list[str]:
        """Returns the command line without the folder and the action, and stores them.

        Raises:
            UserError: If one of them is missing, or the action is unknown.
        """
        _, *words = cli.parsed(list(argv), known_only=True)
        words = [word for word in words if not word.startswith("-")]
        if len(words) != 2:
            raise UserError(
                f"dist-ens members takes a folder and an action, and got "
                f"{counted(len(words), 'word')}. Give both, as in: dist-ens members runs/digits "
                "verify."
            )
        folder, self.action = words
        if self.action not in _ACTIONS:
            raise UserError(
                f"dist-ens members cannot {shortened(self.action)}."
                f"{did_you_mean(self.action, _ACTIONS)} Choose {' or '.join(_ACTIONS)}."
            )
        self.workdir = given_path(folder, "RUN")
        return [argument for argument in argv if argument not in words]


_COMMAND_LINE = _CommandLine()


def main() -> int:
    """Verifies checkpoints, and returns the exit code."""
    workdir = _COMMAND_LINE.workdir
    store = CheckpointStore(workdir, read_only=True)
    steps = store.steps()
    if not steps:
        raise UserError(
            f"There is no checkpoint in {quoted(workdir)}. Give the folder of a run, which has a "
            f"folder {FOLDER}/."
        )
    if _STEP.value is not None:
        store.require_step(_STEP.value)
        steps = [_STEP.value]
    console, damaged = Console(markup=False, highlight=False), []
    for step in steps:
        faults = faults_of(workdir.resolve() / FOLDER / str(step))
        damaged += [step] if faults else []
        console.print(f"Step {step}: {'damaged' if faults else 'sound'}.", soft_wrap=True)
        for fault in faults:
            console.print(f"  {fault}", soft_wrap=True)
    return ExitCode.DAMAGED if damaged else ExitCode.DONE


def run() -> None:
    """Runs the command."""
    cli.run(main, _COMMAND_LINE.prepare, joins_cluster=lambda: False)


if __name__ == "__main__":
    run()
