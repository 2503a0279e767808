"""The findings of `dist-ens doctor` about this machine, and their table."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

import psutil
from rich import box
from rich.table import Table

from dist_ens.cluster_environment import NONE, Detected, chosen_gpus
from dist_ens.commands import quoted
from dist_ens.compile_cache import access_of_others, user_name
from dist_ens.errors import UserError, counted
from dist_ens.meeting import bind_address_of, is_loopback, own_card
from dist_ens.paths import shortened

PROBE = "launch.probe"  # Module that doctor runs in a process of its own.
TPU_LOCK = pathlib.Path("/tmp/libtpu_lockfile")
_LITTLE_BYTES = 2**30  # Free space below which a finding is noted.
_SMI_SECS = 10.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: Name of the check.
        found: Result, such as a path or a number.
        remedy: Sentences that say what is wrong and what to do. Empty if there is nothing to do.
        is_bad: Whether a run would fail. A remedy of a finding that is not bad is a note.
    """

    check: str
    found: str
    remedy: str = ""
    is_bad: bool = False


def table_of(findings: Sequence[Finding]) -> Table:
    """Returns a table with a row for each finding."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("", "check", "found"):
        table.add_column(name, no_wrap=True)
    for each in findings:
        mark = "bad" if each.is_bad else "note" if each.remedy else "ok"
        table.add_row(mark, each.check, each.found, style="bold red" if each.is_bad else None)
    return table


def remedies_of(findings: Iterable[Finding]) -> list[str]:
    """Returns a line for each finding that has a remedy; those of bad findings come first."""
    told = sorted((each for each in findings if each.remedy), key=lambda each: not each.is_bad)
    return [f"{each.check}: {each.remedy}" for each in told]


def of_versions() -> Finding:
    """Returns the finding about the versions of this host."""
    told = ", ".join(f"{name} {version}" for name, version in own_card(0).versions.items())
    return Finding("versions", told)


def of_cluster(detected: Detected, environ: Mapping[str, str], num_gpus: int) -> Iterator[Finding]:
    """Yields the findings about the cluster of this process.

    Args:
        detected: Cluster of this process.
        environ: Environment variables of this process.
        num_gpus: Number of GPUs that JAX would use.
    """
    for problem in detected.problems:
        yield Finding("cluster", detected.cluster, str(problem), is_bad=True)
    told = "none: this process is alone"
    if detected.cluster != NONE:
        number, count = (
            "?" if value is None else value
            for value in (detected.process_id, detected.num_processes)
        )
        told = f"{detected.cluster}: process {number} of {count}"
    if not detected.problems:
        yield Finding("cluster", told)
    for note in detected.notes:
        yield Finding("environment", detected.cluster, note)
    for attribute, variable in detected.variables.items():
        value = getattr(detected, attribute)
        if attribute != "coordinator_address" and value is not None:
            yield Finding(attribute.replace("_", " "), f"{value} ({variable})")
    if address := detected.coordinator_address:
        yield _of_coordinator(address, detected.variables["coordinator_address"], environ)
    try:
        chosen = chosen_gpus(environ, detected, num_gpus)
    except UserError as error:
        yield Finding("local devices", counted(num_gpus, "visible GPU"), str(error), is_bad=True)
        return
    gpus = f"GPUs {', '.join(map(str, chosen))} of {num_gpus} visible" if chosen else "all visible"
    yield Finding("local devices", gpus)


def _of_coordinator(address: str, source: str, environ: Mapping[str, str]) -> Finding:
    """Returns the finding about the address of process 0, and where that listens.

    Args:
        address: Address of process 0.
        source: Variable or flag that has the address.
        environ: Environment variables of this process.
    """
    check, found = "coordinator", f"{address} ({source})"
    try:
        bound = bind_address_of(environ, address)
    except UserError as error:
        return Finding(check, found, str(error), is_bad=True)
    where = "all networks of its machine" if bound is None else bound
    if bound == address and is_loopback(address):
        where = "this machine alone"
    return Finding(check, f"{found}; process 0 listens on {where}")


def of_hosts(hosts: Sequence[str]) -> Finding:
    """Returns the finding about the hosts, whose versions were compared when they met.

    Args:
        hosts: Name of the host of each process.
    """
    names = ", ".join(dict.fromkeys(hosts))
    return Finding("hosts", f"{counted(len(hosts), 'process')} on {names}, with equal versions")


def of_shared_workdir(shares: Sequence[bool]) -> Finding:
    """Returns the finding about whether all processes see one workdir.

    Args:
        shares: Whether each process reads a file that process 0 wrote.
    """
    without = [str(number) for number, reads in enumerate(shares) if not reads]
    if not without:
        return Finding("shared workdir", "all processes read what process 0 writes")
    return Finding(
        "shared workdir",
        f"{len(without)} of {len(shares)} processes do not read what process 0 writes",
        f"The processes {', '.join(without)} do not see the files of process 0. Choose a --workdir "
        "on a file system that all hosts share.",
        is_bad=True,
    )


def of_cache(folder: pathlib.Path | None, *, is_own: bool, fix: bool) -> Finding:
    """Returns the finding about the compilation cache.

    Args:
        folder: Folder of the cache; None if the cache is disabled.
        is_own: Whether the folder is the default of dist_ens and not one that the user named.
        fix: Whether to take write permissions from others.
    """
    check = "compile cache"
    if folder is None:
        return Finding(check, "disabled by JAX_COMPILATION_CACHE_DIR")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if is_own and fix and status.st_mode & 0o022 and status.st_uid == os.getuid():
            folder.chmod(0o700)
            status = folder.stat()
        others = access_of_others(folder)
        size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    except OSError as error:
        return Finding(
            check,
            str(folder),
            f"{quoted(folder)} cannot be used: {error.strerror}. Set XDG_CACHE_HOME or "
            "JAX_COMPILATION_CACHE_DIR to another folder.",
        )
    found = (
        f"{folder}, {size / 2**20:,.0f} MiB, owner {user_name(status.st_uid)}, mode "
        f"{status.st_mode & 0o777:o}"
    )
    remedy = ""
    if others and is_own:
        remedy = (
            f"JAX runs the programs in the cache, and {others}, so the cache is not used. Give "
            "yourself alone the right to write there (chmod 700, for the cache itself also "
            "dist-ens doctor --fix), or set XDG_CACHE_HOME to a folder of your own."
        )
    elif others:
        remedy = (
            f"JAX runs the programs in JAX_COMPILATION_CACHE_DIR, and {others}. Use this folder "
            "only if you trust everybody who can write to it."
        )
    elif not os.access(folder, os.W_OK | os.X_OK):
        remedy = (
            f"{quoted(folder)} is read only, so new programs are not kept. Set "
            "JAX_COMPILATION_CACHE_DIR to a folder that you may write to."
        )
    return Finding(check, found, remedy)


def of_workdir(workdir: pathlib.Path, *, fix: bool) -> Finding:
    """Returns the finding about the folder of a run.

    Args:
        workdir: Folder of the run, which need not exist.
        fix: Whether to make the folder.
    """
    check = "workdir"
    if fix:
        with contextlib.suppress(OSError):  # The check below says why.
            workdir.mkdir(parents=True, exist_ok=True)
    folder = existing_folder(workdir)
    try:
        if folder == workdir and not workdir.is_dir():
            raise NotADirectoryError(0, "it is not a folder")
        with tempfile.TemporaryFile(dir=folder):
            pass
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Finding(
            check,
            f"{workdir} cannot be written",
            f"Nothing can be written in {quoted(folder)}: {error.strerror}. Choose another "
            "--workdir, or correct its permissions.",
            is_bad=True,
        )
    state = "writable" if workdir.is_dir() else f"not there; {folder} is writable"
    remedy = ""
    if free < _LITTLE_BYTES:
        remedy = f"Only {free / 2**20:,.0f} MiB are free in {quoted(folder)}. Free some space."
    return Finding(check, f"{workdir}, {state}, {free / 2**30:,.1f} GiB free", remedy)


def existing_folder(path: pathlib.Path) -> pathlib.Path:
    """Returns a path, or its nearest parent, that exists."""
    path = path.absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def of_tpu_lock(lock: pathlib.Path, *, fix: bool) -> Finding | None:
    """Returns the finding about the file by which libtpu locks the TPUs; None without the file.

    Args:
        lock: Path of the file.
        fix: Whether to remove a file that no process holds.
    """
    check = "TPU lock"
    try:
        status = lock.stat()
    except OSError:
        return None
    if (holder := _lock_holder(status)) is not None:
        return Finding(
            check,
            f"held by process {holder}",
            f"Process {holder} ({_command(holder)}) holds the TPUs. Wait for its end, or end it: "
            f"kill {holder}.",
            is_bad=True,
        )
    if fix:
        with contextlib.suppress(OSError):  # It may belong to another user.
            lock.unlink()
            return Finding(check, f"{lock} removed: no process held it")
    if os.access(lock, os.R_OK | os.W_OK):
        return Finding(check, f"{lock}, held by no process")
    return Finding(
        check,
        f"{lock}, held by no process",
        f"{lock} belongs to {user_name(status.st_uid)}, so libtpu cannot start here. Remove it: "
        f"sudo rm {quoted(lock)}.",
        is_bad=True,
    )


def of_gpu_memory() -> Finding | None:
    """Returns the finding about processes that hold memory of a GPU; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    check = "GPU memory"
    query = ["--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        ended = subprocess.run(
            ["nvidia-smi", *query],
            capture_output=True,
            text=True,
            timeout=_SMI_SECS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Finding(
            check,
            "unknown",
            f"nvidia-smi gave no answer within {_SMI_SECS:.0f} s. Check the driver, or start the "
            "machine again.",
        )
    if ended.returncode:
        return Finding(check, "unknown", f"nvidia-smi failed: {shortened(ended.stdout.strip())}.")
    rows = [line.split(",", 1) for line in ended.stdout.splitlines() if "," in line]
    # Doctors of other processes on this machine have started theirs.
    rows = [row for row in rows if PROBE not in _arguments(row[0].strip())]
    if not rows:
        return Finding(check, "held by no process")
    told = ", ".join(f"process {pid.strip()} holds {used.strip()}" for pid, used in rows)
    return Finding(
        check,
        f"held by {counted(len(rows), 'process')}",
        f"Other processes use the GPUs: {told}. JAX takes most of the memory of a GPU when it "
        "starts. Wait for their end, or end those that were left over.",
    )


def _lock_holder(status: os.stat_result) -> int | None:
    """Returns the number of the process that holds a lock on a file; None without one."""
    try:
        lines = pathlib.Path("/proc/locks").read_text().splitlines()
    except OSError:  # The system is not Linux, so it has no TPUs.
        return None
    for line in lines:  # 1: POSIX ADVISORY WRITE PID MAJOR:MINOR:INODE START END
        words = line.split()
        if len(words) > 5 and words[5].rpartition(":")[2] == str(status.st_ino):
            major, minor, _ = words[5].split(":")
            if (int(major, 16), int(minor, 16)) == (
                os.major(status.st_dev),
                os.minor(status.st_dev),
            ):
                return int(words[4])
    return None


def _command(pid: int) -> str:
    """Returns the start of the command of a process."""
    return shortened(" ".join(_arguments(str(pid))) or "unknown", 80)


def _arguments(pid: str) -> list[str]:
    """Returns the command line of a process; nothing if it is not known."""
    try:
        return psutil.Process(int(pid)).cmdline()
    except (psutil.Error, ValueError):  # nvidia-smi prints [N/A] in some containers.
        return []
