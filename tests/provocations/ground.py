"""How the messages of the files that lie in `dist_ens` itself are provoked."""

import contextlib
import dataclasses
import json
import socket
import ssl
import threading
import types

import jax
import numpy as np
from dist_ens.config import OptimizerConfig

from dist_ens import cluster, file_writing, meeting, narrowing, optimizers, paths, peers, state
from dist_ens.errors import BrokenMembersError
from dist_ens.mutual_tls import MutualTls


def _optimizer(**fields):
    return optimizers.make_optimizer(OptimizerConfig(**fields))


def a_cluster_without_all_its_flags():
    cluster.start(num_processes=2, process_id=0)


def an_address_without_a_port():
    cluster.start("10.0.0.1", 2, 0)


def a_number_of_a_process_that_is_not_there():
    cluster.start("10.0.0.1:1234", 2, 2)


def a_cluster_that_jax_does_not_find(monkeypatch):
    def refused(**_):
        raise ValueError("process_id and num_processes must be nonnegative.")

    monkeypatch.setattr(cluster, "meet", lambda *_: [])
    monkeypatch.setattr(jax.distributed, "initialize", refused)
    cluster.start("10.0.0.1:1234", 2, 0)


def a_link_in_place_of_a_file_of_a_run(tmp_path):
    (tmp_path / "report.html").symlink_to(tmp_path / "elsewhere")
    file_writing.require_regular_files(tmp_path, ["report.html"])


def members_that_predict_nan():
    raise BrokenMembersError([3, 7])


def text_in_place_of_numbers():
    narrowing.narrowed(np.array(["a"]), "float32", "--input 'a.npy'")


def a_value_that_is_too_large():
    narrowing.narrowed(np.array([[1, 300]]), "uint8", "--input 'a.npy'")


def values_that_are_not_exact_in_another_type():
    narrowing.narrowed(np.array([2**25 + 1, 2**26 + 1]), "float32", "data.source", exact=True)


def an_optimizer_that_is_none():
    _optimizer(name="adamm")


def a_part_of_an_optimizer():
    _optimizer(name="scale_by_adam")


def a_field_among_the_options():
    _optimizer(options={"momentum": 0.9})


def an_option_that_is_a_python_object():
    _optimizer(name="adamw", options={"mask": 1})


def an_option_that_is_unknown():
    _optimizer(options={"beta1": 0.9})


def an_option_that_the_optimizer_refuses(monkeypatch):
    def refused(learning_rate, nesterov=False):
        raise TypeError("nesterov is a bool")

    monkeypatch.setitem(optimizers._FUNCTIONS, "adam", refused)
    _optimizer(name="adam")


def a_learning_rate_that_the_optimizer_does_not_take():
    _optimizer(name="polyak_sgd", learning_rate=0.1)


def a_momentum_that_the_optimizer_does_not_take():
    _optimizer(name="adam", momentum=0.9)


def a_weight_decay_of_adam():
    _optimizer(name="adam", weight_decay=0.1)


def no_learning_rate():
    _optimizer(name="sgd", learning_rate=None)


def a_schedule_of_an_optimizer_with_one_rate():
    _optimizer(name="sm3", schedule="cosine", schedule_steps=9)


def an_unknown_user():
    paths.given_path("~nobody_of_this_name/runs", "--workdir")


def an_empty_path():
    paths.given_path("", "--workdir")


def an_object_in_place_of_an_array():
    state.stack_members([{"w": object()}])


def members_of_other_shapes():
    state.stack_members([{"w": np.zeros(2)}, {"w": np.zeros(3)}])


def members_of_other_structure():
    state.stack_members([{"w": np.zeros(2)}, {"w": np.zeros(2), "b": None}])


def a_member_that_is_not_there():
    state.select_members({"w": np.zeros((2, 3))}, [0, 5])


def leaves_of_other_numbers_of_members():
    state.unstack_members({"w": np.zeros((2, 3)), "b": np.zeros((3, 3))})


def no_members():
    state.stack_members([])


def labels_that_are_text():
    state.held_array(np.array(["cat"]), "data['labels']")


def a_list_in_place_of_an_array():
    state.refuse_lists({"inputs": [[1.0, 2.0]]}, "the data")


def a_number_in_place_of_an_array():
    state.refuse_lists({"inputs": 1.0}, "the data")


_CARD = meeting.Card(0, "n1", 100, {"jax": "0.10.2"})
_OTHER = dataclasses.replace(_CARD, process_id=1, host="n2")
_ADDRESS = "127.0.0.1:47331"


def _met(monkeypatch, *cards, count=2, num_processes=2):
    """Process 0 meets the processes of some cards."""
    monkeypatch.setattr(meeting, "own_card", lambda _: _CARD)

    def come():
        with contextlib.suppress(Exception):
            for card in cards:
                meeting._introduce(card, _ADDRESS, count, meeting.time.monotonic() + 5, 5)

    threading.Thread(target=come, daemon=True).start()
    meeting.meet(_ADDRESS, num_processes, 0, 5 if cards else 0.1)


