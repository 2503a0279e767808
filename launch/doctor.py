"""Finds out why a run would not start: dist-ens doctor [--config=FILE] [--workdir=DIR].

It does what a run does before its second step, and prints a line for each part that works. The
first part that does not ends the command with the message that a run would end with.
"""

import contextlib
import dataclasses
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable
from typing import TypeVar

import jax

from dist_ens.experiment.build import build
from dist_ens.ground.commands import printable, quoted
from dist_ens.ground.errors import UserError, counted
from dist_ens.processes import cluster
from dist_ens.processes.cluster_environment import num_gpus
from dist_ens.processes.peers import versions
from dist_ens.storage import ABSENT, Disk, Place
from dist_ens.training import fit
from launch import cli
from launch.config_flags import ConfigFlags
from launch.path_flags import define_folder

_WORKDIR = define_folder("workdir", None, "Folder of the run, which need not exist.")
_CONFIG = ConfigFlags()
_Result = TypeVar("_Result")
_PATIENCE_SECS = 5.0  # Time after which a network file system shows a new file.


def main() -> None:
    """Prints a line for each check, on process 0."""
    count = jax.process_count()
    _print("processes", f"{count}, with equal versions" if count > 1 else "1: this one is alone")
    _print("devices", _devices())
    _print("cache", jax.config.values["jax_compilation_cache_dir"] or "disabled")
    if _WORKDIR.value is not None:
        _print("workdir", _workdir(_WORKDIR.value))
    if _CONFIG.file.path is not None:
        _take_step()
    _print("A run can start. Next:", "dist-ens train with the same --config and --workdir.")


def _begin() -> bool:
    """Prints what this process is, before it waits for others; returns that it joins them."""
    named = ", ".join(f"{name} {version}" for name, version in versions().items())
    print(f"{'versions':<9} {named} on {socket.gethostname()} (pid {os.getpid()})", flush=True)
    return True


def _print(check: str, found: str) -> None:
    if cluster.is_main():
        print(printable(f"{check:<9} {found}"), flush=True)


def _devices() -> str:
    """Describes the devices of all processes."""
    devices = jax.devices()
    gpus = num_gpus(os.environ)
    if gpus and devices[0].platform == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        raise UserError(
            f"JAX does not use the {counted(gpus, 'GPU')} of this machine: pip install "
            "'dist-ens[cuda]'."
        )
    here = f", {len(jax.local_devices())} of them here" if jax.process_count() > 1 else ""
    return f"{counted(len(devices), 'device')} ({devices[0].device_kind}){here}"


def _workdir(workdir: Place) -> str:
    """Describes the folder of a run: what may be done there, and whether all processes see it."""
    place = workdir
    if isinstance(workdir, Disk):
        path = workdir.path
        place = Disk(next(each for each in (path, *path.parents) if each.exists()))
    name = f".doctor_{cluster.as_main_sees(secrets.randbits(62))}"
    if cluster.is_main():
        _try_all(place, name)
    deadline = time.monotonic() + _PATIENCE_SECS
    while not (is_seen := _sees(place, name)) and time.monotonic() < deadline:
        time.sleep(0.1)
    without = cluster.hosts_with(not is_seen)
    if cluster.is_main():
        _tried(place, "deleted", lambda: place.remove(name))
    if without:
        raise UserError(
            f"The processes {without} do not see the files of process 0 in {quoted(place)}. "
            "Choose a --workdir that all hosts share: a folder on a shared disk, or in a bucket."
        )
    shared = ", shared by all processes" if jax.process_count() > 1 else ""
    if not isinstance(place, Disk):
        return f"{workdir}: files can be written, read, listed, replaced and deleted{shared}"
    free = shutil.disk_usage(place.path).free / 2**30
    return f"{place} can be written{shared}; {free:,.1f} GiB are free"


def _try_all(place: Place, name: str) -> None:
    """Does with a file what a run does with its files, and leaves the file."""
    place.require_writable()
    _tried(place, "written", lambda: place.write(name, b"1"))
    _, tag = _tried(place, "read", lambda: place.read_tagged(name))
    _tried(place, "listed", lambda: place.names(name))
    is_replaced = _tried(place, "replaced", lambda: place.write_if(name, b"2", tag))
    if is_replaced is None or place.write_if(name, b"3", tag) is not None:
        raise UserError(
            f"In {quoted(place)} a file cannot be replaced on the condition that nobody else has "
            "written it, so two runs could write there at once. Choose another --workdir."
        )


def _tried(place: Place, what: str, act: Callable[[], _Result]) -> _Result:
    try:
        return act()
    except OSError as error:
        raise UserError(
            f"Files in {quoted(place)} cannot be {what}: {error.strerror}. Give these credentials "
            "the right to it, or choose another --workdir."
        ) from error


def _sees(place: Place, name: str) -> bool:
    with contextlib.suppress(OSError):
        return place.read_tagged(name)[1] != ABSENT
    return False


def _take_step() -> None:
    """Builds the run of the config, and takes its first step."""
    experiment = _CONFIG.experiment()
    if experiment.execution == "auto":  # The search for the fastest takes longer than a step.
        experiment = dataclasses.replace(experiment, execution="loop")
    source = _CONFIG.file.open_source(experiment.data)
    built = build(experiment, parts=_CONFIG.file.own_parts(source.spec), source=source)
    layout, members = built.ensemble.layout, built.ensemble.layout.host_members
    _print(
        "config",
        f"{layout} for {counted(built.ensemble.num_members, 'member')}; here members "
        f"{members.min()} to {members.max()}",
    )
    began = time.monotonic()
    options = built.arguments | {"steps": 1, "epochs": None, "steps_per_call": 1}
    fit(built.ensemble, **options, progress=False)
    _print("step", f"the first took {time.monotonic() - began:.1f} s, with compiling")


run = cli.command(main, _CONFIG.prepare, joins_cluster=_begin)

if __name__ == "__main__":
    run()
