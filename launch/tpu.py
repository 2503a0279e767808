"""Runs a command on a TPU slice of Google Cloud.

dist-ens tpu create --name=NAME --zone=ZONE --accelerator_type=TYPE --runtime_version=VERSION
dist-ens tpu run --name=NAME --zone=ZONE -- train FLAGS
dist-ens tpu follow --name=NAME --zone=ZONE
dist-ens tpu delete --name=NAME --zone=ZONE

`create` asks for a queued resource of Cloud TPU, or with --kind=instance_group for a managed
instance group of Compute Engine. `run` starts the command after -- on all workers and returns.
`follow` prints the log of worker 0, and ends with the exit code of the command. Each of them calls
gcloud; with --dry_run it only prints what it would call.
"""

import secrets
from collections.abc import Sequence

from absl import flags

from dist_ens.commands import command_line
from dist_ens.errors import RunError, UserError, did_you_mean, first_line
from dist_ens.paths import shortened
from launch import cli, signals
from launch.arguments import flag
from launch.gcloud import InstanceGroup, QueuedResource
from launch.programs import run_program
from launch.started_command import StartedCommand, shell_line
from launch.worker_lines import (
    NOT_WORKER_0,
    follow_line,
    follow_worker_0_line,
    start_line,
    stop_line,
)

_QUEUED_RESOURCE, _INSTANCE_GROUP = "queued_resource", "instance_group"
_NAME = flags.DEFINE_string("name", None, "Name of the TPU.")
_ZONE = flags.DEFINE_string("zone", None, "Zone of the TPU, such as us-west4-a.")
_PROJECT = flags.DEFINE_string(
    "project", None, "Project. Default: that of gcloud. Needed for an instance group."
)
_KIND = flags.DEFINE_enum(
    "kind",
    _QUEUED_RESOURCE,
    [_QUEUED_RESOURCE, _INSTANCE_GROUP],
    "What Google Cloud makes the TPU from. Give it to each of the four words.",
)
_NUM_SLICES = flags.DEFINE_integer("num_slices", 1, "Number of slices of a queued resource.")
_ACCELERATOR_TYPE = flags.DEFINE_string(
    "accelerator_type",
    None,
    "For create of a queued resource: kind and size of a slice, such as v5litepod-16.",
)
_RUNTIME_VERSION = flags.DEFINE_string(
    "runtime_version",
    None,
    "For create of a queued resource: software of the TPU VMs, such as v2-alpha-tpuv5-lite.",
)
_VALID_UNTIL_DURATION = flags.DEFINE_string(
    "valid_until_duration",
    None,
    "For create of a queued resource: time after which the request expires, such as 6h.",
)
_MACHINE_TYPE = flags.DEFINE_string(
    "machine_type",
    None,
    "For create of an instance group: machine type of the VMs, such as ct6e-standard-4t.",
)
_TPU_TOPOLOGY = flags.DEFINE_string(
    "tpu_topology",
    None,
    "For create of an instance group: chips of the slice along each axis, such as 4x4.",
)
_IMAGE_FAMILY = flags.DEFINE_string(
    "image_family",
    None,
    "For create of an instance group: image of the VMs, such as "
    "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e.",
)
_IMAGE_PROJECT = flags.DEFINE_string(
    "image_project",
    "ubuntu-os-accelerator-images",
    "For create of an instance group: project of the image.",
)
_SPOT = flags.DEFINE_bool("spot", False, "For create: whether to use Spot VMs.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Whether to print the calls of gcloud only.")
_OF_KIND = {
    _QUEUED_RESOURCE: (_NUM_SLICES, _ACCELERATOR_TYPE, _RUNTIME_VERSION, _VALID_UNTIL_DURATION),
    _INSTANCE_GROUP: (_MACHINE_TYPE, _TPU_TOPOLOGY, _IMAGE_FAMILY, _IMAGE_PROJECT),
}
_INSTALL = "Install the Google Cloud CLI, or add --dry_run to see what would be called."
_UNKNOWN_VM = "VM"  # Stands in a dry run for the name of each VM.


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
    tpu = _tpu()
    signals.leave_running(_left_running(tpu))
    match _ACTION.word:
        case "create":
            _create(tpu)
        case "run":
            _run(tpu)
        case "follow":
            return _follow(tpu)
        case "delete":
            _delete(tpu)
    if not _DRY_RUN.value:
        for line in _next_commands(tpu):
            print(f"Next: {line}")
    return 0