def a_process_that_does_not_come(monkeypatch):
    _met(monkeypatch)


def two_processes_that_do_not_come(monkeypatch):
    _met(monkeypatch, num_processes=3)


def processes_of_two_sizes_of_a_run(monkeypatch):
    _met(monkeypatch, _OTHER, count=3)


def two_processes_with_one_number(monkeypatch):
    _met(monkeypatch, dataclasses.replace(_OTHER, process_id=0))


def a_host_with_another_version():
    meeting.check_versions([_CARD, dataclasses.replace(_OTHER, versions={"jax": "0.12.0"})])


def an_address_at_which_nobody_listens():
    meeting._introduce(_OTHER, _ADDRESS, 2, meeting.time.monotonic() + 0.1, 0.1)


def a_process_0_that_tells_who_is_missing(monkeypatch):
    _told(monkeypatch, {"lost": "Process 2 has not come."})


def a_process_0_that_tells_a_mistake(monkeypatch):
    _told(monkeypatch, {"error": "Two processes have the number 1."})


def _told(monkeypatch, answer):
    """A process gets an answer from process 0."""
    nobody = contextlib.nullcontext(
        types.SimpleNamespace(sendall=lambda _: None, settimeout=lambda _: None)
    )
    monkeypatch.setattr(meeting.socket, "create_connection", lambda *_, **__: nobody)
    monkeypatch.setattr(meeting, "_line", lambda _: json.dumps(answer))
    meeting._introduce(_OTHER, _ADDRESS, 2, meeting.time.monotonic() + 5, 5)


def a_port_that_is_in_use(monkeypatch):
    monkeypatch.setattr(meeting, "_BUSY_SECS", 0)
    with meeting._listener(_ADDRESS, _ADDRESS):
        meeting._listener(_ADDRESS, _ADDRESS)


def an_address_to_listen_at_of_another_machine():
    meeting._listener(_ADDRESS, "192.0.2.1:4711")


def an_address_to_listen_at_without_a_port():
    meeting.bind_address_of({meeting.BIND_VARIABLE: "10.0.0.1"}, _ADDRESS)


def hosts_with_different_configs():
    client = types.SimpleNamespace(
        key_value_set=lambda *_: None,
        blocking_key_value_get=lambda name, _: json.dumps({"seed": int(name[-1])}),
    )
    watching = peers.Peers(
        client, [_CARD, _OTHER], 0, heartbeat_timeout_secs=1, leave=lambda *_: None
    )
    watching.agree({"seed": 0}, 1)


def a_host_that_sends_nothing():
    def late(*_):
        raise RuntimeError("DEADLINE_EXCEEDED: it took longer than 100 ms.")

    client = types.SimpleNamespace(blocking_key_value_get=late)
    peers.value_of(client, "config", "process 1 (host n2, pid 100)", 0.1)


def a_part_of_mutual_tls():
    MutualTls.from_environ({"JAX_MTLS_CERT_FILE": "cert.pem"}, "0.12.0")


_TLS = {f"JAX_MTLS_{name}_FILE": f"{name.lower()}.pem" for name in ("CERT", "KEY", "CA")}


def mutual_tls_of_an_old_jax():
    MutualTls.from_environ(_TLS, "0.10.2")


def certificates_that_are_not_there():
    certificates = MutualTls.from_environ(_TLS, "0.12.0")
    assert certificates is not None
    certificates.context(of_server=True)


def a_certificate_that_is_not_accepted(monkeypatch):
    class Refusing:
        def wrap_socket(self, *_, **__):
            raise ssl.SSLCertVerificationError(1, "self-signed certificate")

    monkeypatch.setattr(MutualTls, "context", lambda *_, **__: Refusing())
    monkeypatch.setattr(meeting.socket, "create_connection", lambda *_, **__: socket.socket())
    meeting.meet("10.0.0.1:1234", 2, 1, 10, None, MutualTls("cert.pem", "key.pem", "ca.pem"))


def _state(*ids, step=3, length=2):
    count = len(ids)
    return state.State(
        np.full(count, step), np.asarray(ids), np.zeros(count), np.zeros((count, length)), (), ()
    )


def a_member_that_the_state_does_not_have():
    _state(0, 1).select([2])


def no_states():
    state.State.concatenate([])


def states_with_one_member_twice():
    state.State.concatenate([_state(0, 1), _state(1, 2)])


def states_of_two_steps():
    state.State.concatenate([_state(0), _state(1, step=4)])


def states_of_two_networks():
    state.State.concatenate([_state(0), _state(1, length=3)])


def a_path_that_is_not_utf8():
    paths.utf8_path("runs/\udcff")
