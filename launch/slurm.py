"""Runs a command as a Slurm job: dist-ens slurm [render|submit] --nodes=2 … -- train ….

`render` prints the script for sbatch, or writes it to --output. `submit` gives the script to sbatch
and follows the job's log. The job is requeued after a preemption and after the loss of a machine.
"""

import pathlib
import re
import sys
import time
from collections.abc import Sequence

from absl import flags

from dist_ens.errors import RunError, UserError, counted, did_you_mean, first_line
from dist_ens.exit_codes import ExitCode
from dist_ens.paths import shortened
from launch import cli, ends, signals
from launch.path_flags import define_path
from launch.programs import run_program
from launch.slurm_script import Job, render
from launch.started_command import StartedCommand, shell_line

_NODES = flags.DEFINE_integer("nodes", 1, "Number of nodes.", lower_bound=1)
_GPUS_PER_NODE = flags.DEFINE_integer("gpus_per_node", 0, "GPUs of each node.", lower_bound=0)
_TASKS_PER_NODE = flags.DEFINE_integer(
    "tasks_per_node",
    None,
    "Processes on each node. Default: one for each GPU, or one on a node without GPUs.",
    lower_bound=1,
)
_CPUS_PER_TASK = flags.DEFINE_integer(
    "cpus_per_task", None, "CPUs of each process. Default: Slurm's.", lower_bound=1
)
_TIME = flags.DEFINE_string(
    "time", None, "Time limit of the job, such as 4:00:00. Default: that of the partition."
)
_PARTITION = flags.DEFINE_string("partition", None, "Partition of the job.")
_ACCOUNT = flags.DEFINE_string("account", None, "Account that is charged for the job.")
_NAME = flags.DEFINE_string("name", "dist_ens", "Name of the job.")
_LOG = flags.DEFINE_string(
    "log",
    None,
    "File that the job's output is appended to, with sbatch's patterns. Default: "
    "dist_ens-%j.log, or dist_ens-%A_%a.log with --configs.",
)
_GRACE_SECS = flags.DEFINE_integer(
    "grace_secs",
    120,
    "Time before the time limit at which the run is told to save, in seconds.",
    lower_bound=1,
    upper_bound=65535,
)
_MAX_RESTARTS = flags.DEFINE_integer(
    "max_restarts",
    100,
    "Largest number of restarts of the job. Restarts by Slurm itself count, too.",
    lower_bound=0,
)
_CONFIGS = flags.DEFINE_list(
    "configs",
    [],
    "Config files of a sweep, separated by commas. Each is one task of a job array, with a workdir "
    "of its own inside the command's --workdir.",
)
_SETUP = define_path(
    "setup", None, "File of shell commands that the job runs first, such as module load."
)
_OUTPUT = define_path("output", None, "File to write the script to. Default: print it.")
_DRY_RUN = flags.DEFINE_boolean("dry_run", False, "Print what would be done, and do nothing.")

_ACTIONS = ("render", "submit")
# States after which Slurm does nothing more with a job.
_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
}
_POLL_SECS = 3.0
_ON_LOGIN_NODE = (
    "Submit on a login node of the cluster, or write the script for it: dist-ens slurm render "
    "--output=job.sh."
)


class _CommandLine:
    """The command line of this verb: an action, flags, and the command after `--`.

    Attributes:
        action: One of `_ACTIONS`.
        started: The command after `--`.
    """

    def __init__(self) -> None:
        self.action = _ACTIONS[0]
        self.started = StartedCommand()

    def prepare(self, argv: Sequence[str]) -> list[str]:
        """Returns the command line without the action, and without the command after `--`.

        Raises:
            UserError: If the action is unknown, or the command after `--` cannot be started.
        """
        before = list(argv)
        if before[1:] and not before[1].startswith("-"):
            self.action = before.pop(1)
            if self.action not in _ACTIONS:
                raise UserError(
                    f"dist-ens slurm cannot {shortened(self.action)}."
                    f"{did_you_mean(self.action, _ACTIONS)} Choose {' or '.join(_ACTIONS)}."
                )
        return self.started.prepare(before)


_COMMAND_LINE = _CommandLine()


def main() -> int:
    """Renders or submits the job. Returns the exit code."""
    cli.check_outputs(_OUTPUT)
    submits = _COMMAND_LINE.action == "submit"
    script = render(_job())
    if _OUTPUT.value is not None and not _DRY_RUN.value:
        cli.write_file(_OUTPUT, lambda path: _write(path, script))
    elif not submits or _DRY_RUN.value:
        print(script, end="")
    if submits and not _DRY_RUN.value:
        return _submit(script)
    # The standard output has the script alone, so that it can be piped into sbatch.
    print(f"Next: {_next_command()}", file=sys.stderr)
    return ExitCode.DONE


def _write(path: pathlib.Path, script: str) -> None:
    """Writes a script."""
    path.write_text(script, encoding="utf-8")


