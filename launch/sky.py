"""Writes a task of SkyPilot: dist-ens sky --name=NAME --accelerators=H100:8 … -- train FLAGS.

SkyPilot copies the current folder to every node, runs the setup there, and then the command after
--. As a managed job it starts the command again after a preemption.
"""

from absl import flags

from dist_ens.commands import command_line
from launch import cli
from launch.arguments import flag
from launch.path_flags import define_path
from launch.rendered import check_workdir, deliver, written_file
from launch.sky_task import SkySettings, task
from launch.started_command import StartedCommand
from launch.yaml_text import yaml_text

_NAME = flags.DEFINE_string("name", None, "Name of the task.")
_NUM_NODES = flags.DEFINE_integer("num_nodes", 1, "Number of nodes, each with one process.")
_ACCELERATORS = flags.DEFINE_string(
    "accelerators", None, "Accelerators of a node, such as H100:8. Default: none."
)
_CPUS = flags.DEFINE_string("cpus", None, "CPU cores of a node, such as 8 or 8+.")
_INFRA = flags.DEFINE_string(
    "infra", None, "Cloud, region and zone, such as gcp/us-central1. Default: SkyPilot chooses."
)
_SPOT = flags.DEFINE_bool("spot", False, "Whether to use spot instances.")
_SETUP = flags.DEFINE_string("setup", "pip install .", "Shell command that installs dist_ens.")
_BUCKET = flags.DEFINE_string("bucket", None, "Bucket for the workdir, such as s3://my-runs.")
_MOUNT_PATH = flags.DEFINE_string("mount_path", "/runs", "Folder where nodes see the bucket.")
_SECRET_ENV = flags.DEFINE_list(
    "secret_env", [], "Names of environment variables with secrets, separated by commas."
)
_OUTPUT = define_path("output", None, "File to write. Default: standard output.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Whether to print the file and write nothing.")
_COMMAND = StartedCommand()


def main() -> None:
    """Writes the task, and prints the next commands."""
    settings = SkySettings(
        name=cli.required(_NAME, "digits"),
        arguments=_COMMAND.arguments,
        num_nodes=_NUM_NODES.value,
        accelerators=_ACCELERATORS.value,
        cpus=_CPUS.value,
        infra=_INFRA.value,
        spot=_SPOT.value,
        setup=_SETUP.value,
        bucket=_BUCKET.value,
        mount_path=_MOUNT_PATH.value,
        secrets=tuple(_SECRET_ENV.value),
    )
    check_workdir(settings.arguments, _BUCKET, settings.mount_path)
    text = yaml_text(task(settings))
    deliver(text, _OUTPUT, _next_commands(settings), dry_run=_DRY_RUN.value)


def _next_commands(settings: SkySettings) -> list[str]:
    """Returns the commands that a person types next. If no file was written, one writes it.

    Args:
        settings: Settings of the task.
    """
    secrets = [word for name in settings.secrets for word in ("--secret", name)]
    file, write = str(_OUTPUT.value or "task.yaml"), list[str]()
    if written_file(_OUTPUT, dry_run=_DRY_RUN.value) is None:
        added = [] if _OUTPUT.value else [flag("output", file)]
        write = [f"{_COMMAND.line('dist-ens', 'sky', added=added)}  # write the file"]
    return [
        *write,
        f"{command_line('sky', 'jobs', 'launch', *secrets, file)}  # start it",
        f"{command_line('sky', 'jobs', 'logs', name=settings.name)}  # its log",
        f"{command_line('sky', 'jobs', 'queue')}  # its restarts",
        f"{command_line('sky', 'jobs', 'cancel', name=settings.name)}  # stop it",
    ]


def run() -> None:
    """Runs the command."""
    cli.run(main, _COMMAND.prepare, joins_cluster=lambda: False)


if __name__ == "__main__":
    run()
