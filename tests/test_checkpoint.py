"""The store of checkpoints: what is saved, when it counts, and what its errors say."""

import dataclasses
import itertools
import json
import os
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from dist_ens.checkpoint import CheckpointStore
from dist_ens.checkpoint.manifest import MANIFEST, Manifest, entries_of, files_in
from dist_ens.errors import RunError
from dist_ens.layout import Layout, Waves


def reseal(folder):
    """Writes the manifest anew for the files that are there, as if they had been saved."""
    manifest = Manifest.read(folder)
    files = entries_of(folder, {*files_in(folder)} - {MANIFEST})
    (folder / MANIFEST).write_bytes(dataclasses.replace(manifest, files=files).to_bytes())


def abstract(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def state_on(layout):
    """Numbers of several types; zeros too, which a store may leave out."""
    count = layout.num_members
    return layout.put(
        {
            "w": np.arange(3.0 * count, dtype=np.float32).reshape(count, 3),
            "half": jnp.arange(count, dtype=jnp.bfloat16),
            "zeros": np.zeros((count, 2), np.float32),
            # A part of more than 1 KiB has a place of its own in the files.
            "wide": np.random.default_rng(0).normal(size=(count, 400)).astype(np.float32),
            "step": np.full(count, 7, np.int32),
            "flag": np.arange(count) % 2 == 0,
        },
        "members",
    )


@partial(jax.jit, donate_argnums=0)
def overwritten(state):
    """Nothing but zeros, where the state was: what an update that is given it may do."""
    return jax.tree.map(lambda leaf: (leaf * 0).astype(leaf.dtype), state)


def use_up(state, *, waits):
    if waits:  # as the update of waves does, which donates nothing
        for leaf in jax.tree.leaves(state):
            leaf.delete()
    else:
        jax.block_until_ready(overwritten(state))


@pytest.mark.parametrize(("rows", "columns", "waves"), [(4, 1, 1), (4, 2, 1), (1, 4, 1), (2, 1, 2)])
def test_what_is_saved_is_the_state_though_it_is_used_up_at_once(tmp_path, rows, columns, waves):
    layout = Layout.make(4, ensemble_axis=rows, devices=jax.devices()[: rows * columns])
    state = state_on(layout)
    expected = jax.device_get(state)
    if waves > 1:
        state = Waves(layout, waves).off_devices(state)
    shapes = abstract(state)
    is_used_up = threading.Event()
    with CheckpointStore(tmp_path) as saves:
        saves.save(7, state, {"a": 1}, after=is_used_up.wait)
        use_up(state, waits=waves > 1)
        is_used_up.set()
        saves.wait()
        restored = saves.restore_state(7, shapes)
        assert saves.restore_run(7) == {"a": 1}
    jax.tree.map(np.testing.assert_array_equal, expected, jax.device_get(restored))
    assert [(x.dtype, x.sharding) for x in jax.tree.leaves(restored)] == [
        (x.dtype, x.sharding) for x in jax.tree.leaves(shapes)
    ]


def test_zeros_are_written_too_so_that_what_is_absent_is_damage(tmp_path):
    state = state_on(Layout.make(4, ensemble_axis=4, devices=jax.devices()[:4]))
    with CheckpointStore(tmp_path) as saves:
        saves.save(1, state, {})
        saves.wait()
        base = {"driver": "file", "path": f"{tmp_path}/checkpoints/1/state/"}
        database = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
        of_zeros = sorted(key for key in database.list().result() if key.startswith(b"zeros/"))
        assert of_zeros == [*(b"zeros/c/%d/0" % row for row in range(4)), b"zeros/zarr.json"]
        database.write(of_zeros[0], None).result()
    reseal(tmp_path / "checkpoints" / "1")  # Only the array's own content is wrong now.
    told = r"checkpoints/1 is damaged: leaf zeros has changed in the members \[0\]\."
    with pytest.raises(RunError, match=told):
        CheckpointStore(tmp_path, read_only=True).restore_state(1, abstract(state))


def test_no_byte_of_the_arrays_can_change_unnoticed(tmp_path):
    state = state_on(Layout.make(4, ensemble_axis=4, devices=jax.devices()[:4]))
    with CheckpointStore(tmp_path) as saves:
        saves.save(1, state, {})
    folder = tmp_path / "checkpoints" / "1" / "state"
    data = [*(folder / "d").iterdir()]
    for file in (folder / "manifest.ocdbt", *data):
        sound = file.read_bytes()
        for place in range(0, len(sound), 61):
            file.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
            try:
                restored = CheckpointStore(tmp_path, read_only=True).restore_state(
                    1, abstract(state)
                )
            except RunError as error:
                told = str(error)
            else:
                # TensorStore may flush early and write its index once more, into a second
                # file: nothing refers to the first index, and nothing that it says is read.
                assert len(data) > 1
                assert_same(restored, state)
                continue
            assert "checkpoints/1 is damaged" in told
        file.write_bytes(sound)
    assert_same(CheckpointStore(tmp_path, read_only=True).restore_state(1, abstract(state)), state)


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def test_what_the_state_belongs_to_cannot_change_unnoticed(tmp_path):
    run = {"experiment": {"seed": 0, "data": {"std": [0.5]}}, "num_devices": 1}
    with CheckpointStore(tmp_path) as saves:
        saves.save(1, state_on(Layout.make(4)), run)
    file = tmp_path / "checkpoints" / "1" / MANIFEST
    sound = file.read_bytes()
    line = sound.splitlines()[0]
    without_the_hash = (line, line + b"\n", line + b"\n{}\n", sound.rstrip(b"\n"))
    for content in (sound.replace(b"0.5", b"0.6"), sound + b"\n", b"", *without_the_hash):
        file.write_bytes(content)
        with pytest.raises(RunError, match="1 is damaged: manifest.json does not match its hash"):
            CheckpointStore(tmp_path, read_only=True).restore_run(1)
    file.write_bytes(sound)
    assert CheckpointStore(tmp_path, read_only=True).restore_run(1) == run


def test_what_the_first_version_wrote_with_orbax_is_read_too(tmp_path):
    state = state_on(Layout.make(4, ensemble_axis=4, devices=jax.devices()[:4]))
    with ocp.StandardCheckpointer() as orbax:
        orbax.save(tmp_path / "checkpoints" / "1" / "state", state)
    record = {"member": "MLP"}  # It had no checksum.
    (tmp_path / "checkpoints" / "1" / "run").mkdir()
    (tmp_path / "checkpoints" / "1" / "run" / "metadata").write_text(json.dumps(record))
    saved = CheckpointStore(tmp_path, read_only=True)
    assert saved.restore_run(1) == record
    restored = saved.restore_state(1, abstract(state))
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state, restored)))


