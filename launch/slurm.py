"""Runs a command as a Slurm job: dist-ens slurm [render|submit] --nodes=2 … -- train ….

`render` prints the script for sbatch, or writes it to --output. `submit` gives the script to sbatch
and follows the job's log. The job is requeued after a preemption and after the loss of a machine.
"""

import pathlib
import re
import subprocess
import sys
import time

from absl import flags

from dist_ens.ground.commands import command_line
from dist_ens.ground.errors import ExitCode, RunError, UserError, counted, first_line
from launch import cli, signals, stdio
from launch.path_flags import define_file, define_path
from launch.rendered import deliver
from launch.slurm_script import render
from launch.started_command import StartedCommand

_CONFIGS = flags.DEFINE_list(
    "configs",
    [],
    "Config files of a sweep, separated by commas. Each is one task of a job array, with a workdir "
    "of its own inside the command's --workdir.",
)
_JOB = (
    flags.DEFINE_integer("nodes", 1, "Number of nodes.", lower_bound=1),
    flags.DEFINE_integer("gpus_per_node", 0, "GPUs of each node.", lower_bound=0),
    flags.DEFINE_integer(
        "tasks_per_node", None, "Processes on each node. Default: one for each GPU.", lower_bound=1
    ),
    flags.DEFINE_integer(
        "cpus_per_task", None, "CPUs of each process. Default: Slurm's.", lower_bound=1
    ),
    flags.DEFINE_string(
        "time", None, "Time limit of the job, such as 4:00:00. Default: that of the partition."
    ),
    flags.DEFINE_string("partition", None, "Partition of the job."),
    flags.DEFINE_string("account", None, "Account that is charged for the job."),
    flags.DEFINE_string("name", "dist_ens", "Name of the job."),
    flags.DEFINE_string(
        "log", None, "File for the output. Default: dist_ens-%j.log; of a sweep dist_ens-%A_%a.log."
    ),
    flags.DEFINE_integer(
        "grace_secs",
        120,
        "Seconds before the time limit at which the run is told to save.",
        lower_bound=1,
        upper_bound=65535,
    ),
    flags.DEFINE_integer(
        "max_restarts", 100, "Most restarts of the job, also by Slurm itself.", lower_bound=0
    ),
    define_path(
        "setup", None, "File of shell commands that the job runs first, such as module load."
    ),
    _CONFIGS,
)
_OUTPUT = define_file("output", None, "For render: file to write the script to. Default: print it.")
_DRY_RUN = flags.DEFINE_boolean("dry_run", False, "Print what would be done, and do nothing.")

# States after which Slurm does nothing more with a job. It forgets a job some minutes later.
_FORGOTTEN = {"JobState": "UNKNOWN", "ExitCode": "0:0"}
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT", "UNKNOWN"),
)
_POLL_SECS = 3.0
_COMMAND = StartedCommand("render", "submit")


def main() -> int:
    """Renders or submits the job. Returns the exit code."""
    options = {flag.name: flag.value for flag in _JOB}
    script = render(_COMMAND.arguments, sys.executable, **options)
    if _COMMAND.action == "submit" and not _DRY_RUN.value:
        return _submit(script)
    following = _COMMAND.line("dist-ens", "slurm", "submit")
    if _OUTPUT.value is not None and not _DRY_RUN.value:
        following = command_line("sbatch", str(_OUTPUT.value))
    deliver(script, _OUTPUT, [following], dry_run=_DRY_RUN.value)
    return ExitCode.DONE


def _submit(script: str) -> int:
    """Submits a script, and follows the log of the job until the job ends."""
    signals.leave_running(
        "The job may be submitted already. Look for it before you submit it again: squeue --me."
    )
    ended = _slurm("sbatch", "--parsable", script=script)
    if ended.returncode:
        why = first_line(RuntimeError(ended.stderr)).removeprefix("sbatch: error: ")
        raise RunError(f"Slurm does not take the job: {why} Correct the flags before --.")
    job_id = ended.stdout.strip().partition(";")[0]  # A cluster's name may follow.
    if _CONFIGS.value:
        tasks = counted(len(_CONFIGS.value), "task")
        print(f"Submitted job {job_id} with {tasks}. Next: squeue -j {job_id}")
        return ExitCode.DONE
    log = _described(job_id).get("StdOut", "")
    signals.leave_running(
        f"Job {job_id} is left running. To follow it: {command_line('tail', '-F', log)}. To cancel "
        f"it: scancel {job_id}."
    )
    stdio.say(f"Submitted job {job_id}. Its log is {log}. Ctrl-C leaves the job running.")
    state, code = _follow(job_id, pathlib.Path(log))
    if state != "COMPLETED" and not (state == "FAILED" and code):
        raise RunError(
            f"Job {job_id} ended in the state {state}. Submit it again to resume from the last "
            "checkpoint."
        )
    stdio.say(f"Job {job_id} ended with exit code {code}.")
    return code


def _follow(job_id: str, log: pathlib.Path) -> tuple[str, int]:
    """Prints the log of a job as it grows, and returns the job's last state and its exit code."""
    printed = 0
    while True:
        job = _described(job_id)
        if log.is_file():
            with log.open("rb") as file:
                file.seek(printed)
                new = file.read()
            printed += len(new)
            sys.stdout.write(new.decode(errors="backslashreplace"))
            sys.stdout.flush()
        if job.get("JobState") in _ENDED:
            return job["JobState"], int(job["ExitCode"].partition(":")[0])
        time.sleep(_POLL_SECS)


def _described(job_id: str) -> dict[str, str]:
    """Returns what Slurm knows about a job, by names; nothing if Slurm does not answer now."""
    shown = _slurm("scontrol", "show", "job", job_id)
    if "Invalid job id" in shown.stderr:
        return _FORGOTTEN
    values = re.findall(r"(\w+)=(\S*)", shown.stdout)
    # The path of the log can have spaces, and has a line of its own.
    return dict(values + re.findall(r"^ *(StdOut)=(.*)$", shown.stdout, re.MULTILINE))


def _slurm(*call: str, script: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program of Slurm to its end, with a script as its standard input."""
    try:
        return subprocess.run(call, input=script, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UserError(
            f"{call[0]} is not on the PATH. Submit on a login node of the cluster."
        ) from error


run = cli.command(main, _COMMAND.prepare, joins_cluster=lambda: False)

if __name__ == "__main__":
    run()
