"""Certificates by which the processes of a run recognise each other, over real sockets."""

import dataclasses
import json
import socket
import ssl
import subprocess
import sys
import threading
import time

import jax
import pytest
import trustme

from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens.errors import RunError, UserError
from dist_ens.meeting import meet, own_card
from dist_ens.mutual_tls import MutualTls
from test_cluster import free_port

pytestmark = pytest.mark.quick
SPIFFE = "spiffe://example.org/"


def certificates(folder, authority, *names, prefix=None):
    """Files of a new certificate with some names, signed by an authority."""
    folder.mkdir()
    own = authority.issue_cert(*names)
    own.private_key_pem.write_to_path(folder / "key.pem")
    for part in own.cert_chain_pems:
        part.write_to_path(folder / "cert.pem", append=True)
    authority.cert_pem.write_to_path(folder / "ca.pem")
    return MutualTls(*(str(folder / f"{name}.pem") for name in ("cert", "key", "ca")), prefix)


def joined(server, client):
    """Whether a server and a client take each other's certificates; over loopback."""
    found = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept():
            connection, _ = listener.accept()
            connection.settimeout(5)
            try:
                with server.context(of_server=True).wrap_socket(
                    connection, server_side=True
                ) as secure:
                    server.check_peer(secure)
                    secure.sendall(b"welcome\n")
                    found.append(True)
            except OSError:
                found.append(False)

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), 5) as plain,
                client.context(of_server=False).wrap_socket(
                    plain, server_hostname="127.0.0.1"
                ) as secure,
            ):
                client.check_peer(secure)
                found.append(secure.recv(8) == b"welcome\n")
        except OSError:
            found.append(False)
        thread.join()
    return all(found)


def test_processes_with_certificates_of_one_authority_take_each_other(tmp_path):
    authority = trustme.CA()
    one, two = (certificates(tmp_path / n, authority, "127.0.0.1") for n in "ab")
    assert joined(one, two)


def test_a_certificate_of_another_authority_is_refused_on_either_side(tmp_path):
    one = certificates(tmp_path / "a", trustme.CA(), "127.0.0.1")
    two = certificates(tmp_path / "b", trustme.CA(), "127.0.0.1")
    assert not joined(one, two)
    # The client trusts the server's authority, and only the server does not trust the client's.
    trusting = MutualTls(two.cert_file, two.key_file, one.ca_file)
    assert not joined(one, trusting)


def test_process_0_must_have_a_certificate_of_its_address(tmp_path):
    authority = trustme.CA()
    one = certificates(tmp_path / "a", authority, "node0.example.org")
    two = certificates(tmp_path / "b", authority, "127.0.0.1")
    assert not joined(one, two)


@pytest.mark.parametrize(
    ("of_server", "of_client", "is_taken"),
    [
        (f"{SPIFFE}run/0", f"{SPIFFE}run/1", True),
        ("spiffe://example.org.evil/run/0", f"{SPIFFE}run/1", False),
        (f"{SPIFFE}run/0", "spiffe://other.org/run/1", False),
    ],
)
def test_a_uri_may_stand_for_the_address(tmp_path, of_server, of_client, is_taken):
    authority = SpiffeAuthority()
    one = certificates(tmp_path / "a", authority, of_server, prefix=SPIFFE)
    two = certificates(tmp_path / "b", authority, of_client, prefix=SPIFFE)
    assert joined(one, two) == is_taken


class SpiffeAuthority(trustme.CA):
    """An authority whose certificates name a URI, which `trustme` itself does not write."""

    def issue_cert(self, uri):
        from cryptography import x509

        real = x509.SubjectAlternativeName
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                x509,
                "SubjectAlternativeName",
                lambda _: real([x509.UniformResourceIdentifier(uri)]),
            )
            return super().issue_cert("unused.example.org")