def _tpu() -> QueuedResource | InstanceGroup:
    """Returns the TPU that the flags describe.

    Raises:
        UserError: If a flag is missing, or belongs to the other kind.
    """
    (other,) = (kind for kind in _OF_KIND if kind != _KIND.value)
    mixed = [f"--{each.name}" for each in _OF_KIND[other] if flags.FLAGS[each.name].present]
    if mixed:
        raise UserError(
            f"{', '.join(mixed)} cannot be used with --kind={_KIND.value}. Remove it, or use "
            f"--kind={other}."
        )
    name, zone = cli.required(_NAME, "digits"), cli.required(_ZONE, "us-west4-a")
    if _KIND.value == _INSTANCE_GROUP:
        return InstanceGroup(name, zone, cli.required(_PROJECT, "my-project"))
    return QueuedResource(name, zone, _PROJECT.value, _NUM_SLICES.value)


def _create(tpu: QueuedResource | InstanceGroup) -> None:
    """Asks for the TPU.

    Raises:
        UserError: If a flag is missing or wrong.
        RunError: If gcloud fails.
    """
    if isinstance(tpu, InstanceGroup):
        calls = tpu.create_calls(
            cli.required(_MACHINE_TYPE, "ct6e-standard-4t"),
            cli.required(_TPU_TOPOLOGY, "4x4"),
            cli.required(_IMAGE_FAMILY, "ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e"),
            _IMAGE_PROJECT.value,
            spot=_SPOT.value,
        )
    else:
        calls = tpu.create_calls(
            cli.required(_ACCELERATOR_TYPE, "v5litepod-16"),
            cli.required(_RUNTIME_VERSION, "v2-alpha-tpuv5-lite"),
            spot=_SPOT.value,
            valid_until_duration=_VALID_UNTIL_DURATION.value,
        )
    for number, call in enumerate(calls):
        if code := _call(call):
            undo = (
                f"Remove what was made: {_own_line('delete')}. Then remove" if number else "Remove"
            )
            raise RunError(
                f"gcloud ended with exit code {code}, for the reason that it printed above. {undo} "
                "the cause, and run the same command again."
            )


def _run(tpu: QueuedResource | InstanceGroup) -> None:
    """Starts the command on all workers, or on none of them.

    Raises:
        RunError: If gcloud fails.
    """
    run_id = secrets.token_hex(4)
    start, stop = start_line(_ACTION.command.arguments, run_id), stop_line(run_id)
    workers = _workers(tpu, "all")
    for number, ssh in enumerate(workers):
        if code := _call([*ssh, flag("command", start)]):
            # The workers that have started would wait for those that have not.
            tried = workers[: number + 1]
            codes = [_call([*each, flag("command", stop)]) for each in tried]
            left = [_target(each) for each, code in zip(tried, codes, strict=True) if code]
            told = "was stopped where it had started"
            if left:
                told = f"may still run on {', '.join(left)}"
            raise RunError(
                f"gcloud ended with exit code {code} on {_target(ssh)}, for the reason that it "
                f"printed above. The new command {told}. Remove the cause, and run the same "
                "command again."
            )


def _follow(tpu: QueuedResource | InstanceGroup) -> int:
    """Prints the log of worker 0 of the first slice, and returns the exit code of the command.

    Raises:
        RunError: If no VM is worker 0.
    """
    if isinstance(tpu, QueuedResource):
        return _call([*_workers(tpu, "0")[0], flag("command", follow_line())])
    for ssh in _workers(tpu, "0"):
        code = _call([*ssh, flag("command", follow_worker_0_line())])
        if code != NOT_WORKER_0:
            return code
    raise RunError(
        f"No VM of the instance group {tpu.name} says that it is worker 0 of a TPU slice. Look at "
        f"its VMs: {shell_line(tpu.look_call())}."
    )


