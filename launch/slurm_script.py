"""The script by which Slurm runs a command, and starts it again after a preemption."""

import dataclasses
import pathlib
import re

from dist_ens.errors import UserError
from dist_ens.exit_codes import RESTARTED, ExitCode
from dist_ens.paths import shortened
from launch.arguments import flag, value_of, without
from launch.started_command import shell_line

# sbatch ends a value at these characters, or reads them in a way of its own.
_SPECIAL = re.compile(r"""[\s"'\\#]""")
# Files of dist-ens that a command writes. Tasks of a sweep must not write the same file.
_OUTPUTS = ("output", "json")


@dataclasses.dataclass(frozen=True)
class Job:
    """A command and the resources that Slurm starts it on.

    Attributes:
        command: Verb of dist_ens and its flags.
        python: Path of the Python that has dist_ens, on every node.
        nodes: Number of nodes, at least 1.
        gpus_per_node: Number of GPUs of each node; 0 for none.
        tasks_per_node: Number of processes on each node; None for one for each GPU, or one.
        cpus_per_task: Number of CPUs of each process; None for Slurm's default.
        time: Time limit as sbatch reads it; None for that of the partition.
        partition: Partition; None for Slurm's default.
        account: Account that is charged; None for Slurm's default.
        name: Name of the job.
        log: File for the output, with sbatch's patterns; None for a name with the job's id.
        grace_secs: Time before the time limit at which SIGTERM is sent, in seconds.
        max_restarts: Largest number of restarts.
        configs: Config files of a sweep, one for each task of a job array. Empty without a sweep.
        setup: File of shell commands that the job runs first; None for no file.
    """

    command: tuple[str, ...]
    python: str
    nodes: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    name: str = "dist_ens"
    log: str | None = None
    grace_secs: int = 120
    max_restarts: int = 100
    configs: tuple[str, ...] = ()
    setup: pathlib.Path | None = None


_SCRIPT = """\
#!/bin/bash
{directives}

# Slurm sends SIGTERM to this script, too, when it ends the job. The script then waits for srun.
trap : TERM
{setup}
job={job_id}
restarts=${{SLURM_RESTART_COUNT:-0}}
{sweep}
# The first task that fails says why the job ends. srun then ends the others with SIGTERM, and
# returns the highest code of all tasks. So the first task writes its code to a file. A task that
# was told to stop waits for those that still save.
first=$PWD/.dist_ens-$job-$restarts
task='trap : TERM HUP USR1
  "$@"
  rc=$?
  [ "$rc" = 0 ] || (set -o noclobber; echo "$rc" > "$0") 2> /dev/null
  [ "$rc" != {preempted} ] || sleep 5
  exit "$rc"'

srun --kill-on-bad-exit=1 {srun_flags}bash -c "$task" "$first" \\
  {command}
rc=$?
[ ! -s "$first" ] || rc=$(< "$first")
rm -f "$first"

case $rc in
{restarted})
  # A job that is cancelled, or that Slurm requeues itself, is not RUNNING any more.
  if [ "$(squeue --noheader --jobs="$job" --format=%T)" != RUNNING ]; then
    echo "Exit code $rc. Slurm ends the job, so the script does not requeue it."
  elif ((restarts >= {max_restarts})); then
    echo "Exit code $rc after $restarts restarts, the limit of --max_restarts. Submit it again."
  else
    echo "Exit code $rc. The job is requeued: restart $((restarts + 1)) of at most {max_restarts}."
    scontrol requeue "$job"
  fi
  ;;
esac
exit "$rc"
"""

# Without its setup, a job would run with other software than the user asked for.
_SETUP = """
if [ ! -r {file} ]; then
  echo "This node cannot read the file of --setup: "{file} >&2
  exit {usage}
fi
source {file}
"""


def render(job: Job) -> str:
    """Returns the script of a job for sbatch.

    Args:
        job: Job to start.

    Raises:
        UserError: If a value cannot stand in the script, or the values contradict each other.
    """
    verb, *arguments = job.command
    words, sweep = [shell_line([job.python, "-P", "-m", f"launch.{verb}"])], ""
    if job.configs:
        cases = [
            f"{number}) arguments=({shell_line(own)}) ;;"
            for number, own in enumerate(_arguments_of_tasks(job))
        ]
        sweep = "\n".join(["", "case $SLURM_ARRAY_TASK_ID in", *cases, "esac", ""])
        words.append('"${arguments[@]}"')
        arguments = without(job.command, "workdir", *_OUTPUTS)[1:]
    words += [shell_line([argument]) for argument in arguments]
    array_task = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'
    cpus = job.cpus_per_task
    return _SCRIPT.format(
        directives="\n".join(_directives(job)),
        setup=_setup(job.setup) if job.setup else "",
        # The id of a whole array would requeue all its tasks.
        job_id=array_task if job.configs else "$SLURM_JOB_ID",
        sweep=sweep,
        srun_flags=f"--cpus-per-task={cpus} " if cpus else "",
        command=" \\\n  ".join(words),
        preempted=int(ExitCode.PREEMPTED),
        restarted=" | ".join(map(str, RESTARTED)),
        max_restarts=job.max_restarts,
    )


