"""Runs in a bucket, on a server that speaks as S3 does: nothing is lost, and one run writes."""

import collections
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import optax
import pytest

import dist_ens as de
from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens.checkpoint import saved_step
from dist_ens.checkpoint.run_folder import locked
from dist_ens.checkpoint.verify import faults_of
from dist_ens.experiment import Experiment
from dist_ens.experiment.train import train
from dist_ens.ground.errors import ExitCode, SaveError, UserError
from dist_ens.layout import Layout
from dist_ens.storage import lease, place_of
from object_servers import Proxy, gcs_server, s3_server
from saving import (
    assert_same,
    begun,
    reader,
    save,
    shapes_of,
    snapshot,
    state_of,
    steps_in,
    verified,
)
from test_cluster import finish, free_port, start

pytestmark = pytest.mark.servers


@pytest.fixture(scope="module")
def server():
    with s3_server() as started:
        yield started


@pytest.fixture
def run(server, monkeypatch, tmp_path):
    """The address of a run that nobody has used."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/runs/{tmp_path.name}"


def names_in(run):
    return place_of(run, "run").names()


def value_at(run, step):
    return float(reader(run, step).state(shapes_of(state_of(0.0)))["w"][0, 0])


@pytest.fixture(scope="module")
def gcs():
    with gcs_server() as variables:
        yield variables


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_a_run_in_a_bucket_is_saved_resumed_and_swept_as_on_a_disk(
    request, monkeypatch, run, scheme
):
    if scheme == "gs":
        for name, value in request.getfixturevalue("gcs").items():
            monkeypatch.setenv(name, value)
        run = run.replace("s3:", "gs:")
    with begun(run) as opened:
        for step in (1, 2, 3):
            files = {"position": str(step).encode()}
            opened.save(snapshot(step, state_of(float(step)), host_files=files))
    assert steps_in(run) == [2, 3]
    assert saved_step(run).step == 3
    assert [value_at(run, step) for step in (2, 3)] == [2.0, 3.0]
    with begun(run) as opened:
        assert opened.saved_step == 3
        assert opened.restore_host_file("position") == b"3"
    # Of each step: the arrays, their two descriptions, a file of the host, and the manifest. A
    # write that a slow server made try again leaves the arrays twice.
    arrays = [name for name in names_in(run) if "/state/d/" in name]
    assert len(names_in(run)) - len(arrays) == 8
    assert 2 <= len(arrays) <= 4


@pytest.mark.parametrize("num_members", [8, 1000])
def test_a_save_makes_few_objects_however_many_members_there_are(run, proxy, num_members):
    layout = Layout.make(num_members, ensemble_axis=1)
    values = np.random.default_rng(0).normal(size=(num_members, 500)).astype(np.float32)
    state = layout.put({"w": values, "b": values[:, :3]}, "members")
    with begun(run) as opened:
        before = len(proxy.requests)
        opened.save(snapshot(1, state, host_files={"position": b"here"}))
        opened.wait()
        requests = collections.Counter(method for method, _ in proxy.requests[before:])
    assert len(names_in(run)) <= 6
    assert requests["PUT"] <= 12, requests
    assert requests.total() <= 45, requests


def test_damage_in_a_bucket_is_told_and_the_step_before_it_is_used(run):
    for step in (1, 2):
        save(run, state_of(float(step)), step)
    said = []
    place = place_of(run, "run") / "checkpoints" / "2"
    [data] = [name for name in place.names() if "/d/" in name]
    content = bytearray(place.read(data))
    content[len(content) // 2] ^= 1
    place.write(data, bytes(content))
    assert faults_of(place)
    with begun(run, said.append) as opened:
        while opened.restore_state(shapes_of(state_of(0.0))) is None:
            pass
        assert opened.saved_step == 1
    assert f"It is kept as {run}/checkpoints/2.damaged. The run resumes from step 1." in said[0]
    save(run, state_of(5.0), 2)
    assert (steps_in(run), value_at(run, 2)) == ([1, 2], 5.0)


def test_every_flipped_bit_of_a_run_in_a_bucket_is_told(run):
    values = {"num_members": 2, "steps": 4, "model": {"name": "mlp", "hidden_sizes": (4,)}}
    train(Experiment.from_dict({**values, "data": {"global_batch_size": 8}}), run)
    assert verified(run) == (0, ["Step 4: sound."])
    place, draw = place_of(run, "run"), random.Random(0)
    names = sorted(place.names())
    for _ in range(50):
        name = draw.choice(names)
        sound = place.read(name)
        content = bytearray(sound)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        place.write(name, bytes(content))
        assert verified(run)[0] == ExitCode.DAMAGED, name
        place.write(name, sound)
    assert verified(run)[0] == 0


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_the_first_command_of_the_readme_and_its_verbs_work_in_a_bucket(
    request, server, run, tmp_path, monkeypatch, scheme
):
    """The scores are those of a run on a disk, and every verb finds the run."""
    variables = dict(server.environment)
    if scheme == "gs":
        variables |= request.getfixturevalue("gcs")
        run = run.replace("s3:", "gs:")
    config = [f"--config={ROOT}/configs/digits.py", "--config.steps=100"]
    np.save(tmp_path / "x.npy", np.zeros((5, 8, 8), np.uint8))
    verbs = [
        ["train", *config, f"--workdir={run}"],
        ["train", *config, f"--workdir={tmp_path / 'disk'}"],
        ["evaluate", f"--workdir={run}", f"--json={run}/scores.json"],
        ["predict", f"--workdir={run}", f"--input={tmp_path / 'x.npy'}", f"--output={run}/p.npz"],
        ["report", run, str(tmp_path / "disk"), f"--output={run}/both.html"],
        ["members", run, "list"],
        ["members", run, "verify"],
        ["replay", run, "--member=1"],
        ["members", run, "copy", "--ids=1,2", f"--to={run}/two"],
        ["members", run, "export", f"--to={run}/nets"],
    ]
    for verb in verbs:
        ended = subprocess.run(
            [sys.executable, "-m", f"launch.{verb[0]}", *verb[1:]],
            env=COMMAND_ENVIRONMENT | variables | {"JAX_PLATFORMS": "cpu"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = place_of(run, "run")
    scores = json.loads(place.read("summary.json"))["test"]
    assert scores == json.loads((tmp_path / "disk" / "summary.json").read_text())["test"]
    assert {"scores.json", "p.npz", "both.html", "two/experiment.json"} <= {*place.names()}
    assert [path.name for path in tmp_path.iterdir() if ":" in path.name] == []


def test_a_second_run_is_refused_with_the_first_one_and_its_time(run, monkeypatch):
    monkeypatch.setattr(lease, "SECS", 2.0)
    told = r"^Another run is training in s3://.* \(host .*, pid \d+, renewed at \d{4}-.*\). Wait"
    with begun(run), pytest.raises(UserError, match=told):
        save(run, state_of(1.0))
    save(run, state_of(1.0))
    assert [name for name in names_in(run) if "lease" in name] == []


def test_the_lease_of_a_dead_run_is_taken_over_and_what_it_left_is_swept(run, monkeypatch):
    monkeypatch.setattr(lease, "SECS", 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(lease.Lease, "release", lambda self: self._has_ended.set())
        save(run, state_of(1.0))
    place = place_of(run, "run") / "checkpoints" / "2"
    for name in ("unfinished", "0a-1/state/_METADATA"):
        place.write(name, b"")
    with begun(run) as opened:
        assert opened.saved_step == 1
    assert place.names() == []


def test_a_run_that_was_stopped_while_another_took_over_writes_no_manifest(run, monkeypatch):
    monkeypatch.setattr(lease, "SECS", 1.0)
    monkeypatch.setattr(lease, "_RENEWALS", 0.001)  # It is stopped, and renews nothing.
    has_begun, goes_on = threading.Event(), threading.Event()

    def before():
        has_begun.set()
        return {}

    real = lease.Lease.renew
    calls = []

    def renew(self):
        calls.append(self)
        if len(calls) == 2:  # It is about to write the manifest.
            assert goes_on.wait(60)
        real(self)

    monkeypatch.setattr(lease.Lease, "renew", renew)
    with begun(run) as stopped:
        stopped.save(snapshot(1, state_of(1.0), before=before))
        assert has_begun.wait(60)
        place = place_of(run, "run")
        _, tag = place.read_tagged(".lease")
        assert place.write_if(
            ".lease", b'{"token": "other"}', tag
        )  # Another run has taken it over.
        goes_on.set()
        with pytest.raises(SaveError, match="another run has taken it over"):
            stopped.wait()
        stopped.save(snapshot(2, state_of(2.0)))
        with pytest.raises(SaveError, match="another run has taken it over"):
            stopped.wait()
    assert steps_in(run) == []


def test_a_run_that_was_stopped_while_another_took_over_ends_and_writes_nothing(
    server, run, tmp_path
):
    """A signal stops the process for longer than a lease lasts, as on a machine that is moved."""
    command = [sys.executable, "-m", "launch.train", f"--config={ROOT}/configs/digits.py"]
    command += [f"--workdir={run}", "--config.steps=1000000", "--config.checkpoint.every_steps=200"]
    log = tmp_path / "first.log"
    variables = COMMAND_ENVIRONMENT | server.environment | {"JAX_PLATFORMS": "cpu"}
    with (
        log.open("w") as file,
        subprocess.Popen(command, env=variables, stdout=file, stderr=file) as first,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(first.kill)
        waiting = time.monotonic()
        while not steps_in(run) and time.monotonic() - waiting < 120:
            time.sleep(0.5)
        first.send_signal(signal.SIGSTOP)
        said = []
        with locked(place_of(run, "run"), said.append):
            before = {name: place_of(run, "run").read(name) for name in names_in(run)}
            first.send_signal(signal.SIGCONT)
            assert first.wait(120) == ExitCode.FAULT
            after = {name: place_of(run, "run").read(name) for name in names_in(run)}
    del before[".lease"], after[".lease"]
    # A save that was being written may have left parts or changed them. They are no checkpoint.
    saved = {
        name.removesuffix("manifest.json") for name in before if name.endswith("manifest.json")
    }
    changed = [name for name, content in after.items() if before.get(name) != content]
    assert before.keys() <= after.keys()
    assert all(re.search(r"checkpoints/\d+/\w+-\d+/", name) for name in changed)
    assert not [name for name in changed if name.startswith(tuple(saved))]
    assert re.search(rf"^{run} is used by host .*, renewed at .* Waiting 30 s", said[0])
    # Its next step tells, or a save that is being written.
    assert re.search("(Another run writes in|another run has taken it over)", log.read_text())
    assert log.read_text().splitlines()[-1].startswith("error: ")


def test_what_another_process_left_without_a_manifest_displaces_no_checkpoint(run):
    for step in (1, 2):
        save(run, state_of(float(step)), step)
    place_of(run, "run").write("checkpoints/1000/0a-1/state/d/x", b"left")
    with begun(run, keep=1) as opened:
        for step in (3, 1000):
            opened.save(snapshot(step, state_of(float(step))))
            opened.wait()
    assert (steps_in(run), value_at(run, 1000)) == ([1000], 1000.0)


def test_a_lease_that_somebody_deletes_is_taken_again(run):
    place = place_of(run, "run")
    mine = lease.Lease(place, "host a, pid 1", "ours")
    assert mine.acquire(print) is None
    place.remove(".lease")
    mine.renew()
    assert mine.is_seen()
    mine.release()


def test_a_lease_is_watched_from_the_first_answer_on(run, monkeypatch):
    monkeypatch.setattr(lease, "SECS", 2.0)
    mine, other = (lease.Lease(place_of(run, "run"), f"host {name}", name) for name in "ab")
    assert mine.acquire(print) is None
    read, answers = other._place.read_tagged, []

    def slow(name):
        found = read(name)
        time.sleep(0 if answers else 2.5)
        answers.append(name)
        return found

    monkeypatch.setattr(other._place, "read_tagged", slow)
    assert other.acquire(print).startswith("host a")
    mine.release()


def test_a_run_whose_renewal_was_not_answered_keeps_its_lease(run):
    place = place_of(run, "run")
    owner, token = "host a, pid 1", "ours"
    mine = lease.Lease(place, owner, token)
    assert mine.acquire(print) is None
    tag = mine._tag
    mine.renew()
    mine._tag = tag  # The answer to this renewal was lost.
    mine.renew()
    mine.check()
    mine.release()
    assert names_in(run) == []


def test_a_bucket_that_cannot_be_used_is_told_before_anything_is_made(run):
    with pytest.raises(UserError, match="s3://no-such-bucket/a.*bucket does not exist"):
        save("s3://no-such-bucket/a", state_of(1.0))


def trained(folder, steps):
    network = (lambda key: {"w": jax.random.normal(key, (3, 2))}, lambda params, x: x @ params["w"])
    values = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    data = {"inputs": values, "labels": np.arange(8) % 2}
    ensemble = de.Ensemble(network, optax.adam(0.1), de.losses.categorical(2), num_members=4)
    saved = de.Checkpoints(folder, every_steps=2)
    log = de.callbacks.JsonLines(f"{folder}/metrics.jsonl")
    options = {"checkpoints": saved, "callbacks": [log], "log_every": 1, "progress": False}
    result = de.fit(ensemble, data, steps=steps, **options)
    loaded = de.load(folder, ensemble=ensemble)
    return result, loaded.predict(values).mean, loaded.history


def test_fit_in_a_bucket_resumes_with_the_bits_of_a_run_on_a_disk_that_was_not_stopped(
    run, tmp_path
):
    whole, expected, history = trained(tmp_path / "whole", 8)
    trained(run, 4)
    resumed, predicted, of_resumed = trained(run, 8)
    assert resumed.step == 8
    assert of_resumed == history == whole.history
    assert [record["step"] for record in history] == [*range(1, 9)]
    assert_same(resumed.state, whole.state)
    assert_same(predicted, expected)
    assert not list(tmp_path.glob("s3*"))


@pytest.fixture
def proxy(server, run, monkeypatch):
    """A server between the run and its bucket, which can be made to fail."""
    with Proxy(server) as started:
        for name, value in started.environment.items():
            monkeypatch.setenv(name, value)
        yield started
        started.fault = None
        started.shutdown()


def passing(proxy, fault, secs):
    """Lets the server fail, and then work again."""
    proxy.fault = fault
    threading.Timer(secs, setattr, (proxy, "fault", None)).start()


@pytest.mark.parametrize(("fault", "secs"), [(503, 5), (0, 20)])
def test_a_save_waits_for_a_server_that_is_busy_or_silent(run, proxy, fault, secs):
    with begun(run) as opened:
        opened.save(snapshot(1, state_of(1.0)))
        opened.wait()
        passing(proxy, fault, secs)
        opened.save(snapshot(2, state_of(2.0)))
        opened.wait()
    assert (steps_in(run), value_at(run, 2)) == ([1, 2], 2.0)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (
            403,
            "(ExpiredToken|ermission denied).*Set or renew the credentials, or give them the",
        ),
        (404, "NoSuchBucket.*Make the bucket, or correct its name"),
    ],
)
def test_a_save_that_failed_is_told_once_and_the_next_one_is_complete(run, proxy, fault, told):
    said = []
    with begun(run, said.append) as opened:
        for step in range(1, 5):
            proxy.fault = fault if step in (2, 3) else None
            opened.save(snapshot(step, state_of(float(step))))
            with contextlib.suppress(SaveError):
                opened.wait()
    assert re.search(f"^Could not write the checkpoint of step 2 in {run}: .*{told}", said[0])
    assert "The last saved step is 1." in said[0]
    assert said[1].endswith("works again. The last saved step is 4.")
    assert len(said) == 2
    assert (steps_in(run), value_at(run, 4)) == ([1, 4], 4.0)

    def save_last():
        with begun(run) as opened:
            proxy.fault = fault
            opened.save(snapshot(5, state_of(5.0)), is_last=True)

    with pytest.raises(SaveError, match=f"{told}.*run the same command again") as raised:
        save_last()
    assert raised.value.exit_code


def test_training_goes_on_while_a_save_waits_for_a_silent_server(run, proxy, monkeypatch):
    monkeypatch.setattr("dist_ens.training.saving._PATIENCE_SECS", 0.5)
    times = {}

    def callback(info):
        times[info.step] = time.monotonic()
        if info.step == 12:
            passing(proxy, 0, 8)
        if info.step > 12:
            time.sleep(0.02)

    ensemble = de.Ensemble(
        (lambda key: {"w": jax.random.normal(key, (3, 1))}, lambda params, x: x @ params["w"]),
        optax.sgd(0.1),
        de.losses.squared_error(),
        num_members=2,
    )
    data = {"inputs": np.ones((8, 3), np.float32), "labels": np.ones(8, np.float32)}
    saved = de.Checkpoints(run, every_secs=None, every_steps=10, keep=100)
    options = {"checkpoints": saved, "callbacks": [callback], "progress": False}
    de.fit(ensemble, data, steps=500, steps_per_call=1, **options)
    assert max(np.diff([times[step] for step in sorted(times)])) < 4
    steps = steps_in(run)
    assert {10, 500} <= {*steps}
    assert 10 < len(steps) < 40  # Those that were due meanwhile were left out.


def test_a_save_waits_for_a_server_that_is_stopped_and_started(server, run, proxy):
    with begun(run) as opened:
        opened.save(snapshot(1, state_of(1.0)))
        opened.wait()
        proxy.shutdown()
        proxy.server_close()
        opened.save(snapshot(2, state_of(2.0)))
        time.sleep(5)
        with Proxy(server, proxy.server_port):
            opened.wait()
            assert (steps_in(run), value_at(run, 2)) == ([1, 2], 2.0)


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_hosts_save_and_resume_in_a_bucket_together(server, run, tmp_path, num_hosts):
    logs = [tmp_path / f"host_{i}.log" for i in range(num_hosts)]
    variables = [f"{name}={value}" for name, value in server.environment.items()]
    python = ["env", *variables, sys.executable]
    script = [*python, "tests/hosts_in_bucket.py", f"127.0.0.1:{free_port()}", str(num_hosts)]
    codes = finish([start([*script, str(i), run], logs[i]) for i in range(num_hosts)], logs)
    assert codes == [0] * num_hosts, "\n".join(log.read_text() for log in logs)
    assert steps_in(run) == [2, 3]
    assert faults_of(place_of(run, "run") / "checkpoints" / "3") == []
    assert len(names_in(run)) / 2 <= 6 + num_hosts
    assert saved_step(run).leaves()["w"].shape == (8, 400)
