"""The meeting of the processes of a run, by threads that stand for hosts."""

import dataclasses
import json
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens import meeting
from dist_ens.errors import RunError, UserError
from dist_ens.meeting import Card, check_versions, meet
from test_cluster import free_port

pytestmark = pytest.mark.quick
VERSIONS = {"Python": "3.11", "jax": "0.10.2"}


def card(process_id, **changed):
    made = Card(process_id, f"host{process_id}", 100 + process_id, VERSIONS)
    return dataclasses.replace(made, **changed)


def met(monkeypatch, cards, num_processes=None, timeout_secs=10):
    """What each process gets from a meeting: the cards of all, or a message."""
    cards_of = {f"thread {place}": each for place, each in enumerate(cards)}
    monkeypatch.setattr(meeting, "own_card", lambda _: cards_of[threading.current_thread().name])
    address, found = f"127.0.0.1:{free_port()}", {}

    def come(place, each):
        counts = num_processes or [len(cards)] * len(cards)
        try:
            found[place] = meet(address, counts[place], each.process_id, timeout_secs)
        except (UserError, RunError) as error:
            found[place] = str(error)

    threads = [
        threading.Thread(target=come, args=(place, each), name=f"thread {place}")
        for place, each in enumerate(cards)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[place] for place in range(len(cards))]


def test_all_processes_get_the_cards_of_all_in_their_order(monkeypatch):
    cards = [card(i) for i in (3, 0, 2, 1)]
    assert met(monkeypatch, cards) == [[card(i) for i in range(4)]] * 4


def test_two_processes_with_one_number_are_told_to_all(monkeypatch):
    cards = [card(0), card(1), dataclasses.replace(card(1), pid=7)]
    found = met(monkeypatch, cards)
    assert len({*found}) == 1
    assert "Two processes have the number 1: pid " in found[0]


def test_different_numbers_of_processes_are_told(monkeypatch):
    found = met(monkeypatch, [card(0), card(1)], num_processes=[2, 3])
    expected = (
        "The processes of a run have different numbers of processes: 2 in process 0 (host "
        "host0, pid 100) and 3 in process 1 (host host1, pid 101). Give all of them the same "
        "--num_processes."
    )
    assert found == [expected] * 2


def test_a_host_with_another_version_is_named(monkeypatch):
    other = card(1, versions=VERSIONS | {"jax": "0.12.0"})
    found = met(monkeypatch, [card(0), other])
    expected = (
        "The processes of a run have different versions of jax: 0.10.2 in process 0 (host host0, "
        "pid 100) and 0.12.0 in process 1 (host host1, pid 101). Install the same version on "
        "all hosts."
    )
    assert found == [expected] * 2


def test_a_package_that_one_host_lacks_is_a_different_version():
    with pytest.raises(UserError, match="versions of jax: 0.10.2 in .* and none in"):
        check_versions([card(0), card(1, versions={"Python": "3.11"})])


def test_a_connection_that_says_something_else_is_passed_over(monkeypatch):
    address = f"127.0.0.1:{free_port()}"
    monkeypatch.setattr(meeting, "own_card", card)
    found = []
    waiting = threading.Thread(target=lambda: found.append(meet(address, 2, 0, 20)))
    waiting.start()
    host, _, port = address.partition(":")
    for said in (b"GET / HTTP/1.1\r\n", b"{}\n", b""):
        connection = None
        while connection is None:
            try:
                connection = socket.create_connection((host, int(port)))
            except ConnectionRefusedError:
                continue
        connection.sendall(said)
        connection.close()
    assert meet(address, 2, 1, 20) == [card(0), card(1)]
    waiting.join()
    assert found == [[card(0), card(1)]]


def test_a_card_can_be_sent():
    own = meeting.own_card(3)
    assert Card(**json.loads(json.dumps(dataclasses.asdict(own)))) == own
    assert {"Python", "dist-ens", "jax", "jaxlib", "numpy", "orbax-checkpoint"} == {*own.versions}


WAITING = """
import sys
from dist_ens.meeting import meet
print(flush=True)
meet(sys.argv[1], 3, 1, 60)
"""


def test_a_process_that_is_killed_while_it_waits_may_be_started_again(monkeypatch):
    monkeypatch.setattr(meeting, "own_card", card)
    address, found = f"127.0.0.1:{free_port()}", {}

    def come(process_id):
        found[process_id] = meet(address, 3, process_id, 60)

    first = threading.Thread(target=come, args=(0,))
    first.start()
    waiting = subprocess.Popen(
        [sys.executable, "-c", WAITING, address],
        env=COMMAND_ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    )
    waiting.stdout.readline()
    deadline = time.monotonic() + 30
    while not is_connected(waiting.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.5)  # It introduces itself.
    waiting.kill()
    waiting.wait()
    again = threading.Thread(target=come, args=(1,))  # The card of this one has another pid.
    again.start()
    come(2)
    first.join()
    again.join()
    assert found == {i: [card(0), card(1), card(2)] for i in range(3)}


def is_connected(pid):
    return any(each.status == "ESTABLISHED" for each in psutil.Process(pid).net_connections())


def test_process_0_listens_where_the_variable_of_jax_says(monkeypatch):
    monkeypatch.setattr(meeting, "own_card", card)
    # The others reach it by another address, as through the translation of a network.
    port, bound = free_port(), f"127.0.0.1:{free_port()}"
    assert meeting.bind_address_of({meeting.BIND_VARIABLE: bound}, f"10.0.0.1:{port}") == bound
    found = []
    process_0 = threading.Thread(target=lambda: found.append(meet(f"x:{port}", 2, 0, 20, bound)))
    process_0.start()
    assert meet(bound, 2, 1, 20) == [card(0), card(1)]
    process_0.join()
    assert found == [[card(0), card(1)]]
    with socket.create_server(("127.0.0.1", port)):  # Nothing listens there.
        pass


@pytest.mark.parametrize("bound", ["[::]:0", "0.0.0.0:0", "localhost:0", "[::1]:0"])
def test_process_0_listens_at_every_form_of_an_address(bound):
    with meeting._listener("10.0.0.1:1", bound) as listener:
        assert listener.getsockname()[1]


def test_an_address_that_is_not_of_this_machine_is_told_at_once():
    began = time.monotonic()
    with pytest.raises(UserError, match="Process 0 cannot listen at '192.0.2.1:1': Cannot assign"):
        meeting._listener("10.0.0.1:1", "192.0.2.1:1")
    assert time.monotonic() - began < 5


def networks():
    """Addresses of this machine that other machines may reach."""
    found = [
        each.address
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]
    return found[:1]


@pytest.mark.parametrize(
    ("leads_to", "expected"),
    [
        (networks(), networks()),
        (["192.0.2.7"], []),  # It is of another machine, as behind a translation of addresses.
        (["127.0.1.1"], []),  # Debian lets a machine's own name lead to loopback.
        ([*networks(), "192.0.2.7"], []),
        ([], []),
    ],
)
def test_process_0_listens_on_the_network_of_its_name_alone(monkeypatch, leads_to, expected):
    def resolved(host, *_, **__):
        if not leads_to:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in leads_to]

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    found = meeting.bind_address_of({}, "node0:4711")
    assert found == (f"{expected[0]}:4711" if expected else None)
