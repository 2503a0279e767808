"""Detects the cluster that a process was started in, and how to join the other processes."""

import dataclasses
import importlib.util
from collections.abc import Mapping

from dist_ens.cluster_environment.cloud import kubernetes, skypilot
from dist_ens.cluster_environment.devices import chosen_gpus
from dist_ens.cluster_environment.openmpi import OPENMPI_VARIABLES, openmpi
from dist_ens.cluster_environment.reader import (
    FLAGS,
    GCE_TPU,
    NONE,
    OPENMPI,
    SKYPILOT,
    SLURM,
    Detected,
    Reader,
)
from dist_ens.cluster_environment.slurm import notes_on_a_shell, slurm
from dist_ens.cluster_environment.tpu import MEGASCALE, check_megascale, gke_tpu, hosts_variable
from dist_ens.errors import UserError
from dist_ens.json_text import JsonDict
from dist_ens.paths import shortened

# The processes of these clusters are described wholly by variables. JAX asks a server about the
# processes of the others, or waits until the name of process 0 is known.
_DESCRIBED = (FLAGS, OPENMPI, SLURM, SKYPILOT)


def detect(
    environ: Mapping[str, str],
    *,
    has_mpi4py: bool | None = None,
    has_kubernetes: bool | None = None,
) -> Detected:
    """Returns the cluster that a process was started in.

    A process may be in several: the first of OpenMPI, Slurm, a TPU pod, SkyPilot and Kubernetes is
    taken, in JAX's order.

    Args:
        environ: Environment variables of the process, after JAX was imported.
        has_mpi4py: Whether the package mpi4py is installed. Default: looked up.
        has_kubernetes: Whether the package kubernetes is installed. Default: looked up.
    """
    reader = Reader(environ)
    # JAX sets this variable while it is imported, if the machine has TPUs and libtpu.
    has_tpu = "TPU_ML_PLATFORM" in environ
    if any(name in environ for name in OPENMPI_VARIABLES):
        return openmpi(reader, _is_installed("mpi4py", has_mpi4py))
    if "SLURM_JOB_ID" in environ and (detected := slurm(reader)) is not None:
        return detected
    slurm_notes = notes_on_a_shell(environ)
    if has_tpu and hosts_variable(environ) is not None:
        return gke_tpu(reader, slurm_notes)
    if has_tpu and "TPU_SKIP_MDS_QUERY" not in environ:
        check_megascale(reader)
        return reader.detected(GCE_TPU, slurm_notes)
    if reader.environ.get("SKYPILOT_NUM_NODES", "1") != "1":
        return skypilot(reader)
    if "KUBERNETES_SERVICE_HOST" in environ and "JOB_COMPLETION_INDEX" in environ:
        return kubernetes(reader, _is_installed("kubernetes", has_kubernetes))
    if "JAX_COORDINATOR_ADDRESS" in environ:
        reader.problems.append(
            UserError(
                "JAX_COORDINATOR_ADDRESS="
                f"{shortened(environ['JAX_COORDINATOR_ADDRESS'])} names process 0, and no variable "
                "has the number of processes. Give --coordinator_address, --num_processes and "
                "--process_id, or unset JAX_COORDINATOR_ADDRESS."
            )
        )
    notes = list(slurm_notes)
    if left := [name for name in MEGASCALE if name in environ]:
        notes.append(
            f"{', '.join(left)}: not used, because JAX finds no TPU here. Unset what another job "
            "left over."
        )
    return Detected(problems=tuple(reader.problems), notes=tuple(notes))


def chosen_by_flags(
    detected: Detected, coordinator_address: str, num_processes: int | None, process_id: int | None
) -> Detected:
    """Returns a cluster whose processes are those of the flags, which overrule all variables.

    Args:
        detected: Cluster of the variables. Only the number of processes on this machine is kept.
        coordinator_address: Address of process 0.
        num_processes: Number of processes.
        process_id: Number of this process.
    """
    kept = ("tasks_on_node", "local_rank")
    variables = {name: detected.variables[name] for name in kept if name in detected.variables}
    for name in ("coordinator_address", "num_processes", "process_id"):
        variables[name] = f"--{name}"
    return dataclasses.replace(
        detected,
        cluster=FLAGS,
        coordinator_address=coordinator_address,
        num_processes=num_processes,
        process_id=process_id,
        variables=variables,
        problems=(),
        notes=(),
    )


def initialize_arguments(
    environ: Mapping[str, str],
    num_gpus: int,
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> JsonDict | None:
    """Returns the arguments of `jax.distributed.initialize`; None if the process is alone.

    Args:
        environ: Environment variables of the process.
        num_gpus: Number of GPUs that the process sees, as `visible_gpus` counts them.
        coordinator_address: Address of process 0, if a flag gave it. The other two are given then.
        num_processes: Number of processes.
        process_id: Number of this process.

    Raises:
        UserError: If only a part of a cluster is described, or the devices do not divide over the
            processes of a machine.
    """
    detected = detect(environ)
    if coordinator_address is not None:
        detected = chosen_by_flags(detected, coordinator_address, num_processes, process_id)
    for problem in detected.problems:
        raise problem
    if detected.cluster == NONE:
        return None
    if detected.cluster not in _DESCRIBED:
        return {}
    if detected.coordinator_address is None:  # Of the described, only OpenMPI may have none.
        arguments: JsonDict = {"cluster_detection_method": "mpi4py"}
    else:
        arguments = {
            "coordinator_address": detected.coordinator_address,
            "num_processes": detected.num_processes,
            "process_id": detected.process_id,
            "cluster_detection_method": "deactivate",
        }
    chosen = chosen_gpus(environ, detected, num_gpus)
    return arguments if chosen is None else arguments | {"local_device_ids": chosen}


def _is_installed(package: str, known: bool | None) -> bool:
    """Returns whether a package is installed, without importing it."""
    return importlib.util.find_spec(package) is not None if known is None else known
