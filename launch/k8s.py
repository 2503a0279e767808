"""Writes a JobSet of Kubernetes: dist-ens k8s --name=NAME --image=IMAGE … -- train FLAGS.

TPU slices on GKE:  --tpu_accelerator=tpu-v6e-slice --tpu_topology=4x4 [--num_slices=2]
GPU nodes:          --num_nodes=2 --gpus_per_node=8
CPU nodes:          --num_nodes=2 --cpu=8 --memory=16Gi

The command after -- runs on every node. It starts again after a preemption, and fails after an
error. The cluster needs the controller of JobSet.
"""

from absl import flags

from dist_ens.commands import command_line
from dist_ens.errors import UserError
from dist_ens.paths import shortened
from launch import cli
from launch.jobset import JobSetSettings, Nodes, SecretVariable, TpuSlices, jobset
from launch.path_flags import define_path
from launch.rendered import check_workdir, deliver, written_file
from launch.started_command import StartedCommand
from launch.yaml_text import yaml_text

_NAME = flags.DEFINE_string("name", None, "Name of the JobSet.")
_IMAGE = flags.DEFINE_string("image", None, "Container image with dist_ens and the config files.")
_TPU_ACCELERATOR = flags.DEFINE_string(
    "tpu_accelerator", None, "Kind of TPU as GKE names it, such as tpu-v6e-slice."
)
_TPU_TOPOLOGY = flags.DEFINE_string(
    "tpu_topology", None, "Chips of a TPU slice along each axis, such as 4x4."
)
_CHIPS_PER_NODE = flags.DEFINE_integer("chips_per_node", 4, "Number of TPU chips of a node.")
_NUM_SLICES = flags.DEFINE_integer("num_slices", 1, "Number of TPU slices.")
_NUM_NODES = flags.DEFINE_integer("num_nodes", 1, "Number of GPU or CPU nodes.")
_GPUS_PER_NODE = flags.DEFINE_integer("gpus_per_node", 0, "Number of GPUs of a node.")
_CPU = flags.DEFINE_string("cpu", None, "CPU cores that each pod requests, such as 8.")
_MEMORY = flags.DEFINE_string("memory", None, "Memory that each pod requests, such as 64Gi.")
_NODE_SELECTOR = flags.DEFINE_list(
    "node_selector", [], "Labels KEY=VALUE that a node must have, separated by commas."
)
_NAMESPACE = flags.DEFINE_string(
    "namespace", None, "Namespace of the JobSet. Default: that of the current context."
)
_QUEUE = flags.DEFINE_string("queue", None, "LocalQueue of Kueue that starts the JobSet.")
_VOLUME_CLAIM = flags.DEFINE_string(
    "volume_claim", None, "PersistentVolumeClaim (ReadWriteMany) for the workdir."
)
_MOUNT_PATH = flags.DEFINE_string("mount_path", "/runs", "Folder where pods see the volume.")
_SECRET_ENV = flags.DEFINE_list(
    "secret_env",
    [],
    "Environment variables NAME=SECRET/KEY whose values are in Secrets, separated by commas.",
)
_GRACE_SECS = flags.DEFINE_integer(
    "grace_secs", 120, "Seconds to save before a pod is killed, after its SIGTERM."
)
_OUTPUT = define_path("output", None, "File to write. Default: standard output.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Whether to print the file and write nothing.")
_COMMAND = StartedCommand()
# A quantity of Kubernetes that is not negative.
_QUANTITY = r"(\d+\.?\d*|\.\d+)([KMGTPE]i|[mkMGTPE]|[eE][+-]?\d+)?"
_OF_TPUS: tuple[str, ...] = ("tpu_accelerator", "tpu_topology", "chips_per_node", "num_slices")
_OF_NODES: tuple[str, ...] = ("num_nodes", "gpus_per_node")


