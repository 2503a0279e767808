"""The JobSet of Kubernetes that runs a command on TPU slices, GPU nodes or CPU nodes.

A JobSet makes one Job for each slice, and each Job has one pod for each node. A JobSet cannot see
the exit code of a pod. It only sees the reason why a Job failed. So each Job fails for the reason
`PodFailurePolicy` if the command shall start again, and for `BackoffLimitExceeded` if not.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

from dist_ens.errors import UserError
from dist_ens.exit_codes import RESTARTED
from dist_ens.json_text import JsonDict
from launch.arguments import flag, value_of, with_flags
from launch.rendered import VARIABLE, check_name, chips_of

# Each pod of GPU or CPU nodes has an address of its own, so that the port is free.
_COORDINATOR_PORT = 55527
_CONTAINER = "dist-ens"
_SHARED_MEMORY, _STORAGE = "shared-memory", "runs"
_JOB_INDEX = "metadata.labels['jobset.sigs.k8s.io/job-index']"
_SECRET_KEY = re.compile(r"[A-Za-z0-9._-]+")


@dataclasses.dataclass(frozen=True)
class TpuSlices:
    """Slices of TPUs on GKE. Each slice is a separate node pool.

    Attributes:
        accelerator: Kind of TPU as GKE names it, such as `tpu-v6e-slice`.
        topology: Chips of a slice along each axis, such as `4x4`.
        chips_per_node: Number of chips of a node.
        num_slices: Number of slices, at least 1.
    """

    accelerator: str
    topology: str
    chips_per_node: int
    num_slices: int

    def __post_init__(self) -> None:
        chips = chips_of(self.topology)
        if self.chips_per_node < 1 or chips % self.chips_per_node:
            raise UserError(
                f"--chips_per_node={self.chips_per_node} does not divide the {chips} chips "
                f"of --tpu_topology={self.topology}. Use the number of chips of a node, such as 4."
            )
        if self.num_slices < 1:
            raise UserError(
                f"--num_slices={self.num_slices} is less than 1. Use the number of slices."
            )

    @property
    def num_nodes(self) -> int:
        """Number of nodes of a slice."""
        return chips_of(self.topology) // self.chips_per_node


@dataclasses.dataclass(frozen=True)
class Nodes:
    """Nodes with GPUs, or with CPUs only.

    Attributes:
        num_nodes: Number of nodes, each with one process.
        gpus_per_node: Number of GPUs of a node; 0 for CPU nodes.
    """

    num_nodes: int
    gpus_per_node: int

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.gpus_per_node < 0:
            raise UserError(
                f"Nothing can run on --num_nodes={self.num_nodes} with "
                f"--gpus_per_node={self.gpus_per_node}. Use at least 1 node, and 0 or more GPUs."
            )


@dataclasses.dataclass(frozen=True)
class SecretVariable:
    """An environment variable whose value is in a Secret of the cluster.

    Attributes:
        name: Name of the variable.
        secret: Name of the Secret.
        key: Key in the Secret.
    """

    name: str
    secret: str
    key: str

    @classmethod
    def parse(cls, text: str) -> "SecretVariable":
        """Returns the variable that a text `NAME=SECRET/KEY` describes.

        Raises:
            UserError: If the text has another form. The message does not repeat the text, which
                may be a secret.

        >>> SecretVariable.parse("WANDB_API_KEY=wandb/key").secret
        'wandb'
        """
        name, _, source = text.partition("=")
        secret, _, key = source.partition("/")
        if not VARIABLE.fullmatch(name) or not all(map(_SECRET_KEY.fullmatch, (secret, key))):
            raise UserError(
                "--secret_env does not name a secret. Use --secret_env=NAME=SECRET/KEY: the "
                "variable, the Secret in the cluster and its key. Do not give the value itself."
            )
        return cls(name, secret, key)


@dataclasses.dataclass(frozen=True)
class JobSetSettings:
    """Settings of a JobSet.

    Attributes:
        name: Name of the JobSet.
        image: Container image with dist_ens.
        arguments: Verb of dist-ens and its flags.
        hardware: Nodes that run the command.
        namespace: Namespace of the JobSet; None for that of the current context.
        queue: Name of a LocalQueue of Kueue; None without Kueue.
        volume_claim: Name of a PersistentVolumeClaim that all nodes can write; None for none.
        mount_path: Folder where the nodes see the volume.
        secrets: Environment variables from Secrets.
        node_selector: Labels that a node must have, besides those of its TPU.
        cpu: CPU cores that a pod requests, such as `8`; None for no request.
        memory: Memory that a pod requests, such as `64Gi`; None for no request.
        grace_secs: Seconds between SIGTERM and SIGKILL, in which the command saves.
    """

    name: str
    image: str
    arguments: tuple[str, ...]
    hardware: TpuSlices | Nodes
    namespace: str | None = None
    queue: str | None = None
    volume_claim: str | None = None
    mount_path: str = "/runs"
    secrets: tuple[SecretVariable, ...] = ()
    node_selector: tuple[tuple[str, str], ...] = ()
    cpu: str | None = None
    memory: str | None = None
    grace_secs: int = 120

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.grace_secs < 1:
            raise UserError(
                f"--grace_secs={self.grace_secs} leaves no time to save. Use at least 1 second."
            )
        if self.num_slices > 1:
            _check_rows(self.arguments, self.num_slices)

    @property
    def num_slices(self) -> int:
        """Number of TPU slices; 1 for other nodes."""
        return self.hardware.num_slices if isinstance(self.hardware, TpuSlices) else 1

    @property
    def job(self) -> str:
        """Name of the replicated job."""
        return "slice" if isinstance(self.hardware, TpuSlices) else "node"

    @property
    def coordinator(self) -> str:
        """Host name of process 0, in the headless service that has the JobSet's name."""
        return f"{self.name}-{self.job}-0-0.{self.name}"


