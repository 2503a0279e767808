"""The processes of a Slurm job."""

import dataclasses
import re
from collections.abc import Mapping

from dist_ens.cluster_environment.devices import num_gpus
from dist_ens.cluster_environment.reader import (
    FIRST_PORT,
    NUM_PORTS,
    SLURM,
    Detected,
    Reader,
    listed,
)
from dist_ens.errors import UserError
from dist_ens.paths import shortened

_SLURM = ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")


def slurm(reader: Reader) -> Detected | None:
    """Returns the cluster of a process inside a Slurm job; None if the process is alone in it."""
    environ = reader.environ
    job = shortened(environ["SLURM_JOB_ID"])
    missing = reader.missing(_SLURM)
    if not {"SLURM_STEP_ID", "SLURM_STEP_NODELIST"} & set(environ):
        # A batch script has the number of the first task. A shell of salloc has none.
        sizes = [
            (name, int(environ[name]))
            for name in ("SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")
            if environ.get(name, "").isdigit()
        ]
        several = [f"{name}={size}" for name, size in sizes if size > 1]
        if not several:
            return None
        reader.problems.append(
            UserError(
                f"The Slurm job {job} has {several[0]}, and the command was not started by srun: "
                f"{listed(missing)} missing, as in a batch script without srun, in a shell of "
                "salloc or ssh, or in an editor. Start the command with srun. To run it alone on "
                "this machine, unset SLURM_JOB_ID."
            )
        )
        return reader.detected(SLURM)
    if missing:
        reader.problems.append(
            UserError(
                f"Only a part of the variables of a Slurm step is set in job {job}: "
                f"{listed(missing)} missing, as in a shell of ssh or an editor inside the job. "
                "Start the command with srun. To run it alone on this machine, unset SLURM_JOB_ID."
            )
        )
        return reader.detected(SLURM)
    num_processes = reader.number("num_processes", "SLURM_NTASKS")
    in_step = environ.get("SLURM_STEP_NUM_TASKS")
    if in_step is not None and num_processes is not None and in_step != str(num_processes):
        reader.problems.append(
            UserError(
                f"The Slurm job {job} has SLURM_NTASKS={num_processes}, and its step has "
                f"SLURM_STEP_NUM_TASKS={shortened(in_step)}, as in a shell of salloc: this process "
                "would wait for others that were not started. Start the command with srun. To run "
                "it alone on this machine, unset SLURM_JOB_ID."
            )
        )
    job_number = reader.number("coordinator_address", "SLURM_JOB_ID")
    host = _first_host(environ["SLURM_STEP_NODELIST"])
    port = str((job_number or 0) % NUM_PORTS + FIRST_PORT)
    reader.variables["coordinator_address"] = "SLURM_STEP_NODELIST, SLURM_JOB_ID"
    tasks_on_node = _slurm_tasks_on_node(reader)
    detected = reader.detected(
        SLURM,
        num_processes=num_processes,
        process_id=reader.number("process_id", "SLURM_PROCID"),
        tasks_on_node=tasks_on_node,
        local_rank=reader.number("local_rank", "SLURM_LOCALID"),
        coordinator_address=reader.address(host, port),
    )
    notes = _notes_on_hidden_gpus(environ, tasks_on_node)
    return dataclasses.replace(detected, notes=(*detected.notes, *notes))


def _slurm_tasks_on_node(reader: Reader) -> int | None:
    """Returns the number of tasks of this step on this node; None if no variable has it."""
    environ = reader.environ
    node, on_nodes = environ.get("SLURM_NODEID", ""), environ.get("SLURM_STEP_TASKS_PER_NODE")
    if on_nodes is not None and node.isdigit():
        counts = _repeated(on_nodes)
        if int(node) < len(counts):
            reader.variables["tasks_on_node"] = "SLURM_STEP_TASKS_PER_NODE"
            return counts[int(node)]
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        return reader.number("tasks_on_node", "SLURM_NTASKS")
    return reader.number("tasks_on_node", "SLURM_NTASKS_PER_NODE")


def _repeated(text: str) -> list[int]:
    """Returns a list of numbers that Slurm has written in short.

    >>> _repeated("2(x3),1")
    [2, 2, 2, 1]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(number) for number, times in found for _ in range(int(times or 1))]


def _first_host(nodes: str) -> str:
    """Returns the first name of a list of nodes as Slurm writes it.

    >>> _first_host("node[001-015],other"), _first_host("a,b")
    ('node001', 'a')
    """
    found = re.match(r"([^,\[]*)(?:\[([^,\-\]]*))?", nodes)
    return "".join(part or "" for part in found.groups()) if found else nodes


def _notes_on_hidden_gpus(environ: Mapping[str, str], tasks_on_node: int | None) -> list[str]:
    """Returns a note if Slurm shows each of several tasks one GPU."""
    is_one = num_gpus(environ) == 1 and "CUDA_VISIBLE_DEVICES" in environ
    if not is_one or not tasks_on_node or tasks_on_node == 1:
        return []
    return [
        "Slurm shows each of the tasks on this machine one GPU, as with --gpus-per-task. Each "
        "takes the one it sees. GPUs that see each other exchange data faster: ask for "
        "--gpus-per-node instead."
    ]


def notes_on_a_shell(environ: Mapping[str, str]) -> list[str]:
    """Returns a note if the process is inside a Slurm job, and alone."""
    if "SLURM_JOB_ID" not in environ:
        return []
    return [
        f"This process is inside the Slurm job {shortened(environ['SLURM_JOB_ID'])} and was not "
        "started by srun, as in a shell of ssh or an editor. It runs alone. Start the command with "
        "srun to use all tasks of the job."
    ]