def _delete(tpu: QueuedResource | InstanceGroup) -> None:
    """Deletes the TPU, and goes on after an error, because a part may be deleted already.

    Raises:
        RunError: If gcloud fails.
    """
    codes = [_call(call) for call in tpu.delete_calls()]
    if code := next(filter(None, codes), 0):
        raise RunError(
            f"gcloud ended with exit code {code}, for the reason that it printed above. Remove the "
            "cause, and run the same command again."
        )


def _workers(tpu: QueuedResource | InstanceGroup, worker: str) -> list[list[str]]:
    """Returns the calls of gcloud that run a command on workers, without the command.

    Args:
        tpu: TPU to reach.
        worker: Number of the worker of each slice of a queued resource; `all` for all. Calls to an
            instance group go to all of its VMs.

    Raises:
        RunError: If gcloud does not list the VMs of an instance group.
    """
    if isinstance(tpu, QueuedResource):
        return tpu.ssh_calls(worker)
    if _DRY_RUN.value:
        print(f"{shell_line(tpu.list_call())}  # prints the name of each {_UNKNOWN_VM}")
        return tpu.ssh_calls([_UNKNOWN_VM])
    listed = run_program(tpu.list_call(), _INSTALL, keeps_output=True)
    vms = listed.stdout.split()
    if listed.returncode or not vms:
        raise RunError(
            f"gcloud lists no VM of the instance group {tpu.name}: "
            f"{first_line(RuntimeError(listed.stderr or 'the group is empty'))} Wait until its VMs "
            f"are there: {shell_line(tpu.look_call())}."
        )
    return tpu.ssh_calls(vms)


def _target(ssh: Sequence[str]) -> str:
    """Returns the name of the slice or the VM that a call of gcloud goes to."""
    return ssh[ssh.index("ssh") + 1]


def _call(call: Sequence[str]) -> int:
    """Runs a call and returns its exit code; prints it in a dry run, and returns 0."""
    if _DRY_RUN.value:
        print(shell_line(call))
        return 0
    return run_program(call, _INSTALL).returncode


def _own_line(word: str) -> str:
    """Returns the command line of this verb with another word, for the same TPU."""
    is_group, slices = _KIND.value == _INSTANCE_GROUP, _NUM_SLICES.value
    return command_line(
        "dist-ens",
        "tpu",
        word,
        name=_NAME.value,
        zone=_ZONE.value,
        project=_PROJECT.value,
        kind=_INSTANCE_GROUP if is_group else None,
        num_slices=None if slices == 1 else str(slices),
    )


def _left_running(tpu: QueuedResource | InstanceGroup) -> str:
    """Returns what a signal leaves unfinished while gcloud works."""
    match _ACTION.word:
        case "create":
            return f"The TPU may be made already. Look at it: {shell_line(tpu.look_call())}."
        case "delete":
            return f"The TPU may be left. Look at it: {shell_line(tpu.look_call())}."
    return f"The command may run on the workers. To follow it: {_own_line('follow')}."


def _next_commands(tpu: QueuedResource | InstanceGroup) -> list[str]:
    """Returns the commands that a person types after the word on the command line."""
    match _ACTION.word:
        case "create":
            state = "all are RUNNING" if isinstance(tpu, InstanceGroup) else "its state is ACTIVE"
            return [
                f"{shell_line(tpu.look_call())}  # until {state}",
                f"{_own_line('run')} -- train …",
            ]
        case "run":
            return [_own_line("follow")]
    return []


def run() -> None:
    """Runs the command."""
    cli.run(main, _ACTION.prepare, joins_cluster=lambda: False)


if __name__ == "__main__":
    run()