def test_the_oldest_go_and_what_was_left_unfinished_goes_when_a_run_begins(tmp_path):
    folder, state = tmp_path / "checkpoints", state_on(Layout.make(4))
    left = "9.dist_ens-0a1b2c3d-1.orbax-checkpoint-tmp"
    (folder / left / "state").mkdir(parents=True)
    with CheckpointStore(tmp_path, read_only=True) as saves:
        assert saves.latest_step() is None
    assert [p.name for p in folder.iterdir()] == [left]
    with CheckpointStore(tmp_path, keep=2) as saves:
        for step in (1, 3, 20, 100, 100):  # one that is saved stays
            saves.save(step, state, {})
        saves.wait()
        assert saves.latest_step() == 100
        # No checkpoint any more; its files go when the next is written, or at the end.
        *kept, given_up = sorted(p.name for p in folder.iterdir())
        assert kept == ["100", "20"]
        assert given_up.startswith("3.dist_ens-")
    assert sorted(p.name for p in folder.iterdir()) == ["100", "20"]


def test_a_save_that_ends_between_any_two_writes_to_the_disk_leaves_a_whole_checkpoint(
    tmp_path, monkeypatch
):
    layout = Layout.make(4)
    older, newer = state_on(layout), jax.tree.map(lambda leaf: leaf.copy(), state_on(layout))
    newest = []
    for last in itertools.count():
        workdir, synced = tmp_path / str(last), itertools.count()

        def fsync(_, last=last, synced=synced):
            if next(synced) >= last:
                raise OSError("no more")

        with CheckpointStore(workdir) as saves:
            saves.save(1, older, {"step": 1})
            saves.wait()
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", fsync)
                saves.save(2, newer, {"step": 2})
                try:
                    saves.wait()
                except RunError:
                    ended = False
                else:
                    ended = True
        with CheckpointStore(workdir) as saves:  # as whoever goes on
            newest.append(saves.latest_step())
            assert saves.restore_run(newest[-1]) == {"step": newest[-1]}
            saves.restore_state(newest[-1], abstract(older))
            assert not list((workdir / "checkpoints").glob("*tmp"))
        if ended:
            break
    # Six files and folders before it has its name, and that. Then the older one is given up.
    assert newest == [1] * 7 + [2]


