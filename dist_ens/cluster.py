"""The processes of a run: starting `jax.distributed`, choosing devices, agreeing on values."""

import dataclasses
import json
import math
import os
import platform
import time
from typing import cast

import jax
import numpy as np
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

from dist_ens.cluster_environment import initialize_arguments, visible_gpus
from dist_ens.errors import UserError
from dist_ens.meeting import (
    Card,
    bind_address_of,
    check_versions,
    is_address,
    meet,
    own_card,
)
from dist_ens.mutual_tls import MutualTls
from dist_ens.paths import shortened
from dist_ens.peers import CoordinationClient, value_of
from dist_ens.stop_signal import keep_notifier
from dist_ens.types import Tree

# JAX ends a run by a trace of C++ if a process is silent. `Peers` ends it first, by a message. JAX
# counts from the last heartbeat, which may have come half its time-out before the process was lost.
_JAX_IS_LATER, _JAX_IS_LATER_SECS = 2, 10


def start(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    start_timeout_secs: float = 600.0,
    heartbeat_timeout_secs: float = 100.0,
    shutdown_timeout_secs: float = 300.0,
) -> list[Card]:
    """Starts `jax.distributed` if the run has several processes.

    Without arguments, the variables of a cluster are read (OpenMPI, Slurm, a TPU pod, SkyPilot,
    Kubernetes). If there are none, this process is alone and nothing is started. Call this before
    the first use of a device.

    Args:
        coordinator_address: Address of process 0, `host:port`. None lets JAX find it.
        num_processes: Number of processes, at least 1. None lets JAX find it.
        process_id: Number of this process, in [0, num_processes). None lets JAX find it.
        start_timeout_secs: Time to wait for the other processes, in seconds.
        heartbeat_timeout_secs: Time after which a silent process is lost, in seconds.
        shutdown_timeout_secs: Time to wait for the others at the end, in seconds.

    Returns:
        The card of each process, in the order of their numbers; empty if this process is alone.

    Raises:
        UserError: If some but not all arguments are given, one of them is wrong, the variables
            describe only a part of a cluster, the versions of the processes differ, or the cluster
            cannot be joined.
        RunError: If a process does not come in time.
    """
    if jax.distributed.is_initialized():
        return []
    _check_processes(coordinator_address, num_processes, process_id)
    arguments = initialize_arguments(
        os.environ, visible_gpus(os.environ), coordinator_address, num_processes, process_id
    )
    if arguments is None:
        return []  # There is no cluster: this process is alone.
    cards, bind_address = list[Card](), None
    address = arguments.get("coordinator_address")
    if address is not None:
        numbers = arguments["num_processes"], arguments["process_id"]
        bind_address = bind_address_of(os.environ, address)
        tls = MutualTls.from_environ(os.environ, jax.__version__)
        cards = meet(address, *numbers, start_timeout_secs, bind_address, tls)
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=math.ceil(start_timeout_secs),
            heartbeat_timeout_seconds=(
                math.ceil(_JAX_IS_LATER * heartbeat_timeout_secs) + _JAX_IS_LATER_SECS
            ),
            shutdown_timeout_seconds=math.ceil(shutdown_timeout_secs),
            coordinator_bind_address=bind_address,
        )
    except (ValueError, KeyError, IndexError) as error:
        if "coordinator_address should be defined" in str(error):
            return []  # A machine with TPUs that belongs to no pod.
        raise UserError(
            f"The processes of a run cannot find each other: jax.distributed says "
            f"{shortened(str(error).rstrip('.'))}. Inside a cluster's job start one process per "
            "host with its launcher (srun, mpirun), or give --coordinator_address, "
            "--num_processes and --process_id."
        ) from error
    keep_notifier()  # JAX has just taken SIGTERM over. Without this line, nobody would act on it.
    return cards or exchanged_cards(start_timeout_secs)


def client() -> CoordinationClient:
    """Returns the client of the coordination service of `jax.distributed`.

    JAX has no public name for it.
    """
    return cast(CoordinationClient, global_state.client)


def exchanged_cards(timeout_secs: float) -> list[Card]:
    """Returns the card of each process, sent through the coordination service.

    Args:
        timeout_secs: Time to wait for the other processes, in seconds.

    Raises:
        UserError: If the versions of the processes differ.
    """
    own, place = own_card(jax.process_index()), "dist_ens/cards"
    client().key_value_set(f"{place}/{own.process_id}", json.dumps(dataclasses.asdict(own)))
    texts = [
        value_of(client(), f"{place}/{i}", f"process {i}", timeout_secs)
        for i in range(jax.process_count())
    ]
    cards = [Card(**json.loads(text)) for text in texts]
    check_versions(cards)
    return cards


