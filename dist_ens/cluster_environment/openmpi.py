"""The processes that mpirun of OpenMPI starts."""

import re
import zlib

from dist_ens.cluster_environment.reader import (
    FIRST_PORT,
    NUM_PORTS,
    OPENMPI,
    Detected,
    Reader,
    listed,
)
from dist_ens.errors import UserError

_PROCESS = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_URI = "OMPI_MCA_orte_hnp_uri"  # Set by OpenMPI before 5.
OPENMPI_VARIABLES = (*_PROCESS, _URI)


def openmpi(reader: Reader, has_mpi4py: bool) -> Detected:
    """Returns the cluster of a process that mpirun started."""
    environ = reader.environ
    if missing := reader.missing(_PROCESS):
        reader.problems.append(
            UserError(
                f"Only a part of the variables of OpenMPI is set: {listed(missing)} missing, as "
                "in a shell that another process of mpirun left its variables to. Start the "
                "command with mpirun, or unset the variables that begin with OMPI_."
            )
        )
        return reader.detected(OPENMPI)
    num_processes = reader.number("num_processes", "OMPI_COMM_WORLD_SIZE")
    tasks_on_node = reader.number("tasks_on_node", "OMPI_COMM_WORLD_LOCAL_SIZE")
    address = None
    if uri := environ.get(_URI):
        found = re.search(r"^(\d+)\..*?(?:tcp://(.+?)[,:]|tcp6://\[(.+?)[,\]])", uri)
        if found:
            port = int(found[1]) // 2**12 % NUM_PORTS + FIRST_PORT
            address = reader.address(found[2] or found[3], str(port))
            reader.variables["coordinator_address"] = _URI
    elif num_processes == tasks_on_node and "PMIX_NAMESPACE" in environ:
        # All processes are on this machine. The name of the job gives them one port.
        port = zlib.crc32(environ["PMIX_NAMESPACE"].encode()) % NUM_PORTS + FIRST_PORT
        address = reader.address("127.0.0.1", str(port))
        reader.variables["coordinator_address"] = "PMIX_NAMESPACE"
    if address is None and not has_mpi4py and "JAX_COORDINATOR_ADDRESS" not in environ:
        reader.problems.append(
            UserError(
                "OpenMPI started processes on several machines, and no variable has the address of "
                "process 0. Install mpi4py, which finds it, or give --coordinator_address, "
                "--num_processes and --process_id."
            )
        )
    return reader.detected(
        OPENMPI,
        num_processes=num_processes,
        process_id=reader.number("process_id", "OMPI_COMM_WORLD_RANK"),
        tasks_on_node=tasks_on_node,
        local_rank=reader.number("local_rank", "OMPI_COMM_WORLD_LOCAL_RANK"),
        coordinator_address=address,
    )
