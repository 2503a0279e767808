"""Runs a command on a TPU slice of Google Cloud.

dist-ens tpu create --name=NAME --zone=ZONE --accelerator_type=TYPE --runtime_version=VERSION
dist-ens tpu run --name=NAME --zone=ZONE -- train FLAGS
dist-ens tpu follow --name=NAME --zone=ZONE
dist-ens tpu delete --name=NAME --zone=ZONE

`create` asks for a queued resource. `run` starts the command after -- on all workers and returns.
`follow` prints the log of worker 0, and ends with the exit code of the command. Each of them calls
gcloud; with --dry_run it only prints what it would call.
"""

import subprocess
from collections.abc import Sequence

from absl import flags

from dist_ens.commands import command_line
from dist_ens.config import did_you_mean
from dist_ens.errors import RunError, UserError
from dist_ens.paths import shortened
from launch import cli
from launch.gcloud import Tpu, create_call, delete_call, describe_call, follow_call, run_calls
from launch.rendered import given
from launch.started_command import StartedCommand, shell_line

_NAME = flags.DEFINE_string("name", None, "Name of the queued resource and of its TPU.")
_ZONE = flags.DEFINE_string("zone", None, "Zone of the TPU, such as us-west4-a.")
_PROJECT = flags.DEFINE_string("project", None, "Project. Default: that of gcloud.")
_NUM_SLICES = flags.DEFINE_integer("num_slices", 1, "Number of slices of the TPU.")
_ACCELERATOR_TYPE = flags.DEFINE_string(
    "accelerator_type", None, "For create: kind and size of a slice, such as v5litepod-16."
)
_RUNTIME_VERSION = flags.DEFINE_string(
    "runtime_version", None, "For create: software of the TPU VMs, such as v2-alpha-tpuv5-lite."
)
_SPOT = flags.DEFINE_bool("spot", False, "For create: whether to use Spot VMs.")
_VALID_UNTIL_DURATION = flags.DEFINE_string(
    "valid_until_duration", None, "For create: time after which the request expires, such as 6h."
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Whether to print the calls of gcloud only.")


class _Action:
    """The word on the command line, and the command after `--`.

    Attributes:
        word: One of `WORDS`.
        command: Command to start, if the word is `run`.
    """

    WORDS = ("create", "run", "follow", "delete")

    def __init__(self) -> None:
        self.word = ""
        self.command = StartedCommand()

    def prepare(self, argv: Sequence[str]) -> list[str]:
        """Takes the word and the command from the command line, and returns the other arguments.

        Args:
            argv: Command line, with the program's name first.

        Raises:
            UserError: If the word is missing or is not known.
        """
        program, *rest = argv
        if not rest or rest[0] not in self.WORDS:
            word = rest[0] if rest else ""
            raise UserError(
                f"The word after dist-ens tpu must be one of {', '.join(self.WORDS)}: got "
                f"{shortened(word)}.{did_you_mean(word, self.WORDS)} Type it first, such as: "
                "dist-ens tpu follow --name=digits --zone=us-west4-a."
            )
        self.word = rest[0]
        own = [program, *rest[1:]]
        return self.command.prepare(own) if self.word == "run" else own


_ACTION = _Action()


def main() -> int:
    """Calls gcloud, and prints the next command."""
    tpu = Tpu(given(_NAME, "digits"), given(_ZONE, "us-west4-a"), _PROJECT.value, _NUM_SLICES.value)
    calls = _calls(tpu)
    if _DRY_RUN.value:
        print("\n".join(map(shell_line, calls)))
        return 0
    for call in calls:
        code = _call(call)
        if _ACTION.word == "follow":
            return code
        if code:
            raise RunError(
                f"gcloud ended with exit code {code}, for the reason that it printed above. Remove "
                "the cause, and run the same command again."
            )
    for line in _next_commands(tpu):
        print(f"Next: {line}")
    return 0


def _calls(tpu: Tpu) -> list[list[str]]:
    """Returns the calls of gcloud for the word on the command line."""
    match _ACTION.word:
        case "run":
            return run_calls(tpu, _ACTION.command.arguments)
        case "follow":
            return [follow_call(tpu)]
        case "delete":
            return [delete_call(tpu)]
    return [
        create_call(
            tpu,
            given(_ACCELERATOR_TYPE, "v5litepod-16"),
            given(_RUNTIME_VERSION, "v2-alpha-tpuv5-lite"),
            spot=_SPOT.value,
            valid_until_duration=_VALID_UNTIL_DURATION.value,
        )
    ]


def _call(call: Sequence[str]) -> int:
    """Runs a call, and returns its exit code."""
    try:
        return subprocess.run(call).returncode
    except FileNotFoundError as error:
        raise UserError(
            "gcloud is not on the PATH. Install the Google Cloud CLI, or add --dry_run to see what "
            "would be called."
        ) from error


def _next_commands(tpu: Tpu) -> list[str]:
    """Returns the commands that a person types after the word on the command line."""
    slices = None if tpu.num_slices == 1 else str(tpu.num_slices)
    where = {"name": tpu.name, "zone": tpu.zone, "project": tpu.project, "num_slices": slices}
    match _ACTION.word:
        case "create":
            start = command_line("dist-ens", "tpu", "run", **where)
            return [
                f"{shell_line(describe_call(tpu))}  # until its state is ACTIVE",
                f"{start} -- train …",
            ]
        case "run":
            return [command_line("dist-ens", "tpu", "follow", **where)]
    return []


def run() -> None:
    """Runs the command."""
    cli.run(main, _ACTION.prepare, joins_cluster=lambda: False)


if __name__ == "__main__":
    run()