def _job() -> Job:
    """Returns the job that the flags describe."""
    return Job(
        command=_COMMAND_LINE.started.arguments,
        python=sys.executable,
        nodes=_NODES.value,
        gpus_per_node=_GPUS_PER_NODE.value,
        tasks_per_node=_TASKS_PER_NODE.value,
        cpus_per_task=_CPUS_PER_TASK.value,
        time=cli.in_form(
            _TIME,
            r"(\d+-)?\d+(:\d+){0,2}|UNLIMITED|INFINITE",
            "a time that sbatch reads. Use hours, minutes and seconds such as 4:00:00, days and "
            "hours such as 1-12, or minutes such as 240",
        ),
        partition=_PARTITION.value,
        account=_ACCOUNT.value,
        name=_NAME.value,
        log=_LOG.value,
        grace_secs=_GRACE_SECS.value,
        max_restarts=_MAX_RESTARTS.value,
        configs=tuple(_CONFIGS.value),
        setup=_SETUP.value.absolute() if _SETUP.value is not None else None,
    )


def _next_command() -> str:
    """Returns the command that a person types after a script was rendered."""
    if _OUTPUT.value is not None and not _DRY_RUN.value:
        return shell_line(["sbatch", str(_OUTPUT.value)])
    return _COMMAND_LINE.started.line("dist-ens", "slurm", "submit")


def _submit(script: str) -> int:
    """Submits a script, and follows the log of the job until the job ends.

    Args:
        script: Script for sbatch.

    Returns:
        Exit code of the job. 0 for a sweep, whose tasks are not followed.

    Raises:
        UserError: If sbatch is not on this machine.
        RunError: If Slurm does not take the job, or ends it.
    """
    signals.leave_running(
        "The job may be submitted already. Look for it before you submit it again: squeue --me."
    )
    job_id = _submitted(script)
    signals.leave_running(f"Job {job_id} is left running. To cancel it: scancel {job_id}.")
    if _CONFIGS.value:
        tasks = counted(len(_CONFIGS.value), "task")
        print(f"Submitted job {job_id} with {tasks}. Next: {shell_line(['squeue', '-j', job_id])}")
        return ExitCode.DONE
    log = (_described(job_id) or {}).get("StdOut", "")
    signals.leave_running(
        f"Job {job_id} is left running. To follow it: {shell_line(['tail', '-F', log])}. To cancel "
        f"it: scancel {job_id}."
    )
    ends.say(f"Submitted job {job_id}. Its log is {log}. Ctrl-C leaves the job running.")
    return _ended_code(job_id, *_follow(job_id, pathlib.Path(log)))


def _submitted(script: str) -> str:
    """Submits a script, and returns the id of the job.

    Args:
        script: Script for sbatch.

    Raises:
        UserError: If sbatch is not on this machine.
        RunError: If Slurm does not take the job.
    """
    ended = run_program(["sbatch", "--parsable"], _ON_LOGIN_NODE, text=script, keeps_output=True)
    if ended.returncode:
        why = first_line(RuntimeError(ended.stderr)).removeprefix("sbatch: error: ")
        raise RunError(f"Slurm does not take the job: {why} Correct the flags before --.")
    # A cluster's name may follow after a semicolon.
    return ended.stdout.strip().partition(";")[0]


def _ended_code(job_id: str, state: str, code: int) -> int:
    """Returns the exit code of a job that has ended, and prints it.

    Args:
        job_id: Id of the job.
        state: Last state of the job.
        code: Exit code of its script.

    Raises:
        RunError: If the script did not end by itself.
    """
    if state != "COMPLETED" and not (state == "FAILED" and code):
        raise RunError(
            f"Job {job_id} ended in the state {state}. Submit it again to resume from the last "
            "checkpoint."
        )
    ends.say(f"Job {job_id} ended with exit code {code}.")
    return code


def _follow(job_id: str, log: pathlib.Path) -> tuple[str, int]:
    """Prints the log of a job as it grows.

    Args:
        job_id: Id of the job.
        log: File that Slurm writes the output of the job to. It may not exist yet.

    Returns:
        The last state of the job, and its exit code.
    """
    printed, state, code = 0, "PENDING", 0
    while state not in _ENDED:
        described = _described(job_id)
        if described is None:  # Slurm forgets a job some minutes after its end.
            return "UNKNOWN", 0
        if not described:
            time.sleep(_POLL_SECS)
            continue
        state = described["JobState"]
        code = int(described["ExitCode"].partition(":")[0])
        if log.exists():
            with log.open("rb") as file:
                file.seek(printed)
                new = file.read()
            printed += len(new)
            sys.stdout.write(new.decode(errors="backslashreplace"))
            sys.stdout.flush()
        if state not in _ENDED:
            time.sleep(_POLL_SECS)
    return state, code


def _described(job_id: str) -> dict[str, str] | None:
    """Returns what Slurm knows about a job.

    Returns:
        Values by their names; none of them if Slurm does not answer now. None if it does not know
        the job.
    """
    shown = run_program(["scontrol", "show", "job", job_id], _ON_LOGIN_NODE, keeps_output=True)
    if "Invalid job id" in shown.stderr:
        return None
    values = re.findall(r"(\w+)=(\S*)", shown.stdout)
    # The path of the log can have spaces, and has a line of its own.
    return dict(values + re.findall(r"^ *(StdOut)=(.*)$", shown.stdout, re.MULTILINE))


def run() -> None:
    """Runs the command."""
    cli.run(main, _COMMAND_LINE.prepare, joins_cluster=lambda: False)


if __name__ == "__main__":
    run()
