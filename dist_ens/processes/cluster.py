"""The processes of a run: starting `jax.distributed`, choosing devices, agreeing on values.

Every host must call the functions that agree on a value equally often, and waits for the others.
"""

import contextlib
import ctypes
import errno
import logging
import math
import os
import platform
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

from dist_ens.ground.errors import ExitCode, UserError
from dist_ens.ground.paths import shortened
from dist_ens.processes.cluster_environment import (
    chosen_gpus,
    detection_method,
    is_in_cluster,
    num_tasks_left_out,
    visible_gpus,
)
from dist_ens.processes.peers import Card, check_equal, exchanged, versions
from dist_ens.processes.stop_signal import keep_notifier

# JAX ends a run by a trace of C++ if a process is silent. `Peers` ends it first, by a message. JAX
# counts from the last heartbeat, which may have come half its time-out before the process was lost.
_JAX_IS_LATER, _JAX_IS_LATER_SECS = 2, 10
_BUSY_SECS = 10.0  # Time for a port to become free after another run.
_ADDRESS = re.compile(r"(\[[^\[\]]+\]|[^:\s]+):([0-9]{1,5})")
_LOOPBACK = re.compile(r"127\.|localhost:|\[::1\]")


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

    Without arguments, JAX finds the processes of Slurm, OpenMPI, a TPU slice or a Kubernetes Job.
    Outside of these, this process is alone and nothing is started. Call this before the first use
    of a device.

    Returns:
        The card of each process, in the order of their numbers; empty if this process is alone.
    """
    if jax.distributed.is_initialized():
        return []
    are_given = (coordinator_address, num_processes, process_id) != (None, None, None)
    if not are_given and not is_in_cluster(os.environ):
        if left_out := num_tasks_left_out(os.environ):
            logging.warning(
                "This process runs alone in a Slurm job of %d tasks, because it was not started by "
                "srun. Start the command with srun to use all of them.",
                left_out,
            )
        return []
    bind_address = None
    if coordinator_address is not None:
        _check_address(coordinator_address, listens=process_id == 0)
        if _LOOPBACK.match(coordinator_address):
            bind_address = coordinator_address  # JAX would listen on every network of the machine.
    try:
        with _reported_abort(start_timeout_secs):
            jax.distributed.initialize(
                coordinator_address,
                num_processes,
                process_id,
                local_device_ids=chosen_gpus(os.environ, visible_gpus(os.environ)),
                cluster_detection_method=(
                    "deactivate" if process_id is not None else detection_method(os.environ)
                ),
                initialization_timeout=math.ceil(start_timeout_secs),
                heartbeat_timeout_seconds=(
                    math.ceil(_JAX_IS_LATER * heartbeat_timeout_secs) + _JAX_IS_LATER_SECS
                ),
                shutdown_timeout_seconds=math.ceil(shutdown_timeout_secs),
                coordinator_bind_address=bind_address,
            )
    except (ValueError, KeyError, IndexError, ImportError, RuntimeError) as error:
        if not are_given and "coordinator_address should be defined" in str(error):
            return []  # A machine with TPUs that belongs to no slice of several.
        raise UserError(
            f"The processes of a run cannot find each other: jax.distributed says "
            f"{shortened(str(error).rstrip('.'))}. Inside a cluster's job start one process per "
            "host with its launcher (srun, mpirun), or give --coordinator_address, "
            "--num_processes and --process_id."
        ) from error
    keep_notifier()  # JAX has just taken SIGTERM over. Without this line, nobody would act on it.
    return _exchanged_cards(start_timeout_secs)


def _check_address(address: str, *, listens: bool) -> None:
    """Raises a `UserError` if process 0, which listens there, cannot have an address.

    JAX waits for a host that does not exist, and ends by a fault of memory if a port is in use.
    """
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[2]) < 2**16:
        raise UserError(
            f"--coordinator_address={shortened(address)} is not host:port. Give the address of "
            "process 0, such as 10.0.0.1:1234."
        )
    until = time.monotonic() + _BUSY_SECS
    while listens:
        try:
            socket.create_server(("", int(found[2]))).close()
            return
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(0.2)
                continue
            raise UserError(
                f"Process 0 cannot listen at {address}: {os.strerror(error.errno or 0)}. Choose "
                "another port in --coordinator_address."
            ) from error


@contextlib.contextmanager
def _reported_abort(timeout_secs: float) -> Iterator[None]:
    """Adds a message to the trace of C++ by which JAX ends a process, if others do not come."""
    before = end_at_abort(
        lambda: (
            f"Process {global_state.process_id} of {global_state.num_processes} has not met the "
            f"others at {global_state.coordinator_address} within --start_timeout_secs="
            f"{timeout_secs:g}. Look at the output of those that have no such message, and check "
            "that every host can reach this address."
        )
    )
    try:
        yield
    finally:
        ctypes.CDLL(None).signal(signal.SIGABRT, ctypes.c_void_p(before))


_at_abort: list[object] = []  # Handlers that only C refers to.


def end_at_abort(message: Callable[[], str]) -> int | None:
    """Makes an abort, by which JAX ends a process, print a message; returns the handler before."""

    @ctypes.CFUNCTYPE(None, ctypes.c_int)
    def end(_: int) -> None:
        try:
            os.write(2, f"error: {message()}\n".encode())
        finally:
            os._exit(ExitCode.HOST_LOST)

    _at_abort.append(end)
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    return libc.signal(signal.SIGABRT, end)


def client() -> Any:
    """Returns the client of JAX's coordination service, which has no public name."""
    return global_state.client


