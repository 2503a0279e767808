"""The meeting of the processes of a run before JAX starts, at the address of process 0.

JAX ends a process by SIGABRT and a trace of C++ if another one does not come. Here every process
first introduces itself to process 0, which then says to all who has come. So an error message can
name who is missing, and hosts with other versions are found before anything is computed.
"""

import contextlib
import dataclasses
import errno
import ipaddress
import json
import os
import platform
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from importlib import metadata

from dist_ens.errors import RunError, UserError, counted
from dist_ens.exit_codes import ExitCode
from dist_ens.mutual_tls import MutualTls
from dist_ens.paths import shortened

_RETRY_SECS = 0.2
# Time for a port to become free after another run.
_BUSY_SECS = 10.0
# Time for a process that has connected to introduce itself. Others may connect by mistake.
_HELLO_SECS = 5.0
# Variable by which JAX, too, chooses where process 0 listens.
BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
_LONGEST_LINE = 2**20  # Largest number of bytes of a message.
# Packages whose versions must be equal.
_COMPARED = ("dist-ens", "jax", "jaxlib", "numpy", "orbax-checkpoint")


@dataclasses.dataclass(frozen=True)
class Card:
    """The description of a process, which it sends to the others.

    Attributes:
        process_id: Number of the process.
        host: Name of its machine.
        pid: Number of the process on its machine.
        versions: Version of each package, and of Python.
    """

    process_id: int
    host: str
    pid: int
    versions: Mapping[str, str]

    def __str__(self) -> str:
        return f"process {self.process_id} (host {self.host}, pid {self.pid})"


