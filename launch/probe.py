"""Starts what a run starts, and reports it: python -m launch.probe [--config=FILE] [--workdir=DIR].

`dist-ens doctor` runs this in a separate process, which it can end if a step takes too long. Each
line on standard output is a JSON object about a step that has ended.
"""

import json
import pathlib
import secrets
import socket
import time

import jax
import numpy as np
from jax.experimental import multihost_utils

from dist_ens import cluster
from dist_ens.errors import UserError
from dist_ens.experiment import describe_source
from dist_ens.experiment.record import Run
from dist_ens.json_text import Json
from dist_ens.layout import Layout
from launch import cli
from launch.config_flags import ConfigFlags
from launch.diagnosis import existing_folder
from launch.path_flags import define_path

_WORKDIR = define_path("workdir", None, "Folder of the run.")
_CONFIG = ConfigFlags()
_BYTES = 2048  # Length of what each process sends to the others.
_PATIENCE_SECS = 5.0  # Time after which a network file system shows a new file.


def main() -> None:
    """Reports the processes, their devices, the mesh, and the names of the hosts."""
    # The command has joined the other processes before it calls this function.
    _tell(met=jax.distributed.is_initialized())
    devices, local = jax.devices(), jax.local_devices()
    _tell(
        process_id=jax.process_index(),
        num_processes=jax.process_count(),
        platform=devices[0].platform,
        kind=devices[0].device_kind,
        num_devices=len(devices),
        local_devices=[device.id for device in local],
    )
    if jax.process_count() > 1:
        _tell(hosts=_gathered(socket.gethostname()))
        if _WORKDIR.value is not None:
            _tell(shares_workdir=_shares(_WORKDIR.value))
    if _CONFIG.file is not None:
        try:
            _tell(mesh=_mesh())
        except UserError as error:
            _tell(no_mesh=str(error))
    _tell(done=True)


def _tell(**facts: Json) -> None:
    """Prints facts as a line of JSON."""
    print(json.dumps(facts), flush=True)


def _mesh() -> str:
    """Returns a sentence on the mesh of the config, and the part of it that this host holds.

    Raises:
        UserError: If the config cannot be used, or the members or the batch do not divide.
    """
    experiment = _CONFIG.experiment()
    own = _CONFIG.source(experiment.data)
    if own is None:
        spec, num_train_examples = describe_source(experiment.data)
    else:
        spec, num_train_examples = own.spec, own.num_train_examples
    run = Run(experiment, spec, num_train_examples or 0)
    rows = experiment.layout.ensemble_axis
    devices = cluster.devices_for(run.num_members, rows)
    layout = Layout.make(run.num_members, ensemble_axis=rows, devices=devices)
    layout.check_batch_size("data.global_batch_size", experiment.data.global_batch_size)
    columns = ", ".join(map(str, layout.host_columns))
    members = layout.host_members
    return (
        f"{layout} for {run.num_members} members; here members {members.min()} to {members.max()} "
        f"and data columns {columns}"
    )


def _gathered(facts: Json) -> Json:
    """Returns the facts of each process, in the order of the processes."""
    own = json.dumps(facts).encode().ljust(_BYTES)
    rows = multihost_utils.process_allgather(np.frombuffer(own, np.uint8))
    return [json.loads(np.asarray(row, np.uint8).tobytes()) for row in rows]


def _shares(workdir: pathlib.Path) -> Json:
    """Returns for each process whether it reads a file that process 0 writes.

    Args:
        workdir: Folder of the run. If it is not there, process 0 writes in the nearest folder that
            is.
    """
    nonce, file, told = secrets.token_hex(8), None, ""
    if cluster.is_main():
        file = existing_folder(workdir) / f".doctor_{nonce}"
        try:
            file.write_text(nonce)
            told = str(file.absolute())
        except OSError:  # Another finding says so.
            file = None
    written = cluster.bytes_of_main(told.encode().ljust(_BYTES)).decode().rstrip()
    try:
        return _gathered(bool(written) and _appears(pathlib.Path(written)))
    finally:
        if file is not None:
            file.unlink(missing_ok=True)


def _appears(file: pathlib.Path) -> bool:
    """Returns whether this host reads a new file of process 0, whose content ends its name."""
    deadline = time.monotonic() + _PATIENCE_SECS
    while time.monotonic() < deadline:
        try:
            return file.name.endswith(file.read_text())
        except OSError:
            time.sleep(0.1)
    return False


def _joins_cluster() -> bool:
    """Reports that the libraries are imported, and returns that this process joins the others."""
    _tell(started=True)
    return True


def run() -> None:
    """Runs the command."""
    cli.run(main, _CONFIG.prepare, joins_cluster=_joins_cluster)


if __name__ == "__main__":
    run()
