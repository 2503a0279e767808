"""The nodes of a SkyPilot task, and the pods of a Kubernetes Job."""

import zlib

from dist_ens.cluster_environment.reader import (
    FIRST_PORT,
    KUBERNETES,
    NUM_PORTS,
    SKYPILOT,
    Detected,
    Reader,
    listed,
)
from dist_ens.errors import UserError

_SKYPILOT = ("SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES", "SKYPILOT_NODE_RANK")


def skypilot(reader: Reader) -> Detected:
    """Returns the cluster of a process that SkyPilot started on one of several nodes."""
    environ = reader.environ
    if missing := reader.missing(_SKYPILOT):
        reader.problems.append(
            UserError(
                f"Only a part of the variables of SkyPilot is set: {listed(missing)} missing. "
                "Start the command in the run section of a SkyPilot task, or unset "
                "SKYPILOT_NUM_NODES to run it alone."
            )
        )
        return reader.detected(SKYPILOT)
    first = (environ["SKYPILOT_NODE_IPS"].split() or [""])[0]
    task = environ.get("SKYPILOT_TASK_ID", "")
    port = zlib.crc32(task.encode()) % NUM_PORTS + FIRST_PORT
    reader.variables["coordinator_address"] = "SKYPILOT_NODE_IPS"
    return reader.detected(
        SKYPILOT,
        num_processes=reader.number("num_processes", "SKYPILOT_NUM_NODES"),
        process_id=reader.number("process_id", "SKYPILOT_NODE_RANK"),
        tasks_on_node=1,
        local_rank=0,
        coordinator_address=reader.address(first, str(port)),
    )


def kubernetes(reader: Reader, has_kubernetes: bool) -> Detected:
    """Returns the cluster of a process in a pod of an indexed Job."""
    number = reader.number("process_id", "JOB_COMPLETION_INDEX")
    if has_kubernetes:  # JAX asks the API server for the number of pods.
        return reader.detected(KUBERNETES, process_id=number)
    if number:
        reader.problems.append(
            UserError(
                f"This pod is number {number} of an indexed Job (JOB_COMPLETION_INDEX), and no "
                "variable has the number of pods. Give --coordinator_address, --num_processes and "
                "--process_id=$JOB_COMPLETION_INDEX, or install the package kubernetes."
            )
        )
        return reader.detected(KUBERNETES, process_id=number)
    return Detected(
        notes=(
            "This pod is number 0 of an indexed Job, and no variable has the number of pods, so it "
            "runs alone. If the Job has more pods, give --coordinator_address, --num_processes and "
            "--process_id=$JOB_COMPLETION_INDEX.",
        )
    )