def test_a_save_that_cannot_be_written_is_told_by_the_next_with_what_is_kept(tmp_path, monkeypatch):
    state, run = state_on(Layout.make(4)), tmp_path / "run"
    saves = CheckpointStore(run, keep=2).__enter__()
    saves.save(1, state, {})
    saves.wait()
    run.rename(tmp_path / "moved")
    saves.save(2, state, {})
    with pytest.raises(
        RunError,
        match=r"step 2 in .*: no such file or directory\. No step is saved yet\. Put the folder",
    ):
        saves.save(3, state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved"]
    (tmp_path / "moved").rename(run)
    saves.save(2, state, {})  # In the same process, the same step.
    saves.wait()
    assert saves.steps() == [1, 2]
    saves.__exit__(None, None, None)


def test_nothing_is_written_before_what_comes_first_is_done(tmp_path):
    layout, seen = Layout.make(4), []
    with CheckpointStore(tmp_path) as saves:
        saves.save(1, state_on(layout), {}, after=lambda: seen.append(saves.steps()))
        saves.wait()
        assert (seen, saves.latest_step()) == ([[]], 1)

        def fail():
            raise ZeroDivisionError("no metrics")

        saves.save(2, state_on(layout), {}, after=fail)
        with pytest.raises(ZeroDivisionError, match="no metrics"):
            saves.wait()
        assert saves.latest_step() == 1


def test_a_save_that_failed_may_be_tried_again(tmp_path):
    state = state_on(Layout.make(4))

    def fail():
        raise OSError("not yet")

    with CheckpointStore(tmp_path) as saves:
        saves.save(1, state, {}, after=fail)
        with pytest.raises(RunError, match="Could not write the checkpoint of step 1 .*: not yet"):
            saves.wait()
        saves.save(1, state, {})
        saves.wait()
        assert saves.latest_step() == 1


def test_an_old_checkpoint_that_cannot_be_removed_ends_no_run(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError("of somebody else")

    state = state_on(Layout.make(4))
    with CheckpointStore(tmp_path) as saves:
        saves.save(1, state, {})
        saves.wait()
        with monkeypatch.context() as patch:
            patch.setattr("dist_ens.checkpoint.store.give_up_checkpoint", refuse)
            saves.save(2, state, {})
            saves.wait()
        saves.save(3, state, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]


def test_a_checkpoint_that_was_replaced_meanwhile_is_called_no_damage(tmp_path):
    state = state_on(Layout.make(4))
    with CheckpointStore(tmp_path) as saves:
        saves.save(1, state, {})
        saves.save(2, state, {})
        saves.wait()
        for read in (saves.restore_run, lambda step: saves.restore_state(step, abstract(state))):
            with pytest.raises(RunError, match="checkpoints/1 does not exist any more: a run"):
                read(1)


def test_a_sound_checkpoint_is_read_without_a_warning(tmp_path, caplog):
    state = state_on(Layout.make(4))
    with CheckpointStore(tmp_path) as saves:
        saves.save(1, state, {})
        saves.wait()
        saves.restore_state(1, abstract(state))
    assert [record.getMessage() for record in caplog.records] == []


def test_a_run_begins_when_what_an_interrupted_one_was_writing_is_there(tmp_path, monkeypatch):
    let_go, written = threading.Event(), []

    def write(*_, before, **__):
        before()
        let_go.wait(60)
        written.append(1)

    monkeypatch.setattr("dist_ens.checkpoint.store.write_checkpoint", write)
    interrupted = CheckpointStore(tmp_path).__enter__()
    began = threading.Event()
    interrupted.save(1, state_on(Layout.make(4)), {}, after=began.set)
    assert began.wait(60)
    interrupted.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    threading.Timer(0.2, let_go.set).start()
    CheckpointStore(tmp_path, read_only=True)
    assert written


def test_a_folder_may_be_named_by_a_way_up_and_down(tmp_path):
    (tmp_path / "a").mkdir()
    state = state_on(Layout.make(4))
    with CheckpointStore(tmp_path / "a" / ".." / "run") as saves:
        saves.save(1, state, {})
    restored = CheckpointStore(tmp_path / "run", read_only=True).restore_state(1, abstract(state))
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state, restored)))
    again = CheckpointStore(tmp_path / "a" / ".." / "run", read_only=True)
    again.restore_state(1, abstract(state))


def test_a_state_of_another_precision_is_told_by_its_cause(tmp_path):
    with CheckpointStore(tmp_path) as saves:
        saves.save(1, {"w": Layout.make(4).put(np.ones((4, 3), np.float32), "members")}, {})
        saves.wait()
        with jax.enable_x64(True):
            wide = {"w": Layout.make(4).put(jax.numpy.ones((4, 3), "float64"), "members")}
            with pytest.raises(
                RunError, match=r"float32\[4, 3\] in .* and float64\[4, 3\] here. JAX"
            ):
                saves.restore_state(1, abstract(wide))