def _check_processes(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Raises a `UserError` if the flags of several processes are not complete, or are wrong.

    JAX mistakes some wrong addresses for a host that does not answer yet, and waits for minutes.
    """
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return
    if coordinator_address is None or num_processes is None or process_id is None:
        raise UserError(
            f"A run of several processes lacks {' and '.join(missing)}. Give --"
            f"{', --'.join(given)}, or none of them to let JAX find the cluster."
        )
    if not is_address(coordinator_address):
        raise UserError(
            f"--coordinator_address={shortened(coordinator_address)} is not host:port with a port "
            "from 1 to 65535. Give the address of process 0, such as 10.0.0.1:1234."
        )
    if num_processes < 1 or not 0 <= process_id < num_processes:
        raise UserError(
            f"--process_id={process_id} is not one of --num_processes={num_processes} processes. "
            "Give each process its own number, from 0 to one less than --num_processes."
        )


_cores_are_devices = False


def use_cores_as_devices() -> None:
    """Makes every CPU core a JAX device, so that members of small networks run in parallel.

    Nothing is changed if the run has several processes, or if `XLA_FLAGS` or `JAX_NUM_CPU_DEVICES`
    sets the number of CPU devices. Call this before the first use of a device.
    """
    global _cores_are_devices
    said = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    are_several = (global_state.num_processes or 1) > 1  # Asking JAX would start the devices.
    if said or "JAX_NUM_CPU_DEVICES" in os.environ or are_several:
        return
    jax.config.update("jax_num_cpu_devices", _usable_cores())
    _cores_are_devices = True


def processor() -> tuple[str, int]:
    """Returns the model of this machine's CPU, if known, and the number of usable cores."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            model = next((line for line in lines if line.startswith("model name")), "")
    except OSError:  # The system is not Linux.
        model = platform.processor()
    return model, _usable_cores()


def _usable_cores() -> int:
    """Returns the number of cores that this process may use; all cores if that is not known."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return usable or 1


def cores_are_devices() -> bool:
    """Returns whether JAX's devices are cores of this machine."""
    return _cores_are_devices and jax.devices()[0].platform == "cpu"


def devices_for(num_members: int, ensemble_axis: int | None = None) -> list[jax.Device]:
    """Returns the devices of a run.

    These are all devices, unless they are CPU cores. Of the cores it returns the largest number
    that divides the members, because a core takes whole members and never a part of a batch.

    Args:
        num_members: Number of members of the ensemble, at least 1.
        ensemble_axis: Number of mesh rows, if it is given. It is then the number of cores, if it
            divides the members.
    """
    devices = jax.devices()
    if not cores_are_devices():
        return devices
    largest = max(k for k in range(1, len(devices) + 1) if num_members % k == 0)
    fits = ensemble_axis is not None and num_members % ensemble_axis == 0
    return devices[: ensemble_axis if fits else largest]


def is_main() -> bool:
    """Returns whether this is process 0, the one that reports."""
    return jax.process_index() == 0


def as_main_sees(value: int) -> int:
    """Returns process 0's value on every host. Every host must call this, and waits for the others.

    Hosts use it to agree on what they see on a shared disk, which may change between two looks.

    Args:
        value: Value of this host, a bool or an integer that fits in 64 bits.
    """
    # JAX would cut an integer of NumPy to 32 bits.
    sent = int(value).to_bytes(8, "little", signed=True)
    return int.from_bytes(bytes_of_main(sent), "little", signed=True)


def bytes_of_main(value: bytes) -> bytes:
    """Returns process 0's bytes on every host. Every host must call this, and waits for the others.

    Args:
        value: Bytes of this host, equally many on every host.
    """
    if jax.process_count() == 1:
        return value
    return np.asarray(_broadcast(np.frombuffer(value, np.uint8)), np.uint8).tobytes()


def any_host(value: bool) -> bool:
    """Returns whether a value is true on any host. Every host must call this, and waits for others.

    Args:
        value: Value of this host.
    """
    return value if jax.process_count() == 1 else bool(hosts_with(value))


def hosts_with(value: bool) -> list[int]:
    """Returns the numbers of the processes on which a value is true. Every host must call this.

    Args:
        value: Value of this host.
    """
    if jax.process_count() == 1:
        return [0] if value else []
    with jax.transfer_guard("allow"):
        values = multihost_utils.process_allgather(np.bool_(value))
    return np.flatnonzero(values).tolist()


def clock() -> float:
    """Returns the seconds on process 0's clock, the same on every host.

    Every host must call this, and waits for the others. All hosts make the same decision from this
    time. A call takes a millisecond or two on several hosts, and next to nothing on one.
    """
    now = time.perf_counter()
    if jax.process_count() == 1:
        return now
    whole, part = divmod(now, 1.0)
    seconds, nanoseconds = _broadcast((np.int32(whole), np.int32(part * 1e9)))
    return int(seconds) + int(nanoseconds) / 1e9


def _broadcast(values: Tree) -> Tree:
    """Returns process 0's values on every host, also where a transfer guard is set."""
    with jax.transfer_guard("allow"):
        return multihost_utils.broadcast_one_to_all(values)
