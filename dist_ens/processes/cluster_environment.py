"""The cluster of a process, by its environment variables, and the GPUs that the process takes.

JAX finds the other processes. This module says whether JAX shall look for them, and divides the
GPUs of a machine over its processes, where JAX would give each process one.
"""

import glob
import importlib.metadata
import re
from collections.abc import Mapping

from dist_ens.ground.errors import UserError, counted

# A variable of each cluster that JAX joins by itself. `TPU_ML_PLATFORM` is set by JAX, when it is
# imported on a machine with TPUs.
_SIGNS = ("SLURM_STEP_NODELIST", "OMPI_COMM_WORLD_SIZE", "TPU_ML_PLATFORM", "JOB_COMPLETION_INDEX")


def is_in_cluster(environ: Mapping[str, str]) -> bool:
    """Returns whether JAX shall look for other processes in the environment."""
    return any(name in environ for name in _SIGNS) and num_tasks_left_out(environ) == 0


def num_tasks_left_out(environ: Mapping[str, str]) -> int:
    """Returns the number of tasks of a Slurm job whose command was not started by `srun`."""
    tasks = environ.get("SLURM_NTASKS", "1") if "SLURM_JOB_ID" in environ else "1"
    is_started = environ.get("SLURM_STEP_NUM_TASKS") == tasks
    return 0 if tasks == "1" or is_started else int(tasks)


def detection_method(environ: Mapping[str, str]) -> str | None:
    """Returns the name of JAX's way to find the other processes; None for its own choice.

    JAX reads the variables of OpenMPI before version 5 only. Newer ones need the package mpi4py.
    """
    is_new = "OMPI_COMM_WORLD_SIZE" in environ and "OMPI_MCA_orte_hnp_uri" not in environ
    return "mpi4py" if is_new else None


def chosen_gpus(environ: Mapping[str, str], num_visible: int) -> list[int] | None:
    """Returns the GPUs that this process takes, as numbers among those that it sees.

    The processes of a machine divide the GPUs that they all see. If each of them sees GPUs of its
    own, as with `--gpus-per-task` in Slurm, it takes them all. None leaves the choice to JAX.

    >>> two = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    >>> chosen_gpus(two, 4)
    [2, 3]
    """
    place = _place_on_machine(environ)
    if not num_visible or place is None or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    rank, num_tasks = place
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    if on_node.isdigit():
        are_own = int(on_node) == num_tasks * num_visible
    else:
        are_own = num_visible == 1 and "CUDA_VISIBLE_DEVICES" in environ
    if are_own:
        return [*range(num_visible)]
    if num_visible % num_tasks:
        raise UserError(
            f"The {counted(num_visible, 'GPU')} of this machine cannot be divided over its "
            f"{counted(num_tasks, 'process')}. Start one process per GPU (in Slurm "
            "--ntasks-per-node equal to --gpus-per-node), or one per machine."
        )
    each = num_visible // num_tasks
    return [*range(rank * each, (rank + 1) * each)]


def _place_on_machine(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns the number of this process on its machine, and the number of processes there."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environ:
        rank, size = "OMPI_COMM_WORLD_LOCAL_RANK", environ["OMPI_COMM_WORLD_LOCAL_SIZE"]
        return int(environ[rank]), int(size)
    if "SLURM_STEP_TASKS_PER_NODE" not in environ:
        return None
    # Slurm writes 2(x3),1 for [2, 2, 2, 1].
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ["SLURM_STEP_TASKS_PER_NODE"])
    sizes = [int(size) for size, times in found for _ in range(int(times or 1))]
    return int(environ["SLURM_LOCALID"]), sizes[int(environ["SLURM_NODEID"])]


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of NVIDIA GPUs that JAX would use, without starting it."""
    platforms = environ.get("JAX_PLATFORMS", "").split(",")
    is_wanted = platforms == [""] or any(name in ("cuda", "gpu") for name in platforms)
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    has_plugin = any("cuda" in plugin.name for plugin in plugins)
    return num_gpus(environ) if is_wanted and has_plugin else 0


def num_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of NVIDIA GPUs that a process sees."""
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return len([name for name in glob.glob("/dev/nvidia*") if re.search(r"nvidia\d+$", name)])
    return len([name for name in given.split(",") if name.strip() not in ("", "-1", "NoDevFiles")])
