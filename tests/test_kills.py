"""Runs whose processes are killed at random moments, and which lose nothing by it.

The moments are drawn from a fixed seed, half of them inside a save. At each, all processes of a run
are killed at once, as when the power fails, or one of them and soon after it the others, as
`dist-ens local` does.
"""

import collections
import functools
import itertools
import json
import random
import time

import pytest

from commands import start, together
from dist_ens.checkpoint import saved_step
from dist_ens.checkpoint.manifest import UNFINISHED, files_by_step
from dist_ens.checkpoint.verify import faults_of
from dist_ens.storage import place_of
from object_servers import s3_server
from saving import steps_in
from test_signals import untimed

STEPS, SAVED_EVERY = 60, 4
# A save writes 2 MB, so that it takes long enough for a kill to meet it.
TRAIN = [
    *("train", "--config.execution=loop"),
    *("--config.num_members=4", f"--config.steps={STEPS}", "--config.steps_per_call=2"),
    *("--config.model.hidden_sizes=(200,128)", "--config.logging.every_steps=2"),
    *(f"--config.checkpoint.every_steps={SAVED_EVERY}", "--config.data.global_batch_size=32"),
]
MOST_KILLS = 5  # of one run, which then goes on to its end


# In a bucket, nobody waits half a minute for the lease of a run that was killed.
CONFIG = """
import runpy
from dist_ens.storage import lease
lease.SECS = 2.0
get_config = runpy.run_path("configs/digits.py")["get_config"]
"""


def begun(folder, workdir, num_processes, attempt=0, environ=()):
    """The processes of a run, each with one device, on the mesh `num_processes` x 1."""
    (folder / "config.py").write_text(CONFIG)
    words = [*TRAIN, f"--config={folder / 'config.py'}", f"--workdir={workdir}"]
    flags = together(num_processes) if num_processes > 1 else [[]]
    name = f"{workdir.name}_{attempt}"
    return start(*([*words, *own] for own in flags), folder=folder, name=name, environ=environ)


def output(folder, name, attempt):
    """Returns all that the processes of an attempt have printed."""
    return "\n".join(path.read_text() for path in sorted(folder.glob(f"{name}_{attempt}_*")))


def saved_bits(workdir):
    """The step of the newest checkpoint, and the bits of all its arrays."""
    saved = saved_step(workdir)
    return saved.step, {name: leaf.tobytes() for name, leaf in saved.leaves().items()}


def records(workdir):
    """Records of the metrics, without what depends on the clock."""
    return untimed(workdir.read("metrics.jsonl").decode())


def scores_of(workdir):
    summary = json.loads(workdir.read("summary.json"))
    return [summary[key] for key in ("test", "mean_member", "members")]


def names_in(place):
    """The names of what is in a folder, but for the lock, which a bucket does not have."""
    return {name.partition("/")[0] for name in place.names()} - {".lock"}


def newest_in(workdir):
    """The newest step that is saved; 0 for none."""
    return max(steps_in(workdir), default=0)


def is_saving(workdir, after):
    """Whether a checkpoint of a step after another one is unfinished."""
    found = files_by_step(workdir / "checkpoints")
    later = [step for step in found if step > max(after, newest_in(workdir))]
    return any(UNFINISHED in found[step] for step in later)


