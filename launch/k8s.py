"""Writes a JobSet of Kubernetes: dist-ens k8s --name=NAME --image=IMAGE … -- train FLAGS.

TPU slices on GKE:  --tpu_accelerator=tpu-v6e-slice --tpu_topology=4x4 [--num_slices=2]
GPU nodes:          --num_nodes=2 --gpus_per_node=8
CPU nodes:          --num_nodes=2 --cpu=8 --memory=16Gi

The command after -- runs on every node. It starts again after a preemption, and fails after an
error. The cluster needs the controller of JobSet.
"""

from absl import flags

from dist_ens.ground.commands import command_line
from launch import cli
from launch.jobset import render
from launch.path_flags import define_file
from launch.rendered import deliver
from launch.started_command import StartedCommand

_NAME = flags.DEFINE_string("name", None, "Name of the JobSet.")
_IMAGE = flags.DEFINE_string("image", None, "Container image with dist_ens and the config files.")
_TPU_ACCELERATOR = flags.DEFINE_string(
    "tpu_accelerator", None, "Kind of TPU as GKE names it, such as tpu-v6e-slice."
)
_TPU_TOPOLOGY = flags.DEFINE_string(
    "tpu_topology", None, "Chips of a TPU slice along each axis, such as 4x4."
)
_NUM_SLICES = flags.DEFINE_integer("num_slices", 1, "Number of TPU slices.", lower_bound=1)
_NAMESPACE = flags.DEFINE_string(
    "namespace", None, "Namespace of the JobSet. Default: that of the current context."
)
_QUEUE = flags.DEFINE_string("queue", None, "LocalQueue of Kueue that starts the JobSet.")
_JOBSET = (
    *(_NAME, _IMAGE, _TPU_ACCELERATOR, _TPU_TOPOLOGY, _NUM_SLICES, _NAMESPACE, _QUEUE),
    flags.DEFINE_integer("chips_per_node", 4, "Number of TPU chips of a node.", lower_bound=1),
    flags.DEFINE_integer("num_nodes", 1, "Number of GPU or CPU nodes.", lower_bound=1),
    flags.DEFINE_integer("gpus_per_node", 0, "Number of GPUs of a node.", lower_bound=0),
    flags.DEFINE_string("cpu", None, "CPU cores that each pod requests, such as 8."),
    flags.DEFINE_string("memory", None, "Memory that each pod requests, such as 64Gi."),
    flags.DEFINE_list(
        "node_selector", [], "Labels KEY=VALUE that a node must have, separated by commas."
    ),
    flags.DEFINE_string(
        "volume_claim", None, "PersistentVolumeClaim (ReadWriteMany) for the workdir."
    ),
    flags.DEFINE_string("mount_path", "/runs", "Folder where pods see the volume."),
    flags.DEFINE_list(
        "secret_env", [], "Environment variables NAME=SECRET/KEY from Secrets, with commas."
    ),
    flags.DEFINE_integer(
        "grace_secs", 120, "Seconds between SIGTERM and the kill of a pod.", lower_bound=1
    ),
)
_OUTPUT = define_file("output", None, "File to write. Default: standard output.")
_DRY_RUN = flags.DEFINE_bool("dry_run", False, "Whether to print the file and write nothing.")
_COMMAND = StartedCommand()


def main() -> None:
    """Writes the JobSet, and prints the next commands."""
    name = cli.required(_NAME, "digits")
    cli.required(_IMAGE, "registry.example.com/dist-ens:1")
    if _TPU_ACCELERATOR.value or _TPU_TOPOLOGY.value or _NUM_SLICES.value > 1:
        cli.required(_TPU_ACCELERATOR, "tpu-v6e-slice")
        cli.required(_TPU_TOPOLOGY, "4x4")
    text = render(_COMMAND.arguments, **{flag.name: flag.value for flag in _JOBSET})
    is_written = _OUTPUT.value is not None and not _DRY_RUN.value
    file = str(_OUTPUT.value) if is_written else "-"
    deliver(text, _OUTPUT, _next_commands(name, file), dry_run=_DRY_RUN.value)


def _next_commands(name: str, file: str) -> list[str]:
    """Returns the commands that a person types next."""
    where = {"namespace": _NAMESPACE.value}
    process_0 = (
        f"jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/job-index=0,"
        "batch.kubernetes.io/job-completion-index=0"
    )
    start = command_line("kubectl", "apply", filename=file, **where)
    log = command_line("kubectl", "logs", follow=True, tail="-1", selector=process_0, **where)
    restarts = command_line("kubectl", "get", "jobset", name, **where)
    why = command_line("kubectl", "describe", "workload", f"jobset-{name}", **where)
    stop = command_line("kubectl", "delete", "jobset", name, **where)
    return [
        f"{start}  # start it" + (", with the file above as input" if file == "-" else ""),
        f"{log}  # its log",
        f"{restarts}  # its restarts",
        *([f"{why}  # why it is suspended"] if _QUEUE.value else []),
        f"{stop}  # stop it",
    ]


run = cli.command(main, _COMMAND.prepare, joins_cluster=lambda: False)

if __name__ == "__main__":
    run()