def _check_rows(arguments: Sequence[str], num_slices: int) -> None:
    """Raises a `UserError` if a row of the mesh would lie on two slices.

    The devices of a slice are neighbours in `jax.devices()`, and the rows of the mesh take them in
    this order. If the slices divide the number of rows, no row lies on two slices, so that only
    metrics cross the network between slices.
    """
    for name in ("config.layout.ensemble_axis", "config.num_members"):
        value = value_of(arguments, name)
        if value is not None and value.isdecimal() and int(value) % num_slices:
            raise UserError(
                f"--{name}={int(value)} is not a multiple of --num_slices={num_slices}, so "
                "gradients would cross the slow network between slices at every step. Use a "
                f"multiple, such as {math.ceil(int(value) / num_slices) * num_slices}."
            )


def jobset(settings: JobSetSettings) -> JsonDict:
    """Returns a JobSet.

    Args:
        settings: Settings of the JobSet.
    """
    hardware = settings.hardware
    metadata: JsonDict = {"name": settings.name}
    if settings.namespace is not None:
        metadata["namespace"] = settings.namespace
    if settings.queue is not None:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": settings.queue}
    if isinstance(hardware, TpuSlices):
        # All nodes of a Job must be those of one slice, and a slice is one node pool.
        topology = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        metadata["annotations"] = {topology: "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": _failure_policy(),
            "replicatedJobs": [
                {
                    "name": settings.job,
                    "replicas": settings.num_slices,
                    "template": {"spec": _job(settings)},
                }
            ],
        },
    }


def _failure_policy() -> JsonDict:
    """Returns what happens to the JobSet after the failure of a Job.

    The rule that fails the set comes first, because the controller looks for each rule at all
    failed Jobs. After an error in one slice the processes of the others may end with a code that
    restarts the set.
    """
    return {
        "maxRestarts": 0,
        "rules": [
            {
                "name": "fail",
                "action": "FailJobSet",
                "onJobFailureReasons": ["BackoffLimitExceeded"],
            },
            {
                "name": "restart",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }


def _job(settings: JobSetSettings) -> JsonDict:
    """Returns the spec of a Job, which fails at the first pod that fails."""
    num_nodes = settings.hardware.num_nodes
    disruption = {"type": "DisruptionTarget", "status": "True"}
    return {
        "completionMode": "Indexed",
        "parallelism": num_nodes,
        "completions": num_nodes,
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [disruption]},
                {
                    "action": "FailJob",
                    "onExitCodes": {
                        "containerName": _CONTAINER,
                        "operator": "In",
                        "values": list(RESTARTED),
                    },
                },
            ]
        },
        "template": {"spec": _pod(settings)},
    }


