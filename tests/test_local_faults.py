"""`dist-ens local` in every size, and the time of one restart: long tests."""

import itertools
import json
import subprocess
import sys

import jax
import pytest

import fast_xla
from conftest import COMMAND_ENVIRONMENT
from dist_ens.experiment.loaded import open_finished
from test_hosts import write_config
from test_local import ROOT, STEPS, begin, finished, scores_of

pytestmark = pytest.mark.faults
NUM_MEMBERS = 16  # They divide over 16 devices, the most that the cells have.
RESTART_LIMIT_SECS = 10
# Callbacks that note when they are called, on the clock that all processes of a machine share.
TIMES = """
def note(event):
    with (HERE / "times").open("a") as file:
        file.write(f"{event} {time.monotonic():020.3f}\\n")

class Times:
    def begin(self, run):
        note("restored")
    def __call__(self, info):
        pass

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
    params = jax.device_get(open_finished(folder / name).state.params)
    return [leaf.tobytes() for leaf in jax.tree.leaves(params)]


@pytest.mark.parametrize(
    ("num_processes", "devices"), [*itertools.product((1, 2, 4), (1, 2, 4))], ids=str
)
def test_processes_train_the_members_of_one_process_with_as_many_devices(
    num_processes, devices, one_process, tmp_path
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


def test_one_restart_takes_ten_seconds_and_compiling_from_the_cache(tmp_path):
    config = write_config(tmp_path, "killed", 1, steps=STEPS)
    text = config.read_text().replace("os.kill(", "note('died'); os.kill(")
    config.write_text(text + TIMES)
    code, log = finished(begin(tmp_path, "run", 2), tmp_path, "run")
    assert code == 0, log
    noted = [line.split() for line in (tmp_path / "times").read_text().splitlines()]
    ((_, died),) = [each for each in noted if each[0] == "died"]
    restored = [float(secs) for event, secs in noted if event == "restored" and secs > died]
    assert len(restored) == 2
    # The first step takes its programs from the cache.
    assert max(restored) - float(died) < RESTART_LIMIT_SECS
