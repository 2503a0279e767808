"""Disks that are full, read-only or gone, as they really are: training goes on and says so."""

import errno
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import types

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import fast_xla
from conftest import COMMAND_ENVIRONMENT
from dist_ens.callbacks import JsonLines
from dist_ens.checkpoint import Checkpoints, Snapshot, writing
from dist_ens.ensemble import Ensemble
from dist_ens.ground.errors import ExitCode, SaveError, UserError
from dist_ens.losses import categorical
from dist_ens.storage import Disk
from dist_ens.training import fit
from saving import begun, reader, save, shapes_of, snapshot, state_of, steps_in

ROOT = pathlib.Path(__file__).parent.parent
LIMIT_SECS = 300
ENVIRONMENT = COMMAND_ENVIRONMENT | {"XLA_FLAGS": fast_xla.flags(1), "JAX_PLATFORMS": "cpu"}
may_mount = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="only root mounts a disk"
)


def restored(folder, step):
    return float(reader(folder, step).state(shapes_of(state_of(0.0)))["w"][0, 0])


def save_now(opened, step, value=1.0):
    """Saves a step, and waits for it."""
    opened.save(snapshot(step, state_of(value)))
    opened.wait()


def test_a_folder_that_is_removed_while_training_is_noticed_and_not_made_anew(tmp_path):
    run, said = tmp_path / "run", []
    told = "that folder was removed or replaced after"
    with pytest.raises(SaveError, match=told) as raised, begun(run, said.append) as opened:
        save_steps_without_a_folder(opened, run)
    assert raised.value.exit_code == ExitCode.FAULT
    assert not run.exists()
    [told] = said  # Once for steps 2 and 3. The last is reported by the error.
    assert told == (
        f"Could not write the checkpoint of step 2 in {run}: that folder was removed or replaced "
        "after the run began to use it. No step is saved yet. Training continues, and the next "
        "save tries again. Put the folder of the run back in its place."
    )


def save_steps_without_a_folder(opened, run):
    save_now(opened, 1)
    shutil.rmtree(run)
    for step in (2, 3, 4):
        opened.save(snapshot(step, state_of(1.0)), is_last=step == 4)


def train(run, spoil):
    """Trains four steps, saves each, and spoils something when step 2 is saved."""

    def callback(info):
        if info.step == 3:
            while 2 not in steps_in(run):
                time.sleep(0.01)
            spoil()

    network = (lambda key: {"w": jax.random.normal(key, (3, 2))}, lambda params, x: x @ params["w"])
    return fit(
        Ensemble(network, optax.sgd(0.1), categorical(2), num_members=2),
        {"inputs": np.ones((8, 3)), "labels": np.ones(8, int)},
        steps=4,
        steps_per_call=1,
        log_every=1,
        callbacks=[callback, JsonLines(run / "metrics.jsonl")],
        checkpoints=Checkpoints(run, every_steps=1, keep=9),
        progress=False,
    )


