"""Lines of bash that start, stop and follow a command on a worker of a TPU."""

from collections.abc import Sequence

from dist_ens.commands import quoted
from dist_ens.exit_codes import ExitCode
from launch.started_command import shell_line

# Files of a run on each worker, in a shell.
_FOLDER = '"$HOME/.dist_ens"'
_LOG, _LOCK, _PID, _CODE, _RUN = (
    f"{_FOLDER}/{name}" for name in ("log", "lock", "pid", "exit_code", "run")
)
# JAX and libtpu read the slices from the metadata of the VM. A variable that is left over from
# another run would be believed first, and the start would wait for slices that are gone.
_STALE = (
    "MEGASCALE_COORDINATOR_ADDRESS",
    "MEGASCALE_NUM_SLICES",
    "MEGASCALE_SLICE_ID",
    "MEGASCALE_PORT",
)


# Workers of an instance group are asked for their number, as JAX asks for it.
_NUMBER = (
    "curl -sf -H 'Metadata-Flavor: Google' http://metadata.google.internal/computeMetadata/v1/"
    "instance/attributes/agent-worker-number"
)
NOT_WORKER_0 = 100  # Exit code of following a worker of an instance group that is not number 0.


def start_line(arguments: Sequence[str], run_id: str) -> str:
    """Returns the line of bash that starts a command on a worker, and returns.

    The command is detached from the connection. It writes a log, and at its end its exit code. A
    lock, which its children keep, refuses a second command while one of them holds the TPU.

    Args:
        arguments: Verb of dist-ens and its flags.
        run_id: Name of this run, by which `stop_line` finds it.
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
        f"echo $! > {_PID}; echo {quoted(run_id)} > {_RUN}; }}"
    )


def stop_line(run_id: str) -> str:
    """Returns the line of bash that ends a run on a worker, and no other command.

    Args:
        run_id: Name of the run.
    """
    return (
        f'[ "$(cat {_RUN} 2> /dev/null)" != {quoted(run_id)} ] || '
        f'kill -TERM -- "-$(cat {_PID})" 2> /dev/null || true'
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


def follow_worker_0_line() -> str:
    """Returns the line of bash that follows a worker of an instance group, if its number is 0.

    The exit code of the other workers is `NOT_WORKER_0`.
    """
    return f'[ "$({_NUMBER})" = 0 ] || exit {NOT_WORKER_0}; {follow_line()}'
