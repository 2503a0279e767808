"""Finds out why a run would not start: dist-ens doctor [--config=FILE] [--workdir=DIR] [--fix]."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, cast

from absl import flags

from dist_ens.cluster_environment import (
    Detected,
    chosen_by_flags,
    detect,
    num_gpus,
    visible_gpus,
)
from dist_ens.commands import printable
from dist_ens.compile_cache import compiled_folder
from dist_ens.errors import counted
from dist_ens.exit_codes import ExitCode
from dist_ens.json_text import JsonDict
from dist_ens.metrics.table import print_table
from dist_ens.terminal import PlainConsole
from launch import cli, diagnosis
from launch.config_flags import ConfigFlags
from launch.diagnosis import Finding
from launch.path_flags import define_path

_WORKDIR = define_path("workdir", None, "Folder of the run, which need not exist.")
_FIX = flags.DEFINE_boolean(
    "fix",
    False,
    "Whether to make the workdir, take write permissions on the compile cache from others, and "
    "remove a TPU lock file that no process holds.",
)
_CONFIG = ConfigFlags()
_FAREWELL_SECS = 10.0  # Time to leave the other processes in an orderly way.
# Steps of the probe, by the fact that it reports at their end.
_STEPS = {"started": "libraries", "met": "processes", "platform": "devices", "done": "hosts"}
# Longest time of each step. A slow file system may need minutes for the libraries.
_PATIENCE_SECS = {"libraries": 180.0, "processes": 60.0, "devices": 60.0, "hosts": 60.0}


def main() -> int:
    """Prints a table of findings with their remedies, and returns the exit code."""
    detected, gpus = _detected(), visible_gpus(os.environ)
    findings = [diagnosis.of_versions(), *diagnosis.of_cluster(detected, os.environ, gpus)]
    # The probe below holds GPU memory itself.
    others = [diagnosis.of_tpu_lock(diagnosis.TPU_LOCK, fix=_FIX.value), diagnosis.of_gpu_memory()]
    told: JsonDict = {}
    if any(each.is_bad for each in findings):
        findings.append(Finding("devices", "not started, because of the cluster"))
    else:
        findings += _of_probe(told, detected.coordinator_address)
    is_own = "JAX_COMPILATION_CACHE_DIR" not in os.environ
    findings.append(diagnosis.of_cache(compiled_folder(), is_own=is_own, fix=_FIX.value))
    if _WORKDIR.value is not None:
        findings.append(diagnosis.of_workdir(_WORKDIR.value, fix=_FIX.value))
    findings += [each for each in others if each is not None]
    _print(findings, told.get("process_id", detected.process_id) or 0)
    return ExitCode.USAGE if any(each.is_bad for each in findings) else ExitCode.DONE


def _detected() -> Detected:
    """Returns the cluster of this process, by its variables and the flags."""
    detected, given = detect(os.environ), flags.FLAGS
    if None in (given.coordinator_address, given.num_processes, given.process_id):
        return detected  # If only some flags are given, the probe says which are missing.
    return chosen_by_flags(
        detected, given.coordinator_address, given.num_processes, given.process_id
    )


def _of_probe(told: JsonDict, address: str | None) -> Iterator[Finding]:
    """Yields the findings about the processes, their devices and the mesh.

    Args:
        told: Dict that is filled with what the probe reports.
        address: Address of process 0; None if it is not known.
    """
    own = ("fix", "nofix")
    arguments = [each for each in sys.argv[1:] if each.lstrip("-").partition("=")[0] not in own]
    with tempfile.TemporaryFile() as log:
        probe = subprocess.Popen(
            [sys.executable, "-P", "-m", diagnosis.PROBE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )
        try:
            for facts in _facts(cast(IO[bytes], probe.stdout), told):
                yield from _of_facts(facts)
            code = probe.wait(_FAREWELL_SECS)
        except (TimeoutError, subprocess.TimeoutExpired):
            code = 0
            if "done" not in told:
                yield _of_missed_step(told, address)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(probe.pid, signal.SIGKILL)
            probe.wait()
        if code and "done" not in told:
            log.seek(0)
            why = _first_error(log.read().decode(errors="replace"))
            yield Finding(_awaited(told), "failed", why, is_bad=True)


def _facts(output: IO[bytes], told: JsonDict) -> Iterator[JsonDict]:
    """Yields the objects that the probe prints, a JSON object a line.

    Args:
        output: Standard output of the probe.
        told: Dict to which each object is added.

    Raises:
        TimeoutError: If a step takes too long.
    """
    text, began = b"", time.monotonic()
    while "done" not in told:
        left = max(0.0, began + _PATIENCE_SECS[_awaited(told)] - time.monotonic())
        if not select.select([output], [], [], left)[0]:
            raise TimeoutError
        chunk = os.read(output.fileno(), 1 << 16)
        if not chunk:
            return
        *lines, text = (text + chunk).split(b"\n")
        for line in filter(lambda line: line.startswith(b"{"), lines):
            began = time.monotonic()
            facts = json.loads(line)
            told |= facts
            yield facts


def _of_facts(facts: JsonDict) -> Iterator[Finding]:
    """Yields the findings about one object of the probe."""
    if "platform" in facts:
        yield _of_devices(facts)
    if "hosts" in facts:
        yield diagnosis.of_hosts(facts["hosts"])
    if "shares_workdir" in facts:
        yield diagnosis.of_shared_workdir(facts["shares_workdir"])
    if "mesh" in facts:
        yield Finding("mesh", facts["mesh"])
    if "no_mesh" in facts:
        yield Finding("mesh", "impossible", facts["no_mesh"], is_bad=True)


def _of_devices(facts: JsonDict) -> Finding:
    """Returns the finding about the devices of all processes."""
    over = ""
    if facts["num_processes"] > 1:
        over = f" over {facts['num_processes']} processes; here {len(facts['local_devices'])}"
    found = f"{counted(facts['num_devices'], 'device')} ({facts['kind']}){over}"
    gpus = num_gpus(os.environ)
    remedy = ""
    if gpus and facts["platform"] == "cpu" and not os.environ.get("JAX_PLATFORMS"):
        remedy = (
            f"JAX does not use the {counted(gpus, 'GPU')} of this machine. Install its plugin: pip "
            "install 'dist-ens[cuda]'."
        )
    return Finding("devices", found, remedy, is_bad=bool(remedy))


def _awaited(told: JsonDict) -> str:
    """Returns the name of the step that the probe has not ended."""
    return next(step for fact, step in _STEPS.items() if fact not in told)


def _of_missed_step(told: JsonDict, address: str | None) -> Finding:
    """Returns the finding about a step that took too long."""
    step = _awaited(told)
    what = {
        "libraries": "Python imported its libraries too slowly. Install them on a faster disk.",
        "processes": "The other processes did not come. Start the command on every host at the "
        f"same time, and check that each host reaches {address or 'process 0'}.",
        "devices": "The devices did not start. End processes that were left over and hold them. On "
        "a TPU pod start the command on every worker.",
        "hosts": "The hosts did not answer each other. Check the network between them.",
    }[step]
    return Finding(step, f"no end within {_PATIENCE_SECS[step]:.0f} s", what, is_bad=True)


def _first_error(log: str) -> str:
    """Returns the first error in what the probe printed, which caused those after it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for pattern in (r"error: (.*)", r"[EF]\d{4} [^\]]*\] (.*)", r"(\S*Error: .*)"):
        for line in lines:
            if found := re.match(pattern, line):
                return found[1]
    return lines[-1] if lines else "The process ended without a message."


def _print(findings: list[Finding], process_id: int) -> None:
    """Prints the findings. Only process 0 prints those that are sound."""
    if process_id == 0:
        print_table(PlainConsole(), diagnosis.table_of(findings))
        for line in diagnosis.remedies_of(findings):
            print(printable(line))
        if not any(each.is_bad for each in findings):
            print("A run can start. Next: dist-ens train with the same --config and --workdir.")
    else:
        where = f"process {process_id} on {socket.gethostname()}"
        for line in diagnosis.remedies_of(each for each in findings if each.is_bad):
            print(printable(f"{where}: {line}"))


def run() -> None:
    """Runs the command."""
    cli.run(main, _CONFIG.prepare, joins_cluster=lambda: False)


if __name__ == "__main__":
    run()