def own_card(process_id: int) -> Card:
    """Returns the card of this process.

    Args:
        process_id: Number of this process.
    """
    versions = {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in _COMPARED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return Card(process_id, socket.gethostname(), os.getpid(), versions)


def meet(
    address: str,
    num_processes: int,
    process_id: int,
    timeout_secs: float,
    bind_address: str | None = None,
    tls: MutualTls | None = None,
) -> list[Card]:
    """Waits for all processes of a run, and returns their cards.

    Args:
        address: Address `host:port` of process 0.
        num_processes: Number of processes.
        process_id: Number of this process, in [0, num_processes).
        timeout_secs: Time to wait, in seconds.
        bind_address: Address `host:port` at which process 0 listens. Default: the port of `address`
            on all networks of its machine.
        tls: Certificates by which the processes recognise each other. Default: anybody who reaches
            the address is taken for a process of the run.

    Returns:
        The card of each process, in the order of their numbers.

    Raises:
        UserError: If the port is in use, two processes have the same number, or versions differ.
        RunError: If a process does not come in time, or process 0 cannot be reached.
    """
    card = own_card(process_id)
    deadline = time.monotonic() + timeout_secs
    if process_id:
        cards = _introduce(card, address, num_processes, deadline, timeout_secs, tls)
    else:
        with _listener(address, bind_address) as listener:
            cards = _receive(listener, card, address, num_processes, deadline, timeout_secs, tls)
    check_versions(cards)
    return cards


def check_versions(cards: Sequence[Card]) -> None:
    """Raises a `UserError` if a process has other versions than process 0.

    Args:
        cards: Cards of all processes, process 0 first.
    """
    first = cards[0]
    for card in cards[1:]:
        for name in sorted({*first.versions, *card.versions}):
            here, there = (each.versions.get(name, "none") for each in (first, card))
            if here != there:
                raise UserError(
                    f"The processes of a run have different versions of {name}: {here} in {first} "
                    f"and {there} in {card}. Install the same version on all hosts."
                )


def bind_address_of(environ: Mapping[str, str], address: str) -> str | None:
    """Returns the address `host:port` at which process 0 listens; None for all networks.

    Without a variable, process 0 listens where the name in its address leads: on loopback, or on
    one network of its machine. It listens on all networks if the name leads to no address of this
    machine, as behind a translation of addresses, or to several.

    Args:
        environ: Environment variables of the process.
        address: Address of process 0, by which the others reach it.

    Raises:
        UserError: If the variable is not an address.

    >>> bind_address_of({}, "127.0.0.1:4711"), bind_address_of({}, "192.0.2.1:4711")
    ('127.0.0.1:4711', None)
    """
    given = environ.get(BIND_VARIABLE)
    if not given:
        # JAX would listen on every network of the machine.
        return address if is_loopback(address) else _own_address(address)
    if not is_address(given):
        raise UserError(
            f"{BIND_VARIABLE}={shortened(given)} is not host:port with a port from 1 to 65535. "
            f"Correct it, such as 10.0.0.1:1234, or unset {BIND_VARIABLE}."
        )
    return given


def _own_address(address: str) -> str | None:
    """Returns the only network address of this machine that a name leads to; None without one.

    Args:
        address: Address `host:port`, which is not loopback.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError:  # The name may be known only to the others.
        return None
    numbers = {str(place[0]) for *_, place in found}
    # Some systems let their own name lead to loopback, where no other machine can come.
    if len(numbers) != 1 or is_loopback(f"{min(numbers)}:{port}"):
        return None
    number = min(numbers)
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((number, 0))  # It fails if the address is not of this machine.
    except OSError:
        return None
    return f"[{number}]:{port}" if family == socket.AF_INET6 else f"{number}:{port}"


def is_address(text: str) -> bool:
    """Returns whether a text is an address `host:port`.

    >>> is_address("10.0.0.1:1234"), is_address("[::]:1234"), is_address("::1:1234")
    (True, True, False)
    """
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 2**16
    return is_port and bool(host) and host == host.strip() and (":" not in host or host[0] == "[")


def is_loopback(address: str) -> bool:
    """Returns whether an address `host:port` can only be reached from this machine.

    >>> is_loopback("127.0.0.1:4711"), is_loopback("localhost:1"), is_loopback("10.0.0.1:4711")
    (True, True, False)
    """
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # It is a name.
        return False


def _receive(
    listener: socket.socket,
    card: Card,
    address: str,
    num_processes: int,
    deadline: float,
    timeout_secs: float,
    tls: MutualTls | None = None,
) -> list[Card]:
    """Waits as process 0 for the others, and sends the cards of all to each of them."""
    certified = None if tls is None else tls.context(of_server=True)
    come: dict[int, Card] = {0: card}
    connections: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as open_sockets:
        while len(come) < num_processes:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection = open_sockets.enter_context(listener.accept()[0])
            except TimeoutError:
                _forget_ended(come, connections)
                missing = sorted({*range(num_processes)} - {*come})
                error = _missing(missing, [*come.values()], address, timeout_secs)
                _answer([*connections.values()], {"lost": str(error)})
                raise error from None
            connection.settimeout(_HELLO_SECS)
            if tls is not None and certified is not None:
                try:
                    connection = open_sockets.enter_context(
                        certified.wrap_socket(connection, server_side=True)
                    )
                    tls.check_peer(connection)
                except OSError:  # It is no process of this run.
                    continue
            hello = _hello(connection)
            if hello is None:
                continue
            _forget_ended(come, connections)
            mistake = _mistake(*hello, num_processes, come)
            if mistake is not None:
                _answer([*connections.values(), connection], {"error": str(mistake)})
                raise mistake
            number = hello[0].process_id
            come[number], connections[number] = hello[0], connection
        cards = [come[i] for i in range(num_processes)]
        told = [*connections.values()]
        _answer(told, {"cards": [dataclasses.asdict(each) for each in cards]})
        # The side that closes first keeps the port for a while, so the others do.
        for connection in told:
            with contextlib.suppress(OSError):
                connection.settimeout(_HELLO_SECS)
                connection.recv(1)
    return cards


def _forget_ended(come: dict[int, Card], connections: dict[int, socket.socket]) -> None:
    """Removes the processes that have ended while they waited. They may be started again.

    Args:
        come: Cards of the processes that came, by their numbers.
        connections: Connections to them, by their numbers.
    """
    for number, connection in list(connections.items()):
        connection.setblocking(False)
        try:
            # A connection with TLS cannot peek, so this looks at what lies below it.
            has_ended = not socket.socket.recv(connection, 1, socket.MSG_PEEK)
        except BlockingIOError:
            has_ended = False
        except OSError:
            has_ended = True
        connection.setblocking(True)
        if has_ended:
            del come[number], connections[number]


def _mistake(
    other: Card, count: int, num_processes: int, come: Mapping[int, Card]
) -> UserError | None:
    """Returns the error about a process that has come; None if nothing is wrong.

    Args:
        other: Card of the process.
        count: Number of processes that it was given.
        num_processes: Number of processes that process 0 was given.
        come: Cards of the processes that came before, by their numbers.
    """
    if count != num_processes:
        return UserError(
            f"The processes of a run have different numbers of processes: {num_processes} in "
            f"{come[0]} and {count} in {other}. Give all of them the same --num_processes."
        )
    before = come.get(other.process_id)
    if before is not None and (before.host, before.pid) != (other.host, other.pid):
        return UserError(
            f"Two processes have the number {other.process_id}: pid {before.pid} on host "
            f"{before.host} and pid {other.pid} on host {other.host}. Give each process its own "
            "--process_id."
        )
    return None


def _missing(
    missing: Sequence[int], come: Sequence[Card], address: str, timeout_secs: float
) -> RunError:
    """Returns the error about processes that have not come."""
    numbers = ", ".join(map(str, missing))
    noun, verb = ("Process", "has") if len(missing) == 1 else ("Processes", "have")
    waited = ", ".join(map(str, come[:8])) + (" and others" if come[8:] else "")
    return RunError(
        f"{noun} {numbers} {verb} not come to {address} within "
        f"--start_timeout_secs={timeout_secs:g}. Those that waited are: {waited}. Look at the "
        "output of the missing ones, and check that every host can reach this address.",
        exit_code=ExitCode.HOST_LOST,
    )


def _listener(address: str, bind_address: str | None) -> socket.socket:
    """Returns a socket that listens at an address, which another run may have just left.

    Args:
        address: Address of process 0, whose port is taken without `bind_address`.
        bind_address: Address to listen at; None for all networks of this machine.
    """
    host, _, port = (bind_address or f":{address.rpartition(':')[2]}").rpartition(":")
    where = "" if host == "[::]" else host.strip("[]")
    is_dual = not where and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual or ":" in where else socket.AF_INET
    until = time.monotonic() + _BUSY_SECS
    while True:
        try:
            return socket.create_server((where, int(port)), family=family, dualstack_ipv6=is_dual)
        except OSError as error:
            is_busy = error.errno == errno.EADDRINUSE
            if is_busy and time.monotonic() < until:
                time.sleep(_RETRY_SECS)
                continue
            remedy = (
                "Choose another port: another --coordinator_address, or JAX_COORDINATOR_PORT in a "
                "job of Slurm."
                if is_busy
                else f"Correct the address of process 0, or {BIND_VARIABLE}."
            )
            # A name that is not known has a negative number, and a text of its own.
            number = error.errno or 0
            why = os.strerror(number) if number > 0 else error.strerror
            raise UserError(
                f"Process 0 cannot listen at {shortened(bind_address or address)}: {why}. {remedy}"
            ) from error


def _hello(connection: socket.socket) -> tuple[Card, int] | None:
    """Returns the card that comes over a connection, and the number of processes that it names."""
    try:
        hello = json.loads(_line(connection))
        return Card(**hello["card"]), int(hello["num_processes"])
    except (OSError, ValueError, TypeError, KeyError):  # It is no process of dist_ens.
        return None


def _answer(connections: Sequence[socket.socket], answer: Mapping[str, object]) -> None:
    """Sends an answer to all processes that have come."""
    line = json.dumps(answer).encode() + b"\n"
    for connection in connections:
        with contextlib.suppress(OSError):  # The process may have been killed.
            connection.sendall(line)


def _introduce(
    card: Card,
    address: str,
    num_processes: int,
    deadline: float,
    timeout_secs: float,
    tls: MutualTls | None = None,
) -> list[Card]:
    """Introduces this process to process 0, and returns the cards of all."""
    certified = None if tls is None else tls.context(of_server=False)
    host, _, port = address.rpartition(":")
    hello = {"card": dataclasses.asdict(card), "num_processes": num_processes}
    why = "it does not answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            with contextlib.ExitStack() as open_sockets:
                connection: socket.socket = open_sockets.enter_context(
                    socket.create_connection((host.strip("[]"), int(port)), timeout=left)
                )
                if tls is not None and certified is not None:
                    secure = certified.wrap_socket(connection, server_hostname=host.strip("[]"))
                    connection = open_sockets.enter_context(secure)
                    tls.check_peer(secure)
                connection.sendall(json.dumps(hello).encode() + b"\n")
                # Process 0 answers when its own time is over, which may have just begun.
                connection.settimeout(timeout_secs + _HELLO_SECS)
                answer = json.loads(_line(connection))
        except ssl.SSLCertVerificationError as error:
            raise UserError(
                f"The certificate of process 0 at {shortened(address)} is not accepted: "
                f"{getattr(error, 'verify_message', error.strerror)}. Give all processes "
                "certificates of one authority, and process 0 one of its address, or set "
                "JAX_MTLS_PEER_URI_PREFIX."
            ) from error
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it does not answer"
            time.sleep(min(_RETRY_SECS, max(deadline - time.monotonic(), 0)))
            continue
        if "error" in answer:
            raise UserError(answer["error"])
        if "lost" in answer:
            raise RunError(answer["lost"], exit_code=ExitCode.HOST_LOST)
        return [Card(**each) for each in answer["cards"]]
    raise RunError(
        f"Process {card.process_id} of {counted(num_processes, 'process')} cannot reach process 0 "
        f"at {shortened(address)}: {why}. The limit is --start_timeout_secs={timeout_secs:g}. "
        "Check the address, and the output of process 0.",
        exit_code=ExitCode.HOST_LOST,
    )


def _line(connection: socket.socket) -> bytes:
    """Returns the line that comes over a connection.

    Raises:
        ValueError: If the connection ends before the line does, or the line is too long.
    """
    received = b""
    while not received.endswith(b"\n"):
        part = connection.recv(65536)
        received += part
        if not part or len(received) > _LONGEST_LINE:
            raise ValueError("there is no whole line")
    return received