class KilledRun:
    """A run that is killed some times, at moments that are drawn, and then left alone.

    A whole run that is never stopped takes `whole_secs`. It compiles, which later runs do not.
    """

    def __init__(self, folder, workdir, num_processes, whole_secs, draw, counted, environ):
        self.folder, self.name, self.workdir = folder, workdir.name, workdir
        self.environ = environ
        self.num_processes, self.whole_secs = num_processes, whole_secs
        self.draw, self.counted = draw, counted

    def go(self, num_kills):
        """Runs it until it ends, with at most a number of kills."""
        newest = 0
        for attempt in itertools.count():
            processes = begun(self.folder, self.workdir, self.num_processes, attempt, self.environ)
            kill = self.kill(processes) if attempt < num_kills else None
            codes, told = processes.codes(), output(self.folder, self.name, attempt)
            assert "Traceback" not in told, told
            if kill is None or not any(codes):
                assert not any(codes), told
                assert newest == 0 or f"resuming from step {newest}." in " ".join(told.split())
                return
            newest = self.check_killed(*kill)

    def kill(self, processes):
        """Kills the processes at a moment that is drawn; returns the steps that were saved before,
        and whether one process was killed before the others; None if the run had ended."""
        in_a_save = self.draw.random() < 0.5
        first = self.draw.choice([*range(self.num_processes), None])
        later_secs, delay_secs = self.draw.uniform(0, 0.1), self.draw.uniform(0, 0.01)
        until = time.monotonic() + self.draw.uniform(0, 0.8) * self.whole_secs
        started = newest_in(self.workdir) + self.draw.randrange(3) * SAVED_EVERY
        while not is_saving(self.workdir, started) if in_a_save else time.monotonic() < until:
            if not processes.is_running():
                return None
            time.sleep(0.001)
        if in_a_save:
            time.sleep(delay_secs)
        seen, is_of_one = steps_in(self.workdir), first is not None and self.num_processes > 1
        if is_of_one:
            processes.kill([first])
            time.sleep(later_secs)
        processes.kill()
        return seen, is_of_one

    def check_killed(self, seen, is_of_one):
        """Checks what a kill has left behind, and counts it; returns the newest step."""
        steps, newest = steps_in(self.workdir), newest_in(self.workdir)
        assert newest >= max(seen, default=0)
        for step in steps:
            assert faults_of(self.workdir / "checkpoints" / str(step)) == []
        self.counted["kills"] += 1
        self.counted["in a save"] += is_saving(self.workdir, newest)  # It left an unfinished one.
        self.counted["of one"] += is_of_one  # One process was hit before the others.
        self.counted["before a save"] += not steps
        return newest


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """Function that returns a run that is never stopped, and the seconds that it took."""

    @functools.cache
    def trained(num_processes):
        folder, since = tmp_path_factory.mktemp("whole"), time.monotonic()
        codes = begun(folder, place_of(folder / "whole", "whole"), num_processes).codes()
        assert codes == [0] * num_processes, output(folder, "whole", 0)
        return place_of(folder / "whole", "whole"), time.monotonic() - since

    return trained


FEW = [(1, 3), pytest.param(2, 3, marks=pytest.mark.long)]
MANY = [pytest.param(*each, marks=pytest.mark.faults) for each in ((1, 80), (2, 70), (4, 50))]


@pytest.mark.parametrize(("num_processes", "num_kills"), FEW + MANY)
def test_a_run_that_is_killed_ends_as_one_never_stopped(
    num_processes, num_kills, whole_run, tmp_path, record_property
):
    end_as_one_never_stopped(num_processes, num_kills, whole_run, tmp_path, record_property)


@pytest.fixture(scope="module")
def server():
    with s3_server() as started:
        yield started


@pytest.mark.servers
@pytest.mark.parametrize("num_kills", [5, pytest.param(20, marks=pytest.mark.faults)])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_in_a_bucket_that_is_killed_ends_as_one_never_stopped(
    num_processes, num_kills, whole_run, server, tmp_path, monkeypatch, record_property
):
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    root = f"s3://bucket/{num_processes}"
    end_as_one_never_stopped(
        num_processes, num_kills, whole_run, tmp_path, record_property, root, server.environment
    )


def end_as_one_never_stopped(
    num_processes, num_kills, whole_run, folder, record_property, root=None, environ=()
):
    """Kills runs below a root, by default a folder, and compares them with one on a disk."""
    whole, whole_secs = whole_run(num_processes)
    expected = saved_bits(whole)
    assert expected[0] == STEPS
    draw, counted = random.Random(num_processes), collections.Counter()
    while counted["kills"] < num_kills:
        workdir = place_of(f"{root or folder}/run_{counted['runs']}", "workdir")
        left = min(MOST_KILLS, num_kills - counted["kills"])
        KilledRun(folder, workdir, num_processes, whole_secs, draw, counted, environ).go(left)
        counted["runs"] += 1
        assert saved_bits(workdir) == expected
        assert records(workdir) == records(whole)
        assert scores_of(workdir) == scores_of(whole)
        assert names_in(workdir) == names_in(whole)
        assert names_in(workdir / "checkpoints") == {str(STEPS), str(STEPS - SAVED_EVERY)}
    assert counted["in a save"] >= 8 or num_kills < 20
    for name, value in counted.items():
        record_property(name, value)
