"""Runs a command on a TPU slice of Google Cloud.

dist-ens tpu run --name=NAME --zone=ZONE -- train FLAGS
dist-ens tpu follow --name=NAME --zone=ZONE

NAME is a TPU VM, a queued resource, or with --instance_group a managed instance group of Compute
Engine. `run` starts the command after -- on all workers and returns. `follow` prints the log of
worker 0, and ends with the exit code of the command. Each calls gcloud in a script of bash, which
--dry_run prints.
"""

import secrets
import subprocess

from absl import flags

from dist_ens.ground.commands import command_line
from dist_ens.ground.paths import shortened
from dist_ens.storage import is_address
from launch import cli, signals, stdio
from launch.rendered import filled
from launch.started_command import StartedCommand, value_of

_NAME = flags.DEFINE_string("name", None, "Name of the TPU.")
_ZONE = flags.DEFINE_string("zone", None, "Zone of the TPU, such as us-west4-a.")
_PROJECT = flags.DEFINE_string("project", None, "Project. Default: that of gcloud.")
_NUM_SLICES = flags.DEFINE_integer(
    "num_slices", 1, "Slices of a queued resource; several are NAME-0, NAME-1, …", lower_bound=1
)
_INSTANCE_GROUP = flags.DEFINE_bool(
    "instance_group", False, "Whether NAME is a managed instance group of Compute Engine."
)
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Whether to print the script and run nothing.")
_COMMAND = StartedCommand("run", "follow", alone="follow")


def main() -> int:
    """Runs the script that calls gcloud, and returns its exit code."""
    if (workdir := value_of(_COMMAND.arguments, "workdir")) and not is_address(workdir):
        stdio.say(
            f"Note: --workdir={shortened(workdir)} is lost with the TPU, unless it is on a shared "
            "disk. gs://BUCKET/PATH stays."
        )
    name, slices = cli.required(_NAME, "digits"), _NUM_SLICES.value
    script = filled(
        "tpu.sh",
        {flag.name: flag.value for flag in (_NAME, _PROJECT, _INSTANCE_GROUP)},
        zone=cli.required(_ZONE, "us-west4-a"),
        action=_COMMAND.action,
        slices=[name] if slices == 1 else [f"{name}-{number}" for number in range(slices)],
        command=_COMMAND.arguments,
        run_id=secrets.token_hex(4),
    )
    if _DRY_RUN.value:
        print(script, end="")
        return 0
    follow = command_line(
        *("dist-ens", "tpu", "follow"),
        name=name,
        zone=_ZONE.value,
        project=_PROJECT.value,
        num_slices=None if slices == 1 else str(slices),
        instance_group=_INSTANCE_GROUP.value,
    )
    signals.leave_running(f"The command may run on the workers. To follow it: {follow}.")
    code = subprocess.run(["bash", "-c", script]).returncode
    if _COMMAND.action == "run" and code == 0:
        print(f"Next: {follow}")
    return code


run = cli.command(main, _COMMAND.prepare, joins_cluster=lambda: False)

if __name__ == "__main__":
    run()
