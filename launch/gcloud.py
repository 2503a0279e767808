"""Calls of gcloud that make a TPU, run a command on its workers, and delete it."""

import dataclasses
from collections.abc import Sequence

from dist_ens.commands import quoted
from dist_ens.errors import UserError
from dist_ens.exit_codes import ExitCode
from launch.arguments import flag
from launch.rendered import check_name
from launch.started_command import shell_line

_LONGEST_NAME = 40
# Files of a run on each worker, in a shell.
_FOLDER = '"$HOME/.dist_ens"'
_LOG, _LOCK, _PID, _CODE = (f"{_FOLDER}/{name}" for name in ("log", "lock", "pid", "exit_code"))
# JAX and libtpu read the slices from the metadata of the VM. A variable that is left over from
# another run would be believed first, and the start would wait for slices that are gone.
_STALE = (
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_SLICE_ID",
    "MEGASCALE_PORT",
)


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A queued resource, and the TPU that it becomes.

    Attributes:
        name: Name of the queued resource.
        zone: Zone of Google Cloud.
        project: Project of Google Cloud; None for that of gcloud.
        num_slices: Number of slices, at least 1.
    """

    name: str
    zone: str
    project: str | None = None
    num_slices: int = 1

    def __post_init__(self) -> None:
        check_name(self.name, _LONGEST_NAME)
        if self.num_slices < 1:
            raise UserError(
                f"--num_slices={self.num_slices} is less than 1. Use the number of slices."
            )

    @property
    def nodes(self) -> list[str]:
        """Names of the slices."""
        if self.num_slices == 1:
            return [self.name]
        return [f"{self.name}-{number}" for number in range(self.num_slices)]

    @property
    def place(self) -> list[str]:
        """Flags of gcloud that say where the TPU is."""
        project = [] if self.project is None else [flag("project", self.project)]
        return [flag("zone", self.zone), *project]


def create_call(
    tpu: Tpu,
    accelerator_type: str,
    runtime_version: str,
    *,
    spot: bool,
    valid_until_duration: str | None,
) -> list[str]:
    """Returns the call of gcloud that asks for a TPU.

    Args:
        tpu: TPU to make.
        accelerator_type: Kind and size of a slice, such as `v5litepod-16`.
        runtime_version: Software of the TPU VMs.
        spot: Whether to use Spot VMs.
        valid_until_duration: Time after which the request expires; None for none.
    """
    if tpu.num_slices == 1:
        slices = [flag("node-id", tpu.name)]
    else:
        slices = [flag("node-count", tpu.num_slices), flag("node-prefix", tpu.name)]
    until = valid_until_duration
    return [
        *_queued_resources("create", tpu),
        *slices,
        flag("accelerator-type", accelerator_type),
        flag("runtime-version", runtime_version),
        *(["--spot"] if spot else []),
        *([] if until is None else [flag("valid-until-duration", until)]),
    ]


def run_calls(tpu: Tpu, arguments: Sequence[str]) -> list[list[str]]:
    """Returns the calls of gcloud that start a command on all workers, one for each slice.

    Args:
        tpu: TPU to run on.
        arguments: Verb of dist-ens and its flags.
    """
    return [_ssh(tpu, node, "all", start_line(arguments)) for node in tpu.nodes]


def follow_call(tpu: Tpu) -> list[str]:
    """Returns the call of gcloud that prints the log of a run until its end."""
    return _ssh(tpu, tpu.nodes[0], "0", follow_line())


def describe_call(tpu: Tpu) -> list[str]:
    """Returns the call of gcloud that prints the state of a queued resource."""
    return _queued_resources("describe", tpu)


def delete_call(tpu: Tpu) -> list[str]:
    """Returns the call of gcloud that deletes a TPU."""
    # Without --force gcloud refuses to delete a queued resource whose TPU exists.
    return [*_queued_resources("delete", tpu), "--force"]


def _queued_resources(verb: str, tpu: Tpu) -> list[str]:
    return ["gcloud", "compute", "tpus", "queued-resources", verb, tpu.name, *tpu.place]


def _ssh(tpu: Tpu, node: str, worker: str, line: str) -> list[str]:
    where = [*tpu.place, flag("worker", worker)]
    return ["gcloud", "compute", "tpus", "tpu-vm", "ssh", node, *where, flag("command", line)]


def start_line(arguments: Sequence[str]) -> str:
    """Returns the line of bash that starts a command on a worker, and returns.

    The command is detached from the connection. It writes a log, and at its end its exit code. A
    lock, which its children keep, refuses a second command while one of them holds the TPU.

    Args:
        arguments: Verb of dist-ens and its flags.
    """
    command = shell_line(["dist-ens", *arguments])
    # A login shell finds commands that pip installed in the folder of the user.
    login = f"unset {' '.join(_STALE)}; {command}; echo $? > {_CODE}.new; mv {_CODE}.new {_CODE}"
    busy = "A command still runs on this worker. Wait for it, or end its processes."
    return (
        f"mkdir -p {_FOLDER} && exec 9> {_LOCK} && "
        f"{{ flock --nonblock 9 || {{ echo {quoted(busy)} >&2; exit 1; }}; }} && "
        f"rm -f {_CODE} && "
        f"{{ nohup setsid bash -lc {quoted(login)} >> {_LOG} 2>&1 < /dev/null & "
        f"echo $! > {_PID}; }}"
    )


def follow_line() -> str:
    """Returns the line of bash that prints a worker's log until the command ends.

    Its exit code is that of the command. A command that was killed together with its shell has
    none, and gets the code of a lost host.
    """
    lost = int(ExitCode.HOST_LOST)
    nothing = "No command was started on this TPU."
    return (
        f"[ -e {_PID} ] || {{ echo {quoted(nothing)} >&2; exit {int(ExitCode.USAGE)}; }}; "
        f'tail -n 1000 --pid="$(cat {_PID})" -F {_LOG}; '
        f'exit "$(cat {_CODE} 2> /dev/null || echo {lost})"'
    )