def _pod(settings: JobSetSettings) -> JsonDict:
    """Returns the spec of a pod."""
    hardware = settings.hardware
    selector = dict(settings.node_selector)
    pod: JsonDict = {
        "restartPolicy": "Never",  # A podFailurePolicy needs it.
        "terminationGracePeriodSeconds": settings.grace_secs,
    }
    if isinstance(hardware, TpuSlices):
        selector["cloud.google.com/gke-tpu-accelerator"] = hardware.accelerator
        selector["cloud.google.com/gke-tpu-topology"] = hardware.topology
        if hardware.num_slices > 1:  # The network between slices is that of the hosts.
            pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if selector:
        pod["nodeSelector"] = selector
    # NCCL and the workers of Grain need more shared memory than the 64 MiB of a container.
    volumes: list[JsonDict] = [{"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory"}}]
    if settings.volume_claim is not None:
        claim = {"claimName": settings.volume_claim}
        volumes.append({"name": _STORAGE, "persistentVolumeClaim": claim})
    return pod | {"containers": [_container(settings)], "volumes": volumes}


def _container(settings: JobSetSettings) -> JsonDict:
    """Returns the container of a pod, whose first process is dist-ens, so that it gets SIGTERM."""
    mounts = [{"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}]
    if settings.volume_claim is not None:
        mounts.append({"name": _STORAGE, "mountPath": settings.mount_path})
    container: JsonDict = {
        "name": _CONTAINER,
        "image": settings.image,
        "command": ["dist-ens"],
        "args": _arguments(settings),
    }
    if variables := _variables(settings):
        container["env"] = variables
    if resources := _resources(settings):
        container["resources"] = resources
    return container | {"volumeMounts": mounts}


def _arguments(settings: JobSetSettings) -> list[str]:
    """Returns the arguments of a container, in which Kubernetes replaces `$(NAME)`.

    JAX finds the other nodes of a TPU slice on GKE. For other nodes it would ask the API of
    Kubernetes, which needs a package and permissions, even if there is one node. So their arguments
    name the address of process 0.
    """
    # Kubernetes replaces $$ by $.
    own = [argument.replace("$", "$$") for argument in settings.arguments]
    hardware = settings.hardware
    if isinstance(hardware, TpuSlices):
        return own
    return with_flags(
        own,
        flag("coordinator_address", f"{settings.coordinator}:{_COORDINATOR_PORT}"),
        flag("num_processes", hardware.num_nodes),
        flag("process_id", "$(JOB_COMPLETION_INDEX)"),
    )


def _variables(settings: JobSetSettings) -> list[JsonDict]:
    """Returns the environment variables of a container."""
    variables: list[JsonDict] = []
    if settings.num_slices > 1:
        # libtpu would wait for ever for a slice that does not come back.
        variables = [
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": settings.coordinator},
            {"name": "MEGASCALE_NUM_SLICES", "value": str(settings.num_slices)},
            {
                "name": "MEGASCALE_SLICE_ID",
                "valueFrom": {"fieldRef": {"fieldPath": _JOB_INDEX}},
            },
            {"name": "LIBTPU_INIT_ARGS", "value": "--megascale_abort_on_hangs=true"},
        ]
    for secret in settings.secrets:
        source = {"secretKeyRef": {"name": secret.secret, "key": secret.key}}
        variables.append({"name": secret.name, "valueFrom": source})
    return variables


def _resources(settings: JobSetSettings) -> JsonDict:
    """Returns the resources of a container."""
    hardware = settings.hardware
    requests = {"cpu": settings.cpu, "memory": settings.memory}
    resources: JsonDict = {}
    if requests := {name: amount for name, amount in requests.items() if amount is not None}:
        resources["requests"] = requests
    if isinstance(hardware, TpuSlices):
        resources["limits"] = {"google.com/tpu": str(hardware.chips_per_node)}
    elif hardware.gpus_per_node:
        resources["limits"] = {"nvidia.com/gpu": str(hardware.gpus_per_node)}
    return resources