def main() -> None:
    """Writes the JobSet, and prints the next commands."""
    settings = JobSetSettings(
        name=cli.required(_NAME, "digits"),
        image=cli.required(_IMAGE, "registry.example.com/dist-ens:1"),
        arguments=_COMMAND.arguments,
        hardware=_hardware(),
        namespace=_NAMESPACE.value,
        queue=_QUEUE.value,
        volume_claim=_VOLUME_CLAIM.value,
        mount_path=_MOUNT_PATH.value,
        secrets=tuple(map(SecretVariable.parse, _SECRET_ENV.value)),
        node_selector=tuple(map(_label, _NODE_SELECTOR.value)),
        cpu=cli.in_form(_CPU, _QUANTITY, "a number of CPU cores. Use a number, such as 8 or 500m"),
        memory=cli.in_form(
            _MEMORY,
            _QUANTITY,
            "an amount of memory in Kubernetes. Use a number with a unit, such as 64Gi or 500M",
        ),
        grace_secs=_GRACE_SECS.value,
    )
    check_workdir(settings.arguments, _VOLUME_CLAIM, settings.mount_path)
    written = written_file(_OUTPUT, dry_run=_DRY_RUN.value)
    file = "-" if written is None else str(written)
    text = yaml_text(jobset(settings))
    deliver(text, _OUTPUT, next_commands(settings, file), dry_run=_DRY_RUN.value)


def _hardware() -> TpuSlices | Nodes:
    """Returns the nodes that the flags describe."""
    own, other = _OF_NODES, _OF_TPUS
    if _TPU_ACCELERATOR.value is not None or _TPU_TOPOLOGY.value is not None:
        own, other = other, own
    mixed = [f"--{name}" for name in other if flags.FLAGS[name].present]
    if mixed:
        raise UserError(
            f"{', '.join(mixed)} cannot be used here. TPU slices have the flags "
            f"--{', --'.join(_OF_TPUS)}, and other nodes have --{', --'.join(_OF_NODES)}. Remove "
            "the flags of one kind."
        )
    if own == _OF_NODES:
        return Nodes(_NUM_NODES.value, _GPUS_PER_NODE.value)
    return TpuSlices(
        cli.required(_TPU_ACCELERATOR, "tpu-v6e-slice"),
        cli.required(_TPU_TOPOLOGY, "4x4"),
        _CHIPS_PER_NODE.value,
        _NUM_SLICES.value,
    )


def _label(text: str) -> tuple[str, str]:
    """Returns the key and the value of a label."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UserError(
            f"--node_selector={shortened(text)} is not a label. Use KEY=VALUE, such as "
            "cloud.google.com/gke-accelerator=nvidia-l4."
        )
    return key, value


def next_commands(settings: JobSetSettings, file: str) -> list[str]:
    """Returns the commands that a person types after the JobSet is written.

    Args:
        settings: Settings of the JobSet.
        file: Path of its file; `-` for standard input.
    """
    where = {"namespace": settings.namespace}
    process_0 = (
        f"jobset.sigs.k8s.io/jobset-name={settings.name},jobset.sigs.k8s.io/job-index=0,"
        "batch.kubernetes.io/job-completion-index=0"
    )
    start = "start it" if file != "-" else "start it, with the file above as input"
    commands = [
        (start, command_line("kubectl", "apply", filename=file, **where)),
        (
            "its log",
            command_line("kubectl", "logs", follow=True, tail="-1", selector=process_0, **where),
        ),
        ("its restarts", command_line("kubectl", "get", "jobset", settings.name, **where)),
    ]
    if settings.queue is not None:
        workload = f"jobset-{settings.name}"  # kubectl describes every object with this prefix.
        why = command_line("kubectl", "describe", "workload", workload, **where)
        commands.append(("why it is suspended", why))
    commands.append(
        ("stop it", command_line("kubectl", "delete", "jobset", settings.name, **where))
    )
    return [f"{command}  # {what}" for what, command in commands]


def run() -> None:
    """Runs the command."""
    cli.run(main, _COMMAND.prepare, joins_cluster=lambda: False)


if __name__ == "__main__":
    run()
