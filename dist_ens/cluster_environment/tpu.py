"""The hosts of a TPU pod, of one slice or several."""

from collections.abc import Mapping, Sequence

from dist_ens.cluster_environment.reader import GKE_TPU, Detected, Reader, listed
from dist_ens.errors import UserError, counted

_PORT = "8482"
MEGASCALE = ("MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES", "MEGASCALE_SLICE_ID")


def hosts_variable(environ: Mapping[str, str]) -> str | None:
    """Returns the variable that lists the hosts of a TPU slice; None if none is set."""
    names = ("TPU_PROCESS_ADDRESSES_PATH", "TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
    return next((name for name in names if name in environ), None)


def gke_tpu(reader: Reader, notes: Sequence[str]) -> Detected:
    """Returns the cluster of a process on a host of a TPU slice, as GKE describes it."""
    environ = reader.environ
    name = hosts_variable(environ)
    if name is None or name.endswith("_PATH"):  # The file is read by JAX.
        return reader.detected(GKE_TPU, notes)
    hosts = environ[name].split(",")
    if "TPU_WORKER_ID" not in environ:
        reader.problems.append(
            UserError(
                f"{name} lists {counted(len(hosts), 'host')} of a TPU slice, and TPU_WORKER_ID is "
                "not set, as in a shell on one worker. Start the command on every worker with the "
                f"launcher of the slice, or unset {name} to run on this host alone."
            )
        )
        return reader.detected(GKE_TPU, notes)
    check_megascale(reader)
    worker = reader.number("process_id", "TPU_WORKER_ID")
    if worker is not None and worker >= len(hosts):
        reader.problems.append(
            UserError(
                f"TPU_WORKER_ID={worker} is not one of the {counted(len(hosts), 'worker')} in "
                f"{name}, so the variables are left over from different jobs. Unset both, or start "
                "the command with the launcher of the slice."
            )
        )
    if reader.problems:
        return reader.detected(GKE_TPU, notes)
    reader.variables["num_processes"] = name
    num_slices = reader.number("num_slices", "MEGASCALE_NUM_SLICES") or 1
    slice_id = environ.get("MEGASCALE_SLICE_ID", "")
    before = int(slice_id) * len(hosts) if slice_id.isdigit() else 0  # Processes of other slices.
    first = reader.text("coordinator_address", "MEGASCALE_COORDINATOR_ADDRESS")
    if not first:
        first = hosts[0]
        reader.variables["coordinator_address"] = name
    told = list(notes)
    if len(hosts) * num_slices > 1:
        told.append(
            f"The slice has {len(hosts)} hosts ({name}). A command on one of them waits for the "
            "others: start it on every worker."
        )
    return reader.detected(
        GKE_TPU,
        told,
        num_processes=len(hosts) * num_slices,
        process_id=None if worker is None else worker + before,
        tasks_on_node=1,
        local_rank=0,
        coordinator_address=reader.address(first.split(":")[0], _PORT),
        num_slices=num_slices,
    )


def check_megascale(reader: Reader) -> None:
    """Notes a problem if the variables of several TPU slices are not complete, or do not agree."""
    missing = reader.missing(MEGASCALE)
    if missing and len(missing) < len(MEGASCALE):
        reader.problems.append(
            UserError(
                f"Only a part of the variables of several TPU slices is set: {listed(missing)} "
                "missing, as when another job left them over. Unset all that begin with "
                "MEGASCALE_, or set all three."
            )
        )
        return
    values = [reader.environ.get(name, "") for name in MEGASCALE[1:]]
    if all(value.isdigit() for value in values) and int(values[1]) >= int(values[0]):
        reader.problems.append(
            UserError(
                f"MEGASCALE_SLICE_ID={values[1]} is not one of MEGASCALE_NUM_SLICES={values[0]} "
                "slices, so the variables are left over from another job. Unset all that begin "
                "with MEGASCALE_, or start the slices with their launcher."
            )
        )
