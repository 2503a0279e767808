"""The GPUs that a process takes, where several processes share a machine."""

import glob
import importlib.metadata
import re
from collections.abc import Mapping

from dist_ens.cluster_environment.reader import Detected
from dist_ens.errors import UserError, counted


def chosen_gpus(environ: Mapping[str, str], detected: Detected, num_gpus: int) -> list[int] | None:
    """Returns the GPUs that this process takes, as numbers among those that it sees.

    Returns:
        Numbers from 0. None if the process sees no GPU, or no variable has the number of processes
        on this machine, or the user chose the devices by `JAX_LOCAL_DEVICE_IDS`.

    Raises:
        UserError: If the devices do not divide over the processes of this machine.
    """
    tasks, rank = detected.tasks_on_node, detected.local_rank
    if not num_gpus or tasks is None or rank is None or environ.get("JAX_LOCAL_DEVICE_IDS"):
        return None
    on_node = environ.get("SLURM_GPUS_ON_NODE", "")
    num_on_node = int(on_node) if on_node.isdigit() else None
    if num_on_node is None and "CUDA_VISIBLE_DEVICES" not in environ:
        num_on_node = num_gpus  # No variable hides a device.
    chosen = local_devices(tasks, rank, num_gpus, num_on_node)
    return [*range(num_gpus)] if chosen is None else chosen


def local_devices(
    tasks_on_node: int, local_rank: int, num_visible: int, num_on_node: int | None = None
) -> list[int] | None:
    """Returns the devices that a process of a machine takes; None for all that it sees.

    A single process takes all devices. If there are as many processes as visible devices, each
    takes one. A process that sees one device takes it.

    Args:
        tasks_on_node: Number of processes on this machine, at least 1.
        local_rank: Number of this process on its machine, in [0, tasks_on_node).
        num_visible: Number of devices that this process sees, at least 1.
        num_on_node: Number of devices of the job on this machine, if known. The processes may each
            see another one of them.

    Raises:
        UserError: If the devices do not divide in one of these ways.

    >>> local_devices(1, 0, 4), local_devices(4, 2, 4), local_devices(4, 2, 1)
    (None, [2], [0])
    """
    if tasks_on_node == 1:
        return None
    is_shared = num_on_node is not None and num_on_node < tasks_on_node
    if local_rank < tasks_on_node == num_visible:
        return [local_rank]
    if num_visible == 1 and not is_shared:
        return [0]
    raise UserError(
        f"The GPUs of this machine do not divide over its processes: {tasks_on_node} processes, of "
        f"which this is number {local_rank}, and {counted(num_visible, 'visible GPU')}. Start one "
        "process per GPU (in Slurm --ntasks-per-node equal to --gpus-per-node), or one per machine."
    )


def visible_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of NVIDIA GPUs that JAX would use, without starting it.

    Returns:
        Number of GPUs; 0 if JAX uses another platform, or has no plugin for GPUs.
    """
    platforms = environ.get("JAX_PLATFORMS", "").split(",")
    is_wanted = platforms == [""] or any(name in ("cuda", "gpu") for name in platforms)
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if not is_wanted or not any("cuda" in plugin.name for plugin in plugins):
        return 0
    return num_gpus(environ)


def num_gpus(environ: Mapping[str, str]) -> int:
    """Returns the number of NVIDIA GPUs that a process may use.

    `CUDA_VISIBLE_DEVICES` lists them, up to the first name that is no device. Without it they are
    the device files.

    >>> num_gpus({"CUDA_VISIBLE_DEVICES": "2,0,-1,1"}), num_gpus({"CUDA_VISIBLE_DEVICES": ""})
    (2, 0)
    """
    given = environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return len([name for name in glob.glob("/dev/nvidia*") if re.search(r"nvidia\d+$", name)])
    count = 0
    for name in given.split(","):
        if not re.fullmatch(r"\d+|(GPU|MIG)-\S+", name.strip()):
            break
        count += 1
    return count