def _exchanged_cards(timeout_secs: float) -> list[Card]:
    """Returns the card of each process; raises a `UserError` if their versions differ."""
    # Asking JAX for these numbers would start the devices.
    number, count = global_state.process_id, global_state.num_processes
    facts = {f"the version of {name}": version for name, version in versions().items()}
    facts["--num_processes"] = str(count)
    own, cards = Card(number, socket.gethostname(), os.getpid(), facts), list[Card]()
    for each in exchanged(client(), "cards", number, count, vars(own), timeout_secs):
        cards.append(Card(**each))
        check_equal(cards[0].facts, cards[-1].facts, str(cards[0]), str(cards[-1]))
    return cards


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
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return usable or 1


def cores_are_devices() -> bool:
    """Returns whether JAX's devices are cores of this machine."""
    return _cores_are_devices and jax.devices()[0].platform == "cpu"


def devices_for(num_members: int, ensemble_axis: int | None = None) -> list[jax.Device]:
    """Returns the devices of a run.

    These are all devices, unless they are CPU cores. A core takes whole members and never a part of
    a batch, so it returns the largest number of cores that divides the members, or as many as there
    are mesh rows.
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
    """Returns process 0's integer of 64 bits, or its bool, on every host."""
    # JAX would cut an integer of NumPy to 32 bits.
    sent = int(value).to_bytes(8, "little", signed=True)
    return int.from_bytes(bytes_of_main(sent), "little", signed=True)


def bytes_of_main(value: bytes) -> bytes:
    """Returns process 0's bytes on every host. Each host gives equally many."""
    if jax.process_count() == 1:
        return value
    with jax.transfer_guard("allow"):
        found = multihost_utils.broadcast_one_to_all(np.frombuffer(value, np.uint8))
    return np.asarray(found, np.uint8).tobytes()


def any_host(value: bool) -> bool:
    """Returns whether a value is true on any host."""
    return bool(hosts_with(value))


def hosts_with(value: bool) -> list[int]:
    """Returns the numbers of the processes on which a value is true."""
    if jax.process_count() == 1:
        return [0] if value else []
    with jax.transfer_guard("allow"):
        values = multihost_utils.process_allgather(np.bool_(value))
    return np.flatnonzero(values).tolist()


def clock() -> float:
    """Returns the seconds on process 0's clock, by which all hosts make the same decision."""
    return as_main_sees(time.perf_counter_ns()) / 1e9