def test_no_second_error_hides_that_the_last_step_could_not_be_saved(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(SaveError, match="step 4 in .*: that folder was removed or replaced"):
        train(run, lambda: run.rename(tmp_path / "moved"))
    assert not run.exists()


def test_a_run_whose_checkpoints_or_lock_or_metrics_are_removed_saves_its_next_steps(tmp_path):
    run = tmp_path / "run"

    def remove():
        (run / "checkpoints").rename(tmp_path / "removed")
        (run / ".lock").unlink()
        shutil.rmtree(run / "metrics.jsonl.parts")

    train(run, remove)
    assert steps_in(run)[-1] == 4
    assert (run / "metrics.jsonl").exists()


def test_a_lock_that_was_removed_is_made_again(tmp_path):
    with begun(tmp_path) as opened:
        (tmp_path / ".lock").unlink()
        save_now(opened, 1)
        assert restored(tmp_path, 1) == 1.0
        with pytest.raises(UserError, match="Another run is training in"):
            save(tmp_path, state_of(1.0))


def test_a_run_that_lost_its_lock_to_another_run_saves_no_more(tmp_path):
    with begun(tmp_path) as opened:
        (tmp_path / ".lock").unlink()
        with begun(tmp_path) as other:
            other.save(snapshot(5, state_of(5.0)))
            for _ in range(2):
                with pytest.raises(SaveError, match="was removed or replaced, and another run has"):
                    save_now(opened, 1)
        with pytest.raises(SaveError, match="another run has locked it since"):
            save_now(opened, 1)  # The other run has ended.
    assert steps_in(tmp_path) == [5]


def test_a_folder_that_is_replaced_is_not_written_to_and_saving_works_when_it_is_back(tmp_path):
    run, said = tmp_path / "run", []
    with begun(run, said.append) as opened:
        save_now(opened, 1)
        run.rename(tmp_path / "moved")
        (run / "checkpoints").mkdir(parents=True)
        with pytest.raises(SaveError):
            save_now(opened, 2, 2.0)
        assert [path.name for path in run.rglob("*")] == ["checkpoints"]
        shutil.rmtree(run)
        (tmp_path / "moved").rename(run)
        save_now(opened, 2, 2.0)  # The same step in the same process.
    assert restored(run, 2) == 2.0
    assert said[1] == f"Saving in {run} works again. The last saved step is 2."


def test_checkpoints_of_another_run_that_take_the_place_of_its_own_are_not_deleted(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    for step in (1, 2):
        save(run, state_of(step), step)
        save(other, state_of(10.0 * step), step)
    with begun(run, keep=1) as opened:
        shutil.rmtree(run / "checkpoints")
        shutil.copytree(other / "checkpoints", run / "checkpoints")
        for step in (3, 4):
            opened.save(snapshot(step, state_of(step)))
    assert steps_in(run) == [1, 2, 4]
    assert [restored(run, step) for step in (1, 2)] == [10.0, 20.0]


def test_a_link_in_place_of_the_checkpoints_is_refused_and_nothing_behind_it_is_deleted(tmp_path):
    behind = tmp_path / "behind"
    left = behind / "9"
    left.mkdir(parents=True)
    (left / "unfinished").touch()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").symlink_to(behind)
    with pytest.raises(UserError, match="is a symbolic link"):
        save(tmp_path / "run", state_of(1.0))
    assert [*left.iterdir()]


def test_a_host_that_cannot_look_at_the_folder_waits_for_the_others_before_it_fails(
    tmp_path, monkeypatch
):
    reached = []
    monkeypatch.setattr(
        ocp.multihost, "get_barrier_sync_fn", lambda: lambda key, timeout_ms: reached.append(key)
    )

    def refused():
        raise OSError(errno.ESTALE, "Stale file handle")

    with begun(tmp_path) as opened:
        opened.save(snapshot(1, state_of(1.0), before=refused))
        with pytest.raises(SaveError, match="stale file handle"):
            opened.wait()
    assert len(reached) == 4


@pytest.mark.parametrize("is_complete", [True, False])
def test_all_hosts_take_the_word_of_process_0_for_whether_a_step_is_complete(
    tmp_path, monkeypatch, is_complete
):
    # This is process 1 of two, to which the disk does not show the new folder yet.
    said = [("dist_ens/complete/1-0a", "complete")] if is_complete else []
    client = types.SimpleNamespace(key_value_dir_get=lambda _: said)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(writing.cluster, "client", lambda: client)
    monkeypatch.setattr(ocp.multihost, "get_barrier_sync_fn", lambda: lambda **_: None)

    def save():
        writing.write_checkpoint(Disk(tmp_path), Snapshot(1, {}, {}), "0a")

    if is_complete:
        save()
    else:
        (tmp_path / "checkpoints" / "1").mkdir(parents=True)
        with pytest.raises(OSError, match="another host could not write its part"):
            save()


def test_the_sweep_deletes_only_what_this_package_left(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    for name in ("9", "10.damaged", "x", "09"):
        (checkpoints / name / "state").mkdir(parents=True)
        (checkpoints / name / "unfinished").touch()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "unfinished").touch()
    (checkpoints / "8").symlink_to(tmp_path / "elsewhere")
    with begun(tmp_path):
        pass
    assert sorted(path.name for path in checkpoints.iterdir()) == ["09", "10.damaged", "8", "x"]
    assert (tmp_path / "elsewhere" / "unfinished").exists()


ON_A_SMALL_DISK = (
    'exec unshare -m bash -c \'mount -t tmpfs -o size=4m disk "$3" && exec "$@"\' bash "$@"'
)


def said_on(disk, fault, script=ON_A_SMALL_DISK):
    """What the command that this file is says of a fault of a disk."""
    disk.mkdir()
    ended = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, __file__, str(disk), fault],
        cwd=ROOT,
        env=ENVIRONMENT | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECS,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@may_mount
def test_a_full_disk_is_said_and_saving_works_again_when_there_is_room(tmp_path):
    said = said_on(tmp_path / "disk", "full")
    assert said["told"][0].endswith(
        "no space left on device. The last saved step is 1. Training continues, and the next save "
        "tries again. Free some space there."
    )
    assert said["told"][1].endswith("works again. The last saved step is 2.")
    assert said["steps"] == [1, 2]
    assert said["restored"] == 2.0
    assert said["left"] == []
    # The disk is full again at the end.
    assert said["code"] == ExitCode.DISK_FULL
    assert "step 3 in" in said["error"]
    assert "Free some space there, then run the same command again to resume." in said["error"]


@pytest.mark.faults
@may_mount
@pytest.mark.parametrize(
    ("fault", "script", "told", "steps"),
    [
        ("read_only", ON_A_SMALL_DISK, "Mount that disk so that it can be written.", [1]),
        ("vanished", ON_A_SMALL_DISK, "Put the folder of the run back in its place.", []),
        ("limited", 'ulimit -f 100; exec "$@"', "the size of a file (ulimit -f).", [1]),
    ],
)
def test_a_disk_that_cannot_be_written_is_told_as_such(tmp_path, fault, script, told, steps):
    said = said_on(tmp_path / "disk", fault, script)
    assert said["told"][0].endswith(told)
    assert said["steps"] == steps
    # No folder is made on another disk.
    assert fault != "vanished" or not [*(tmp_path / "disk").iterdir()]


def save_on(disk, fault):
    """Saves step 1, meets a fault at step 2, and prints what was said and what is there."""
    run, other, told = pathlib.Path(disk) / "run", pathlib.Path(disk) / "other", []
    small, large = state_of(1.0), state_of(2.0, 200_000)
    said = {"code": 0, "error": "", "restored": None}
    try:
        with begun(run, told.append, every_secs=None) as opened:
            save_now(opened, 1)
            if fault == "read_only":
                # The lock is open on the first mount, which can therefore not be made read-only.
                subprocess.run(["mount", "--bind", disk, disk], check=True)
                subprocess.run(["mount", "-o", "remount,ro,bind", disk], check=True)
            if fault == "vanished":
                subprocess.run(["umount", "-l", disk], check=True)
            if fault == "full":
                other.write_bytes(b"\0" * 2_000_000)
            step_2 = large if fault in ("full", "limited") else small
            opened.save(snapshot(2, step_2))
            if fault == "full":
                try:
                    opened.wait()
                except SaveError:
                    other.unlink()
                save_now(opened, 2, 2.0)
                said["restored"] = restored(run, 2)
                said["left"] = [str(p) for p in run.rglob("unfinished")]
                other.write_bytes(b"\0" * 2_000_000)
            opened.save(snapshot(3, step_2), is_last=True)
    except SaveError as error:
        said |= {"code": int(error.exit_code), "error": str(error)}
    steps = steps_in(run)
    print(json.dumps(said | {"told": told, "steps": steps}))


if __name__ == "__main__":
    save_on(*sys.argv[1:])
