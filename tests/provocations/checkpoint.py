"""How the messages of `dist_ens.checkpoint` are provoked."""

import dataclasses
import errno
import shutil
import tempfile
import types

import jax
import numpy as np

from dist_ens.checkpoint import (
    Checkpoints,
    CheckpointStore,
    host_files,
    manifest,
    members,
    opened,
    record,
    run_folder,
    store,
    verify,
)
from dist_ens.checkpoint.leaves import named_leaves
from dist_ens.checkpoint.lineage import Lineage, positions_of
from dist_ens.checkpoint.manifest import MANIFEST

_RECORD = record.StepRecord(
    member="Net",
    optimizer="sgd",
    loss="categorical",
    methods=(),
    num_members=2,
    member_ids=(0, 1),
    seed=0,
    batch="['inputs'] float32[8, 4]",
    fingerprint=None,
    versions={},
)
_STATE = {"w": np.zeros((2, 3), np.float32)}


def _saved(folder, host_files=None):
    """Saves the checkpoint of step 5."""
    with CheckpointStore(folder, keep=2) as saving:
        saving.save(5, {"w": jax.numpy.zeros((2, 3))}, {"member": "Net"}, host_files=host_files)
    return CheckpointStore(folder, read_only=True)


def _check(saved):
    record.check_resumes(_RECORD.to_dict(), saved, "runs/digits")


def a_folder_of_another_type():
    Checkpoints(3)


def a_best_score_that_the_run_does_not_have(tmp_path):
    with Checkpoints(tmp_path, keep_best="acuracy").open({}, directions={"accuracy": "higher"}):
        pass


def a_resume_that_is_unknown(tmp_path):
    Checkpoints(tmp_path, resume="always")


def seconds_that_are_not_positive(tmp_path):
    Checkpoints(tmp_path, every_secs=-1)


def a_folder_in_which_another_run_trains(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.socket, "gethostname", lambda: "n1")
    monkeypatch.setattr(run_folder.os, "getpid", lambda: 100)
    with Checkpoints(tmp_path).open({}), Checkpoints(tmp_path).open({}):
        pass


