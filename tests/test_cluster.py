"""Two real processes that find each other on loopback, against one."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from functools import partial

import jax
import numpy as np
import pytest

import dist_ens as de
import fast_xla
import two_hosts
from commands import LIMIT_SECS, free_port, python, together, wait_for
from commands import start as start_commands
from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens.data.feed import Placement, TrainingSet
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.train import train
from dist_ens.ground.errors import ExitCode, UserError
from dist_ens.layout import Layout
from dist_ens.processes import cluster
from dist_ens.processes.stop_signal import COPY_SECS, StopSignal
from dist_ens.sampling import Order


def start(command, log, **own):
    """A process in a session of its own, its output in a file: nothing of it can hold the test."""
    variables = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": fast_xla.flags(1)}
    with log.open("w") as file:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=COMMAND_ENVIRONMENT | variables | own,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(processes, logs):
    """Return codes; every process is ended, also when one does not end by itself."""
    deadline = time.monotonic() + LIMIT_SECS
    try:
        return [p.wait(max(1.0, deadline - time.monotonic())) for p in processes]
    except subprocess.TimeoutExpired:
        pytest.fail("\n".join(log.read_text() for log in logs))
    finally:
        for p in processes:
            if p.poll() is None:
                os.killpg(p.pid, signal.SIGKILL)


def two_logs(folder):
    return [folder / f"host_{i}.log" for i in range(2)]


def start_two(verb, folder):
    """Two processes of `two_hosts.py`."""
    script = [sys.executable, "tests/two_hosts.py", verb, f"127.0.0.1:{free_port()}"]
    logs = two_logs(folder)
    return [start([*script, str(i), str(folder)], logs[i]) for i in range(2)]


def finish_two(verb, folder):
    codes = finish(start_two(verb, folder), two_logs(folder))
    assert codes == [0, 0], "\n".join(log.read_text() for log in two_logs(folder))


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_hosts")
    two_hosts.write_table(folder)
    processes = start_two("hang", folder)
    saved = folder / "killed" / "checkpoints" / "4" / "manifest.json"
    wait_for(saved.exists, lambda: two_logs(folder))
    for process in processes:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finish_two("train", folder)
    return folder


@pytest.mark.parametrize(
    "rows", [*two_hosts.ROWS, *(pytest.param(n, marks=pytest.mark.long) for n in (4, 2))]
)
def test_two_hosts_train_what_one_does(trained_by_two, tmp_path, rows):
    if rows not in two_hosts.ROWS:
        finish_two(str(rows), trained_by_two)
    workdir = trained_by_two / f"{rows}x{8 // rows}"
    assert_same_run(workdir, two_hosts.experiment(rows), tmp_path)
    mesh = json.loads((workdir / "summary.json").read_text())["mesh"]
    assert mesh == {"ensemble": rows, "data": 8 // rows}


def test_two_hosts_predict_what_one_does(trained_by_two):
    loaded = de.load(trained_by_two / "1x8")
    expected = loaded.ensemble.apply(loaded.state, two_hosts.INPUTS)
    for host in range(2):
        found = np.load(trained_by_two / f"outputs_{host}.npy")
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_two_hosts_deal_a_divided_split_out_as_one_has_it_whole(trained_by_two, tmp_path):
    training_set = TrainingSet(Order(1_437, 32), 64 * 4 + 4, 2 * 32)
    place = training_set.place_on(Layout.make(8, ensemble_axis=1), two_hosts.FOR_A_DIVIDED_SPLIT)
    assert place is Placement.SHARDED
    assert_same_run(trained_by_two / "divided", two_hosts.experiment(1), tmp_path)


def test_two_hosts_train_and_score_groups_as_one_does(trained_by_two, tmp_path):
    assert_same_run(trained_by_two / "groups", two_hosts.of_groups(trained_by_two), tmp_path)
    folders = (trained_by_two / "groups", tmp_path)
    of_two, of_one = (json.loads((each / "summary.json").read_text()) for each in folders)
    for name in ("test", "test_std", "mean_member"):
        assert of_two[name] == pytest.approx(of_one[name], rel=1e-4)


@pytest.mark.parametrize(
    ("failing", "seen_by_other"),
    [
        (0, "the checkpoint is not complete: another host could not write its part"),
        (1, "the part of host 1 is missing: that host could not write it"),
    ],
)
def test_a_host_that_cannot_save_keeps_no_other_waiting_and_all_say_so(
    tmp_path, failing, seen_by_other
):
    finish_two(f"fail_{failing}", tmp_path)
    logs = two_logs(tmp_path)
    assert "file too large. The last saved step is 1. Raise the" in logs[failing].read_text()
    assert seen_by_other in logs[1 - failing].read_text()
    assert all("The last saved step is 1. R" in log.read_text() for log in logs)
    assert [path.name for path in (tmp_path / "checkpoints").glob("[0-9]")] == ["1"]


def test_two_hosts_choose_an_execution_together(tmp_path):
    finish_two("choose", tmp_path)
    of_hosts = [json.loads((tmp_path / f"chosen_{i}.json").read_text()) for i in range(2)]
    assert of_hosts[0] == of_hosts[1]
    first, again = of_hosts[0]
    assert "the fastest of those tried" in first[1]
    assert again[0] == first[0]
    assert "earlier run" in again[1]
    assert {"map", "vmap"} <= {*re.findall(r"\w+", first[1])}


def assert_same_run(workdir, experiment, tmp_path):
    """What two hosts left in a workdir is what one leaves."""
    one = train(experiment, tmp_path)
    two = open_finished(workdir).state
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(close, *jax.device_get((one.state.params, two.params)))
    lines = [(each / "metrics.jsonl").read_text().splitlines() for each in (workdir, tmp_path)]
    for of_two, of_one in zip(*lines, strict=True):
        assert json.loads(of_two) == pytest.approx(json.loads(of_one), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_signal_to_one_host_stops_both_at_one_step_with_a_checkpoint(tmp_path, number):
    words = ["train", "--config=configs/digits.py", f"--workdir={tmp_path / 'run'}"]
    words += ["--config.steps=1000000", "--config.logging.every_steps=10"]
    words += ["--config.model.hidden_sizes=(8,)", "--config.execution=vmap"]
    each = [[*words, *own] for own in together(2)]
    run = start_commands(*each, folder=tmp_path, name="log", in_one=True)
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "log_0"
    wait_for(lambda: metrics.exists() and metrics.stat().st_size, log.read_text)
    run.send(number, [1])
    own = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.PREEMPTED
    assert run.codes() == [ExitCode.PREEMPTED, own], log.read_text()
    step = int(log.read_text().split("Stopped at step ")[1].split()[0].replace(",", ""))
    state = open_finished(tmp_path / "run").state
    assert jax.device_get(state.step).tolist() == [step] * 8


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("read", [True, False])
def test_the_first_signal_is_acknowledged_and_a_second_ends_at_once(read, capfd):
    if not read:  # as after a Ctrl-C that has ended what this process writes to
        reads, writes = os.pipe()
        os.close(reads)
        os.dup2(writes, 2)
        os.close(writes)
    with StopSignal() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)  # there is nothing to lose yet
        assert not stop.is_set()
        stop.listen()
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        signal.raise_signal(signal.SIGINT)  # a copy, as a launcher passes on
        time.sleep(COPY_SECS)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert ("Stopping after the current step; a second sig" in capfd.readouterr().err) is read


def test_two_killed_hosts_go_on_and_end_as_two_never_killed(trained_by_two):
    assert "resuming from step 4" in (trained_by_two / "host_0.log").read_text()
    states = (open_finished(trained_by_two / name).state for name in ("killed", "1x8"))
    killed, whole = (jax.device_get((s.step, s.params, s.opt_state)) for s in states)
    jax.tree.map(np.testing.assert_array_equal, killed, whole)


def printed(code, **variables):
    """What a process prints that starts a cluster."""
    code = f"import jax; from dist_ens.processes import cluster; {code}"
    ended = python("-c", code, **variables)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split() + ended.stderr.split("WARNING")[1:]


IS_STARTED = "cluster.start(); print(jax.distributed.is_initialized(), jax.process_count())"
SLURM = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


def test_a_slurm_job_is_detected_and_a_command_without_srun_is_told():
    step = SLURM | {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_TASKS": "1"}
    assert printed(IS_STARTED, **step, JAX_COORDINATOR_PORT=str(free_port())) == ["True", "1"]
    *alone, warning = printed(IS_STARTED, **SLURM | {"SLURM_NTASKS": "4"})
    assert alone == ["False", "1"]
    assert "runs alone in a Slurm job of 4 tasks, because it was not started by srun" in warning


@pytest.mark.slow
def test_the_only_process_of_a_cluster_uses_its_cores_as_devices():
    code = (
        f"cluster.start('127.0.0.1:{free_port()}', 1, 0); cluster.use_cores_as_devices();"
        "print(jax.distributed.is_initialized(), jax.device_count() == cluster.processor()[1])"
    )
    assert printed(code, XLA_FLAGS="") == ["True", "True"]


@pytest.mark.quick
@pytest.mark.parametrize("address", ["x", "x:port", "::1:1234"])  # [::1]:1234 would be one.
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(UserError, match=f"^--coordinator_address='{address}' is not host:port"):
        cluster.start(address, 2, 0)


def test_a_port_that_is_in_use_is_told(monkeypatch):
    monkeypatch.setattr(cluster, "_BUSY_SECS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        told = f"^Process 0 cannot listen at {address}: Address already in use. Choose"
        with pytest.raises(UserError, match=told):
            cluster.start(address, 2, 0)
