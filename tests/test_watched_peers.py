"""Which process of a run is taken for lost, by a coordination service that is a dict."""

import json
import time

import pytest

from commands import wait_for
from dist_ens.ground.errors import ExitCode, UserError
from dist_ens.processes import cluster, peers
from dist_ens.processes.peers import Card, Failure, Peers

pytestmark = pytest.mark.quick
TIMEOUT_SECS = 0.3
CARDS = [Card(i, f"n{i}", 100 + i, {}) for i in range(2)]


class Service:
    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        if key in self.values and not allow_overwrite:
            raise RuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def key_value_dir_get(self, key):
        return [item for item in self.values.items() if item[0].startswith(key)]

    def blocking_key_value_get(self, key, timeout_ms):
        return self.values[key]


@pytest.fixture
def watched():
    """The peers of process 0, their service, and what would have ended the process."""
    service, left = Service(), []
    watching = Peers(service, CARDS, 0, TIMEOUT_SECS, lambda *why: left.append(why))
    watching.begin()
    yield watching, service, left
    watching.end()


def test_a_silent_process_is_lost_and_named_with_what_it_holds(watched):
    watching, service, left = watched
    watching.hold(["members 0 to 1", "members 2 to 3"])
    service.values[f"{peers._BEATS}/1"] = "4 0"
    wait_for(lambda: left, lambda: left)
    code, message = left[0]
    assert code == ExitCode.HOST_LOST
    assert message.startswith("error: Process 1 (host n1, pid 101, members 2 to 3) has been silent")
    assert Failure(**json.loads(service.values[f"{peers._FAILURES}/first"])).process_id == 1


def test_a_process_that_has_done_its_work_is_not_lost_and_ends_with_a_later_failure(watched):
    watching, service, left = watched
    service.values[f"{peers._BEATS}/1"] = "4 0"
    time.sleep(TIMEOUT_SECS / 2)
    service.values[f"{peers._BEATS}/1"] = peers._ENDED
    time.sleep(3 * TIMEOUT_SECS)
    assert left == []
    watching.end()
    failure = Failure(1, ExitCode.DISK_FULL, "The disk is full.")
    service.values[f"{peers._FAILURES}/first"] = json.dumps(failure._asdict())
    wait_for(lambda: left, lambda: left)
    assert left[0] == (46, "error: Process 1 (host n1, pid 101) has failed: The disk is full.")


def test_the_first_failure_is_kept_and_the_process_with_the_least_progress_is_named(watched):
    watching, service, _ = watched
    service.values[f"{peers._BEATS}/1"] = "-1 0"  # Fewer than this process has made.
    assert watching.behind() == "process 1 (host n1, pid 101)"
    service.values[f"{peers._FAILURES}/first"] = json.dumps(Failure(1, 1, "first")._asdict())
    watching.fail(2, "second")
    assert json.loads(service.values[f"{peers._FAILURES}/first"])["message"] == "first"


def test_processes_with_other_versions_are_refused(monkeypatch):
    service = Service()
    monkeypatch.setattr(cluster.global_state, "client", service)
    monkeypatch.setattr(cluster.global_state, "num_processes", 2)
    monkeypatch.setattr(cluster.global_state, "process_id", 1)
    monkeypatch.setattr(cluster, "versions", lambda: {"numpy": "9.9"})
    facts = {"the version of numpy": "2.0", "--num_processes": "2"}
    service.values["dist_ens/cards/0"] = json.dumps(vars(Card(0, "n0", 100, facts)))
    message = (
        r"differ in the version of numpy: 2\.0 in process 0 \(host n0, pid 100\) and 9\.9 in p"
    )
    with pytest.raises(UserError, match=message):
        cluster._exchanged_cards(1.0)