def a_lock_that_may_not_be_opened(tmp_path, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(run_folder.FileLock, "acquire", refused)
    with Checkpoints(tmp_path).open({}):
        pass


def a_folder_that_one_host_does_not_see(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(run_folder, "_SHARED_SECS", 0)
    hosts = types.SimpleNamespace(
        is_main=lambda: False,
        as_main_sees=bool,
        bytes_of_main=lambda token: token,
        hosts_with=lambda _: [1],
    )
    monkeypatch.setattr(run_folder, "cluster", hosts)
    run_folder._is_marked(tmp_path, "host n1, pid 100", "0a")


def a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "runs").touch()
    with Checkpoints(tmp_path / "runs" / "digits").open({}):
        pass


def a_folder_that_is_read_only(tmp_path, monkeypatch):
    def refused(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    with Checkpoints(tmp_path).open({}):
        pass


def a_host_file_with_an_impossible_name():
    host_files.check_names(["../data"])


def a_run_of_more_hosts(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(jax, "process_count", lambda: 2)
        contents = host_files.host_file_contents({"iterator": b"5"})
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    host_files.read_host_file(tmp_path, "iterator", contents)


def two_leaves_with_one_name():
    named_leaves({"a.b": np.zeros(1), "a": {"b": np.zeros(1)}})


def ids_for_another_number_of_members():
    dataclasses.replace(_RECORD, num_members=3)


def a_record_that_is_damaged():
    record.StepRecord.from_dict({"member": "Net"})


def batches_of_an_unknown_structure():
    dataclasses.replace(_RECORD, batch="[<flat index 0>] float32[8, 4]").batch_shapes()


def a_folder_with_a_run_from_a_config():
    _check({"experiment": {}})


def a_folder_with_another_run():
    _check(dataclasses.replace(_RECORD, optimizer="adam", seed=1).to_dict())


def a_folder_with_a_run_from_python():
    record.require_config_record(_RECORD.to_dict(), "runs/digits")


def a_step_that_was_not_saved(tmp_path):
    _saved(tmp_path).require_step(6)


def a_checkpoint_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "write_checkpoint", full)
    _saved(tmp_path)


def a_state_of_another_network(tmp_path):
    _saved(tmp_path).restore_state(5, {"w": jax.ShapeDtypeStruct((2, 4), "float32")})


def a_state_of_another_precision(tmp_path):
    _saved(tmp_path).restore_state(5, {"w": jax.ShapeDtypeStruct((2, 3), "float64")})


def a_checkpoint_that_was_replaced(tmp_path):
    checkpoints = _saved(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    checkpoints.restore_run(5)


def _without_its_manifest(folder, *steps):
    """Saves some steps, and damages the newest."""
    with CheckpointStore(folder, keep=2) as saving:
        for step in steps:
            saving.save(step, {"w": jax.numpy.zeros((2, 3))}, _RECORD.to_dict())
    (folder / "checkpoints" / str(steps[-1]) / MANIFEST).unlink()
    return CheckpointStore(folder, read_only=True)


def a_checkpoint_that_is_damaged(tmp_path):
    _without_its_manifest(tmp_path, 5, 10).restore_run(10)


def the_only_checkpoint_is_damaged(tmp_path):
    _without_its_manifest(tmp_path, 5).restore_run(5)


def a_run_whose_only_checkpoint_is_damaged(tmp_path):
    _without_its_manifest(tmp_path, 5)
    with Checkpoints(tmp_path).open(_RECORD.to_dict()):
        pass


def a_strict_run_whose_newest_checkpoint_is_damaged(tmp_path):
    _without_its_manifest(tmp_path, 5, 10)
    with Checkpoints(tmp_path, resume="strict").open(_RECORD.to_dict()):
        pass


def a_damaged_checkpoint_that_cannot_be_renamed(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    _without_its_manifest(tmp_path, 5, 10)
    monkeypatch.setattr(store, "set_aside", refused)
    with Checkpoints(tmp_path).open(_RECORD.to_dict()):
        pass


def a_checkpoint_that_may_not_be_read(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.EACCES, "Permission denied")

    checkpoints = _saved(tmp_path)
    monkeypatch.setattr(store, "open_step", refused)
    checkpoints.restore_run(5)


def a_checkpoint_that_another_process_cannot_read(tmp_path, monkeypatch):
    _saved(tmp_path)
    hosts = types.SimpleNamespace(as_main_sees=lambda step: step, hosts_with=lambda _: [1])
    monkeypatch.setattr(opened, "cluster", hosts)
    with Checkpoints(tmp_path).open(_RECORD.to_dict()):
        pass


def a_checkpoint_of_a_newer_format(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 3)
        checkpoints = _saved(tmp_path)
    checkpoints.restore_run(5)


def checkpoints_behind_a_link(tmp_path):
    (tmp_path / "checkpoints").symlink_to(tmp_path)
    CheckpointStore(tmp_path)


def a_run_on_other_data():
    other = dataclasses.replace(_RECORD, num_examples=1000)
    saved = dataclasses.replace(_RECORD, num_examples=1200).to_dict()
    record.check_resumes(other.to_dict(), saved, "runs/digits")


def _members(**leaves):
    leaves = {"member_id": np.arange(2, dtype=np.int32), **leaves}
    return members.SavedMembers(6, {}, (Lineage(0), Lineage(1)), leaves)


def members_of_other_networks():
    _members(w=np.zeros((2, 3))).joined(_members(w=np.zeros((2, 4))))


def a_member_that_is_not_in_the_checkpoint():
    positions_of([3, 1], [Lineage(0), Lineage(1)])


def a_member_that_is_asked_for_twice():
    positions_of([1, 1], [Lineage(0), Lineage(1)])


def no_member():
    positions_of([], [Lineage(0), Lineage(1)])


def members_of_a_folder_without_a_checkpoint(tmp_path):
    members.read_members(tmp_path)


def members_that_cannot_be_written(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(members, "write_checkpoint", full)
    members.write_members(tmp_path, _members())


def a_new_folder_that_is_a_file(tmp_path):
    (tmp_path / "new").write_text("")
    members.require_new_folder(tmp_path / "new")


def a_new_folder_that_is_not_empty(tmp_path):
    (tmp_path / "notes.txt").write_text("")
    members.require_new_folder(tmp_path)


def a_checkpoint_that_was_replaced_while_it_is_verified(tmp_path):
    verify.faults_of(tmp_path / "checkpoints" / "5")


def a_checkpoint_that_may_not_be_verified(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.EACCES, "Permission denied")

    _saved(tmp_path)
    monkeypatch.setattr(manifest.Manifest, "read", refused)
    verify.faults_of(tmp_path / "checkpoints" / "5")
