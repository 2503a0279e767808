"""The JobSet of Kubernetes that runs a command on TPU slices, GPU nodes or CPU nodes."""

import math
import posixpath
import re
from collections.abc import Sequence
from typing import Any

from dist_ens.ground.errors import RESTARTED, UserError
from dist_ens.ground.paths import shortened
from dist_ens.storage import is_address
from launch.rendered import filled
from launch.started_command import value_of


def render(command: Sequence[str], **options: Any) -> str:
    """Returns the file of a JobSet: a Job for each slice or for all nodes, a pod for each node."""
    workdir, folder = value_of(command, "workdir") or "", posixpath.normpath(options["mount_path"])
    is_inside = posixpath.normpath(workdir).startswith(f"{folder}/")
    if workdir and not is_address(workdir) and not (options["volume_claim"] and is_inside):
        raise UserError(
            f"--workdir={shortened(workdir)} would be lost with the pod. Give a bucket, "
            "gs://BUCKET/PATH or s3://BUCKET/PATH. Or add --volume_claim=CLAIM, and use a "
            f"--workdir inside {folder}, where the pods see the volume (--mount_path)."
        )
    selector = {
        key: value for key, value in _parts("node_selector", "KEY=VALUE", options["node_selector"])
    }
    topology, is_tpu = options["tpu_topology"], options["tpu_topology"] is not None
    num_nodes, limits = options["num_nodes"], {}
    if is_tpu:
        num_nodes = _num_nodes(topology, options["chips_per_node"])
        limits["google.com/tpu"] = str(options["chips_per_node"])
        selector["cloud.google.com/gke-tpu-accelerator"] = options["tpu_accelerator"]
        selector["cloud.google.com/gke-tpu-topology"] = topology
    elif options["gpus_per_node"]:
        limits["nvidia.com/gpu"] = str(options["gpus_per_node"])
    job = "slice" if is_tpu else "node"
    return filled(
        "jobset.yaml",
        options,
        command=command,
        job=job,
        # Process 0 has this name in the headless service, which has the JobSet's name.
        coordinator=f"{options['name']}-{job}-0-0.{options['name']}",
        num_nodes=num_nodes,
        num_slices=options["num_slices"] if is_tpu else 1,
        node_selector=selector,
        limits=limits,
        requests={name: options[name] for name in ("cpu", "memory") if options[name]},
        secrets=_parts("secret_env", "NAME=SECRET/KEY", options["secret_env"]),
        restarted=list(RESTARTED),
    )


def _num_nodes(topology: str, chips_per_node: int) -> int:
    """Returns the number of nodes of a slice, given its chips along each axis, such as `4x4`."""
    is_shape = re.fullmatch(r"\d+(x\d+)+", topology)
    chips = math.prod(map(int, topology.split("x"))) if is_shape else 0
    if chips < 1 or chips % chips_per_node:
        raise UserError(
            f"--tpu_topology={shortened(topology)} has {chips} chips, which "
            f"--chips_per_node={chips_per_node} does not divide."
        )
    return chips // chips_per_node


def _parts(name: str, form: str, values: Sequence[str]) -> list[list[str]]:
    """Returns the parts of each value of a list flag with a form; its values may be secrets."""
    pattern = re.sub("[A-Z]+", "(.+?)", form)
    found = [re.fullmatch(pattern, each) for each in values]
    if not all(found):
        raise UserError(f"--{name} does not have the form --{name}={form}. Correct it.")
    return [[*match.groups()] for match in found if match]
