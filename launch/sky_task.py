"""The task of SkyPilot that runs a command on several nodes."""

import dataclasses

from dist_ens.errors import UserError
from dist_ens.exit_codes import ExitCode
from dist_ens.json_text import JsonDict
from launch.rendered import VARIABLE, check_name
from launch.started_command import shell_line


@dataclasses.dataclass(frozen=True)
class SkySettings:
    """Settings of a task.

    Attributes:
        name: Name of the task.
        arguments: Verb of dist-ens and its flags.
        num_nodes: Number of nodes, each with one process.
        accelerators: Accelerators of a node, such as `H100:8`; None for none.
        cpus: CPU cores of a node; None for no request.
        infra: Cloud, region and zone; None if SkyPilot chooses.
        spot: Whether to use spot instances.
        setup: Shell command that installs dist_ens.
        bucket: URL of a bucket; None for none.
        mount_path: Folder where the nodes see the bucket.
        secrets: Names of environment variables.
    """

    name: str
    arguments: tuple[str, ...]
    num_nodes: int = 1
    accelerators: str | None = None
    cpus: str | None = None
    infra: str | None = None
    spot: bool = False
    setup: str = "pip install ."
    bucket: str | None = None
    mount_path: str = "/runs"
    secrets: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.num_nodes < 1:
            raise UserError(
                f"--num_nodes={self.num_nodes} is less than 1. Use the number of nodes."
            )
        for name in self.secrets:
            if not VARIABLE.fullmatch(name):
                raise UserError(
                    "--secret_env does not name a variable. Use --secret_env=NAME alone: sky reads "
                    "the value from your environment."
                )


def task(settings: SkySettings) -> JsonDict:
    """Returns a task of SkyPilot.

    Args:
        settings: Settings of the task.
    """
    hardware = {
        "accelerators": settings.accelerators,
        "cpus": settings.cpus,
        "infra": settings.infra,
    }
    resources: JsonDict = {name: each for name, each in hardware.items() if each is not None}
    resources |= {
        "use_spot": settings.spot,
        # SkyPilot itself notices a node that is lost. The codes of killed processes must not be
        # here: after an error of one node it kills the others.
        "job_recovery": {"recover_on_exit_codes": [int(ExitCode.PREEMPTED)]},
    }
    made: JsonDict = {
        "name": settings.name,
        "num_nodes": settings.num_nodes,
        "resources": resources,
        "workdir": ".",
    }
    if settings.bucket is not None:
        made["file_mounts"] = {settings.mount_path: {"source": settings.bucket, "mode": "MOUNT"}}
    if settings.secrets:
        made["secrets"] = dict.fromkeys(settings.secrets)
    return made | {"setup": settings.setup, "run": run_script(settings)}


def run_script(settings: SkySettings) -> str:
    """Returns the script that every node runs.

    The shell becomes the command, so that the command gets the signals. The command finds the other
    nodes by the variables of SkyPilot, or by those of a TPU slice.

    Args:
        settings: Settings of the task.
    """
    return shell_line(["exec", "dist-ens", *settings.arguments]) + "\n"
