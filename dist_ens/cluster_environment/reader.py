"""Reads the environment variables that a cluster gives a process."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from dist_ens.errors import UserError
from dist_ens.json_text import Json
from dist_ens.paths import shortened

NONE = "none"
FLAGS = "flags"
OPENMPI = "openmpi"
SLURM = "slurm"
GKE_TPU = "gke_tpu"
GCE_TPU = "gce_tpu"
SKYPILOT = "skypilot"
KUBERNETES = "kubernetes"
FIRST_PORT, NUM_PORTS = 65536 - 2**12, 2**12  # Ports among which a job's number chooses.
_PROXIES = ("grpc_proxy", "http_proxy", "https_proxy", "all_proxy")


@dataclasses.dataclass(frozen=True)
class Detected:
    """The cluster of a process.

    Attributes:
        cluster: Name of the cluster; `none` if the process is alone.
        num_processes: Number of processes; None if no variable has it.
        process_id: Number of this process, from 0; None if no variable has it.
        tasks_on_node: Number of processes on this machine; None if no variable has it.
        local_rank: Number of this process on its machine, from 0; None if no variable has it.
        coordinator_address: Address of process 0, `host:port`; None if no variable has it.
        num_slices: Number of TPU slices.
        variables: Variable that each attribute was read from, by the attribute's name.
        problems: Errors of the environment. The processes of a run would not find each other.
        notes: Sentences on an environment that works, and may surprise.
    """

    cluster: str = NONE
    num_processes: int | None = None
    process_id: int | None = None
    tasks_on_node: int | None = None
    local_rank: int | None = None
    coordinator_address: str | None = None
    num_slices: int = 1
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    problems: tuple[UserError, ...] = ()
    notes: tuple[str, ...] = ()


class Reader:
    """Reads the variables of one cluster, and keeps which variable each value came from.

    Args:
        environ: Environment variables.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.variables: dict[str, str] = {}
        self.problems: list[UserError] = []

    def text(self, attribute: str, name: str) -> str | None:
        """Returns the value of a variable, and notes it as the source of an attribute."""
        value = self.environ.get(name)
        if value is not None:
            self.variables[attribute] = name
        return value

    def number(self, attribute: str, name: str) -> int | None:
        """Returns the value of a variable as a whole number; None if it is not set, or is none."""
        value = self.text(attribute, name)
        if value is None:
            return None
        if not (value.isascii() and value.isdigit()):
            self.problems.append(
                UserError(
                    f"{name}={shortened(value)} is not a whole number from 0. Unset {name}, or "
                    "start the command with the launcher of the cluster, which sets it."
                )
            )
            return None
        return int(value)

    def missing(self, names: Sequence[str]) -> list[str]:
        """Returns the variables that are not set."""
        return [name for name in names if name not in self.environ]

    def address(self, host: str, port: str) -> str:
        """Returns the address of process 0 with the port that a variable asks for, if one does."""
        return f"{host}:{self.environ.get('JAX_COORDINATOR_PORT') or port}"

    def detected(self, cluster: str, notes: Sequence[str] = (), **attributes: Json) -> Detected:
        """Returns the cluster, checked for a process number that does not exist."""
        count, number = attributes.get("num_processes"), attributes.get("process_id")
        if count is not None and number is not None and number >= count:
            names = [self.variables[name] for name in ("process_id", "num_processes")]
            self.problems.append(
                UserError(
                    f"{names[0]}={number} is not one of {names[1]}={count} processes, so the "
                    "variables are left over from different jobs. Unset both, or start the "
                    "command with the launcher of the cluster."
                )
            )
        if address := self.environ.get("JAX_COORDINATOR_ADDRESS"):
            attributes["coordinator_address"] = address
            self.variables["coordinator_address"] = "JAX_COORDINATOR_ADDRESS"
        return Detected(
            cluster,
            variables=self.variables,
            problems=tuple(self.problems),
            notes=(*notes, *_notes_on_proxies(self.environ, attributes)),
            **attributes,
        )


def listed(names: Sequence[str]) -> str:
    """Returns names with their verb.

    >>> listed(["A"]), listed(["A", "B", "C"])
    ('A is', 'A, B and C are')
    """
    if len(names) == 1:
        return f"{names[0]} is"
    return f"{', '.join(names[:-1])} and {names[-1]} are"


def _notes_on_proxies(environ: Mapping[str, str], attributes: Mapping[str, Json]) -> list[str]:
    """Returns a note if several processes would reach process 0 through a proxy."""
    if (attributes.get("num_processes") or math.inf) <= 1:
        return []
    proxies = [name for name in environ if name.lower() in _PROXIES and environ[name]]
    host = (attributes.get("coordinator_address") or "").rpartition(":")[0]
    spared = ",".join(environ.get(name, "") for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"))
    is_spared = any(part and host.endswith(part) for part in spared.split(",")) or "*" in spared
    if not proxies or is_spared:
        return []
    return [
        f"{', '.join(sorted(proxies))}: the processes may try to reach process 0 through a proxy, "
        f"and wait without end. Add {host or 'the host of process 0'} to no_proxy, or unset the "
        "proxy."
    ]
