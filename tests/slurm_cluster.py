"""A real Slurm with two nodes on this machine, from Debian's packages, which are not installed.

    python tests/slurm_cluster.py

downloads the packages, and ends with an error if that is not possible here. The nodes are two
`slurmd` that share the machine. Both need the names of the nodes, so that they run with a hosts
file of their own, which takes root.
"""

import contextlib
import os
import pathlib
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping

PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins"),
    *("munge", "libmunge2", "libhwloc15", "liblua5.1-0"),
)
LIMIT_SECS = 240
_ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
_CACHE = pathlib.Path("~/.cache/dist_ens/slurm").expanduser()
# `low` is preempted by `high`, after a notice.
_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
PluginDir={libraries}/slurm-wlm
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,bf_interval=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=120 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF State=UP
"""
_WITH_HOSTS = 'mount --bind "$1" /etc/hosts && exec "${@:2}"'


def packages() -> pathlib.Path:
    """Returns the folder with the unpacked packages, which are downloaded once."""
    unpacked = _CACHE / "unpacked"
    if unpacked.exists():
        return unpacked
    _CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_CACHE) as name:
        folder = pathlib.Path(name)
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
        for package in folder.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, folder / "unpacked"], check=True)
        with contextlib.suppress(OSError):  # Another process was faster.
            (folder / "unpacked").rename(unpacked)
    return unpacked


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait_for(condition: Callable[[], object], what: object) -> None:
    """Waits until a condition holds. The error names what has it."""
    deadline = time.monotonic() + LIMIT_SECS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


class SlurmCluster:
    """A context in which Slurm runs, with its files in an empty folder.

    Attributes:
        environment: Variables of the daemons, of the commands of Slurm, and so of the jobs.
    """

    def __init__(self, folder: pathlib.Path, environment: Mapping[str, str]) -> None:
        self._folder, self._processes = folder, contextlib.ExitStack()
        root = packages()
        libraries = next((root / "usr/lib").glob("*-linux-gnu"))
        paths = [root / "usr/bin", root / "usr/sbin", environment["PATH"]]
        self._conf = _CONF.format(
            host=socket.gethostname(), folder=folder, libraries=libraries, ports=_free_ports(3)
        )
        self._stepd = root / "usr/sbin/slurmstepd-wlm"
        self.environment = {
            **environment,
            "PATH": os.pathsep.join(map(str, paths)),
            "LD_LIBRARY_PATH": f"{libraries}{os.pathsep}{libraries / 'slurm-wlm'}",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }

    def __enter__(self) -> "SlurmCluster":
        with self._processes as processes:
            self._begin()
            self._processes = processes.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user=root", "--signal=KILL", "--full", check=False)
        self.run("scancel", "--user=root", check=False)
        self._processes.close()

    def _begin(self) -> None:
        """Starts the daemons."""
        for name in ("munge", "state", "n1", "n2"):
            (self._folder / name).mkdir()
        (self._folder / "munge").chmod(0o700)
        (self._folder / "slurm.conf").write_text(self._conf)
        hosts = pathlib.Path("/etc/hosts").read_text()
        (self._folder / "hosts").write_text(f"{hosts}\n127.0.0.1 n1 n2\n")
        key = self._folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        munge = [f"--{name}-file={self._folder}/munge/{name}" for name in ("key", "pid", "seed")]
        munge += [f"--log-file={self._folder}/munge/log", f"--socket={self._folder}/munge/socket"]
        self._start("munged", "--foreground", "--force", *munge)
        wait_for((self._folder / "munge" / "socket").exists, self._folder)
        self._start("slurmctld-wlm", "-D", "-c")
        for node in ("n1", "n2"):
            self._start("slurmd-wlm", "-D", "-N", node, "-d", str(self._stepd), with_hosts=True)
        nodes = ("sinfo", "--noheader", "--Node", "--format=%T", "--partition=low")
        wait_for(lambda: self.run(*nodes, check=False).split() == ["idle", "idle"], self._folder)

    def _start(self, *command: str, with_hosts: bool = False) -> None:
        """Starts a daemon, which ends with the context."""
        if with_hosts:
            hosts = str(self._folder / "hosts")
            command = ("unshare", "--mount", "bash", "-c", _WITH_HOSTS, "bash", hosts, *command)
        log = self._processes.enter_context((self._folder / f"{command[0]}.out").open("a"))
        options = {"stdout": log, "stderr": subprocess.STDOUT, "start_new_session": True}
        process = subprocess.Popen(command, env=self.environment, **options)
        self._processes.callback(process.wait)
        self._processes.callback(process.terminate)

    def run(self, *command: str, check: bool = True, **options) -> str:
        """Returns what a command of Slurm prints."""
        options |= {"env": self.environment, "text": True, "check": check}
        stderr = None if check else subprocess.DEVNULL
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, **options).stdout

    def described(self, job: str) -> dict[str, str]:
        """Returns what Slurm knows about a job, such as `JobState` and `ExitCode`."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job)))

    def wait_for(self, job: str, *states: str) -> None:
        """Waits until a job is in one of some states."""
        wait_for(lambda: self.described(job)["JobState"] in states, job)

    def wait_for_end(self, job: str, restarts: int = 0) -> dict[str, str]:
        """Returns what Slurm knows about a job that has ended, or has one restart more."""

        def has_ended() -> bool:
            shown = self.described(job)
            is_requeued = shown["JobState"] == "PENDING" and int(shown["Restarts"]) > restarts
            return is_requeued or shown["JobState"] in _ENDED

        wait_for(has_ended, job)
        return self.described(job)

    def start_again(self, job: str) -> None:
        """Starts a job that was requeued, which Slurm delays by two minutes."""
        assert self.wait_for_end(job)["JobState"] == "PENDING"
        self.run("scontrol", "update", f"JobId={job}", "StartTime=now")
        self.wait_for(job, "RUNNING", "COMPLETED", "FAILED")


if __name__ == "__main__":
    if os.geteuid() or not all(map(shutil.which, ("apt-get", "dpkg", "unshare"))):
        raise SystemExit("Slurm cannot run here: it needs root, Debian, and its packages.")
    packages()
