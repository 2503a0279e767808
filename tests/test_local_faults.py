"""`dist-ens local` in every size, and the time of one restart: long tests, with a table each."""

import itertools
import json
import subprocess
import sys
import time

import jax
import psutil
import pytest

import fast_xla
from conftest import COMMAND_ENVIRONMENT
from dist_ens.experiment.loaded import open_finished
from test_hosts import wait_for, write_config
from test_local import ROOT, STEPS, begin, finished, scores_of

pytestmark = pytest.mark.faults
NUM_MEMBERS = 16  # They divide over 16 devices, the most that the cells have.
RESTART_LIMIT_SECS = 10
# Callbacks that note when they are called, on the clock that all processes of a machine share.
TIMES = """
def note(event):
    process_id = jax.process_index()  # It starts the devices.
    with (HERE / "times").open("a") as file:
        file.write(f"{event} {process_id} {os.getpid()} {time.monotonic()}\\n")

class Times:
    def begin(self, run):
        note("restored")
    def __call__(self, info):
        note("step")

def make_callbacks(experiment):
    return [Times(), Fault()]
"""


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """Function that returns the folder of a run of one process with a number of devices."""
    folder = tmp_path_factory.mktemp("one_process")
    config = write_config(folder, "waiting", 99, steps=STEPS)

    def trained(num_devices):
        workdir = folder / str(num_devices)
        if not workdir.exists():
            subprocess.run(
                [
                    *(sys.executable, "-m", "launch.train", f"--config={config}"),
                    *(f"--workdir={workdir}", f"--config.num_members={NUM_MEMBERS}"),
                ],
                cwd=ROOT,
                env=COMMAND_ENVIRONMENT
                | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": fast_xla.flags(num_devices)},
                check=True,
                capture_output=True,
            )
        return folder

    return trained


def bits_of(folder, name):
    """The bits of every member's final parameters."""
    return [leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(state_of(folder, name)))]


def state_of(folder, name):
    return open_finished(folder / name).state.params


@pytest.mark.parametrize(
    ("num_processes", "devices"), [*itertools.product((1, 2, 4), (1, 2, 4))], ids=str
)
def test_processes_train_the_members_of_one_process_with_as_many_devices(
    num_processes, devices, one_process, tmp_path, record_property
):
    write_config(tmp_path, "waiting", 99, steps=STEPS)
    members = [f"--config.num_members={NUM_MEMBERS}"]
    process = begin(tmp_path, "several", num_processes, devices=devices, rest=members)
    code, log = finished(process, tmp_path, "several")
    assert code == 0, log
    count = num_processes * devices
    one, name = one_process(count), str(count)
    for folder, run in ((one, name), (tmp_path, "several")):
        summary = json.loads((folder / run / "summary.json").read_text())
        assert summary["mesh"] == {"ensemble": count, "data": 1}
        assert len(summary["members"]) == NUM_MEMBERS
    # Members lie along the ensemble axis, whose execution `loop` gives the same bits.
    assert scores_of(tmp_path, "several") == scores_of(one, name)
    assert bits_of(tmp_path, "several") == bits_of(one, name)
    record_property("processes", num_processes)
    record_property("devices of each", devices)
    record_property("mesh", f"{count} x 1")
    record_property("scores of 16 members", "the same digits")
    record_property("parameters", "the same bits")


def test_one_restart_takes_ten_seconds_and_compiling_from_the_cache(tmp_path, record_property):
    config = write_config(tmp_path, "killed", 1, steps=STEPS)
    text = config.read_text().replace("os.kill(", "note('died'); os.kill(")
    text = text.replace("def get_config():\n", "def get_config():\n    note('devices')\n")
    config.write_text(text + TIMES)

    (tmp_path / "times").touch()

    def times(event):
        noted = [line.split() for line in (tmp_path / "times").read_text().splitlines()]
        return [(int(pid), float(secs)) for name, _, pid, secs in noted if name == event]

    process = begin(tmp_path, "run", 2)
    wait_for(lambda: times("died"), (tmp_path / "log_run").read_text)
    ((killed, died),) = times("died")
    first = [pid for pid, _ in times("devices")]
    (survivor,) = {*first} - {killed}
    wait_for(lambda: not psutil.pid_exists(killed), lambda: "The launcher does not look.", 60)
    detected = time.monotonic()
    wait_for(lambda: not psutil.pid_exists(survivor), lambda: "The other process is alive.", 60)
    stopped = time.monotonic()
    code, log = finished(process, tmp_path, "run")
    assert code == 0, log
    at = {"detected": detected, "others stopped": stopped}
    for event in ("devices", "restored", "step"):
        later = {}
        for pid, secs in times(event):
            if pid not in first:
                later.setdefault(pid, secs)
        assert len(later) == 2, log
        at[event] = max(later.values())
    for name, secs in at.items():
        record_property(f"{name}, s after the death", f"{secs - died:.1f}")
    # The first step takes its programs from the cache.
    assert at["restored"] - died < RESTART_LIMIT_SECS