def met(address, tls_of_each, timeout_secs=10):
    """What each process gets from a meeting, by its number: the ids of all, or a message."""
    found = {}

    def come(process_id, tls):
        try:
            cards = meet(address, len(tls_of_each), process_id, timeout_secs, address, tls)
            found[process_id] = [card.process_id for card in cards]
        except (UserError, RunError) as error:
            found[process_id] = str(error)

    threads = [threading.Thread(target=come, args=each) for each in enumerate(tls_of_each)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_processes_meet_by_their_certificates(tmp_path):
    authority = trustme.CA()
    tls = [certificates(tmp_path / n, authority, "127.0.0.1") for n in "abc"]
    assert met(f"127.0.0.1:{free_port()}", tls) == {i: [0, 1, 2] for i in range(3)}


@pytest.mark.slow
def test_a_process_of_another_authority_does_not_come_in(tmp_path):
    ours = certificates(tmp_path / "a", trustme.CA(), "127.0.0.1")
    other = certificates(tmp_path / "b", trustme.CA(), "127.0.0.1")
    found = met(f"127.0.0.1:{free_port()}", [ours, other], timeout_secs=2)
    assert "Process 1 has not come" in found[0]
    assert "The certificate of process 0 at " in found[1]


@pytest.mark.slow
def test_a_process_without_certificates_does_not_come_in(tmp_path):
    ours = certificates(tmp_path / "a", trustme.CA(), "127.0.0.1")
    found = met(f"127.0.0.1:{free_port()}", [ours, None], timeout_secs=2)
    assert "Process 1 has not come" in found[0]
    assert "Process 1 of 2 processes cannot reach process 0" in found[1]


def test_a_process_that_ended_while_it_waited_may_come_again(tmp_path):
    authority = trustme.CA()
    tls = [certificates(tmp_path / n, authority, "127.0.0.1") for n in "abc"]
    address = f"127.0.0.1:{free_port()}"
    found = []
    first = threading.Thread(target=lambda: found.append(meet(address, 3, 0, 20, address, tls[0])))
    first.start()
    host, port = address.split(":")
    with plain_connection(host, int(port)) as plain:
        context = tls[1].context(of_server=False)
        with context.wrap_socket(plain, server_hostname=host) as secure:
            ended = dataclasses.replace(own_card(1), pid=1)
            hello = {"card": dataclasses.asdict(ended), "num_processes": 3}
            secure.sendall(json.dumps(hello).encode() + b"\n")
            time.sleep(0.5)  # Process 0 reads it.
    others = [
        threading.Thread(target=meet, args=(address, 3, i, 20, address, tls[i])) for i in (1, 2)
    ]
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join()
    assert [card.pid for card in found[0]] == [own_card(0).pid] * 3


def plain_connection(host, port):
    """A connection to a process that may only now begin to listen."""
    while True:
        try:
            return socket.create_connection((host, port), 5)
        except ConnectionRefusedError:
            time.sleep(0.05)


@pytest.mark.skipif(jax.__version_info__ < (0, 11, 2), reason="this JAX has no mutual TLS")
def test_a_run_of_two_processes_trains_by_certificates(tmp_path):
    folder = tmp_path / "certificates"
    certificates(folder, trustme.CA(), "127.0.0.1")
    names = {"CERT": "cert", "KEY": "key", "CA": "ca"}
    variables = {f"JAX_MTLS_{n}_FILE": str(folder / f"{name}.pem") for n, name in names.items()}
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "launch.local", "--processes=2", "--devices_per_process=1"),
            *("--", "train", f"--config={ROOT / 'configs' / 'digits.py'}", "--config.steps=3"),
            *(f"--workdir={tmp_path / 'run'}", "--config.execution=vmap"),
        ],
        cwd=ROOT,
        env=COMMAND_ENVIRONMENT
        | variables
        | {"JAX_PLATFORMS": "cpu", "JAX_DISTRIBUTED_VERIFY_SECURE_CREDENTIALS": "true"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 3


def test_without_variables_there_is_no_tls():
    assert MutualTls.from_environ({"JAX_MTLS_CERT_FILE": ""}, "0.10.2") is None


def test_the_variables_are_those_of_jax():
    files = {f"JAX_MTLS_{name}_FILE": name for name in ("CERT", "KEY", "CA")}
    given = MutualTls.from_environ(files | {"JAX_MTLS_PEER_URI_PREFIX": SPIFFE}, "0.11.2")
    assert given == MutualTls("CERT", "KEY", "CA", SPIFFE)


def test_old_protocols_are_not_spoken(tmp_path):
    one = certificates(tmp_path / "a", trustme.CA(), "127.0.0.1")
    assert one.context(of_server=True).minimum_version >= ssl.TLSVersion.TLSv1_2