def _setup(file: pathlib.Path) -> str:
    """Returns the lines that run the setup of a job, or end the job if the node has no such file.

    Args:
        file: File of shell commands.
    """
    return _SETUP.format(file=shell_line([str(file)]), usage=int(ExitCode.USAGE))


def _directives(job: Job) -> list[str]:
    """Returns the #SBATCH lines of a job.

    Raises:
        UserError: If a value cannot stand in such a line, or there are more processes than GPUs.
    """
    gpus, tasks = job.gpus_per_node, job.tasks_per_node
    if gpus and tasks not in (None, 1, gpus):
        raise UserError(
            f"--tasks_per_node={tasks} does not fit --gpus_per_node={gpus}: a process uses one GPU "
            f"or all GPUs of its node. Use --tasks_per_node={gpus} or --tasks_per_node=1."
        )
    log = "dist_ens-%A_%a.log" if job.configs else "dist_ens-%j.log"
    values = {
        "job-name": job.name,
        "partition": job.partition,
        "account": job.account,
        "nodes": job.nodes,
        "ntasks-per-node": tasks or gpus or 1,
        # GPUs that are bound to tasks would have wrong numbers in JAX.
        "gpus-per-node": gpus or None,
        "cpus-per-task": job.cpus_per_task,
        "time": job.time,
        "array": f"0-{len(job.configs) - 1}" if job.configs else None,
        "output": log if job.log is None else job.log,
        "open-mode": "append",
        "signal": f"TERM@{job.grace_secs}",
    }
    lines = [_directive(name, str(value)) for name, value in values.items() if value is not None]
    return [*lines, "#SBATCH --requeue"]


def _directive(name: str, value: str) -> str:
    """Returns the #SBATCH line of an option.

    Args:
        name: Name of the option of sbatch.
        value: Value of the option.

    Raises:
        UserError: If sbatch would not read the value as it is.
    """
    flag = {"job-name": "name", "output": "log"}.get(name, name)
    if not value or not value.isprintable() or _SPECIAL.search(value):
        raise UserError(
            f"--{flag} cannot be {shortened(value)}: sbatch reads no space, quote, backslash, # "
            "or line break there. Use letters, digits and other signs."
        )
    return f"#SBATCH --{name}={value}"


def _arguments_of_tasks(job: Job) -> list[list[str]]:
    """Returns the arguments that only one task of a sweep has: its config, workdir and outputs.

    Raises:
        UserError: If the command has a config already, or two tasks would have the same workdir.
    """
    given = value_of(job.command, "config")
    if given is not None:
        raise UserError(
            f"--config={shortened(given)} is given beside --configs. Leave one of them out: "
            "--configs gives each task its --config."
        )
    names = [pathlib.PurePath(config).stem for config in job.configs]
    for name in names:
        if names.count(name) > 1 or not name:
            raise UserError(
                f"--configs={shortened(','.join(job.configs))} has {names.count(name)} files named "
                f"{shortened(name)}, and each name is a workdir. Use files with different names."
            )
    workdir = value_of(job.command, "workdir")
    if workdir is None:
        raise UserError(
            "The workdir of a sweep is missing. Add --workdir=FOLDER after --. Each config gets a "
            "folder in it."
        )
    outputs = [(name, value_of(job.command, name)) for name in _OUTPUTS]
    return [
        [
            flag("config", config),
            flag("workdir", pathlib.PurePath(workdir) / name),
            *(flag(output, _of_task(file, name)) for output, file in outputs if file),
        ]
        for config, name in zip(job.configs, names, strict=True)
    ]


def _of_task(file: str, name: str) -> pathlib.PurePath:
    """Returns the file of one task of a sweep, beside the file that the command names.

    >>> print(_of_task("runs/p.npz", "a"))
    runs/p_a.npz
    """
    path = pathlib.PurePath(file)
    return path.parent / f"{path.stem}_{name}{path.suffix}"
