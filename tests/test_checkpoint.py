"""What a checkpoint holds, when it counts, and what errors of reading it say."""

import itertools
import os
import threading
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from dist_ens.ground.errors import RunError
from dist_ens.layout import Layout, copied_off_devices
from saving import assert_same, begun, reader, reseal, save, shapes_of, snapshot, steps_in


def state_on(layout):
    """Numbers of several types; zeros too, which a store may leave out."""
    count = layout.num_members
    return layout.put(
        {
            "w": np.arange(3.0 * count, dtype=np.float32).reshape(count, 3),
            "half": jnp.arange(count, dtype=jnp.bfloat16),
            "zeros": np.zeros((count, 2), np.float32),
            "empty": np.zeros((count, 0), np.float32),
            # A part of more than 1 KiB has a place of its own in the files.
            "wide": np.random.default_rng(0).normal(size=(count, 400)).astype(np.float32),
            "step": np.full(count, 7, np.int32),
            "flag": np.arange(count) % 2 == 0,
        },
        "members",
    )


def four(rows=1):
    return state_on(Layout.make(4, ensemble_axis=rows, devices=jax.devices()[:rows]))


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
        state = copied_off_devices(state)
    shapes = shapes_of(state)
    is_used_up = threading.Event()
    with begun(tmp_path) as opened:
        opened.save(snapshot(7, state, before=lambda: is_used_up.wait(60) and {}))
        use_up(state, waits=waves > 1)
        is_used_up.set()
    restored = reader(tmp_path, 7).state(shapes)
    assert_same(expected, jax.device_get(restored))
    assert [(x.dtype, x.sharding) for x in jax.tree.leaves(restored)] == [
        (x.dtype, x.sharding) for x in jax.tree.leaves(shapes)
    ]


def test_orbax_reads_the_arrays_too(tmp_path):
    state = four()
    save(tmp_path, state)
    with ocp.StandardCheckpointer() as orbax:
        restored = orbax.restore(tmp_path / "checkpoints" / "1" / "state")
    assert_same(restored, jax.device_get(state))


@pytest.mark.parametrize("dtype", ["uint4", "int4", "uint2", "float8_e4m3", "float8_e4m3fn"])
def test_values_of_a_type_that_tensorstore_lacks_are_saved_too(tmp_path, dtype):
    values = np.arange(12).reshape(4, 3) % 4
    layout = Layout.make(4, devices=jax.devices()[:2])
    state = {"w": layout.put(jnp.asarray(values, dtype=getattr(ml_dtypes, dtype)), "members")}
    save(tmp_path, state)
    restored = reader(tmp_path, 1).state(shapes_of(state))
    assert restored["w"].dtype == state["w"].dtype == dtype
    np.testing.assert_array_equal(np.asarray(restored["w"]).astype(int), values)


def test_zeros_are_written_too_so_that_what_is_absent_is_damage(tmp_path):
    state = four(rows=4)
    save(tmp_path, state)
    base = {"driver": "file", "path": f"{tmp_path}/checkpoints/1/state/"}
    database = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    of_zeros = sorted(key for key in database.list().result() if key.startswith(b"zeros/"))
    assert of_zeros == [*(b"zeros/c/%d/0" % row for row in range(4)), b"zeros/zarr.json"]
    database.write(of_zeros[0], None).result()
    reseal(tmp_path / "checkpoints" / "1")  # Only the array's own content is wrong now.
    told = r"checkpoints/1 is damaged: leaf zeros has changed in the members \[0\]\."
    with pytest.raises(RunError, match=told):
        reader(tmp_path, 1).state(shapes_of(state))


def test_no_byte_of_the_arrays_can_change_unnoticed(tmp_path):
    state = four(rows=4)
    save(tmp_path, state)
    folder = tmp_path / "checkpoints" / "1" / "state"
    data = [*(folder / "d").iterdir()]
    for file in (folder / "manifest.ocdbt", *data):
        sound = file.read_bytes()
        for place in range(0, len(sound), 61):
            file.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
            try:
                restored = reader(tmp_path, 1).state(shapes_of(state))
            except RunError as error:
                told = str(error)
            else:
                told = "checkpoints/1 is damaged"
                # TensorStore may flush early and write its index once more, into a second
                # file: nothing refers to the first index, and nothing that it says is read.
                assert len(data) > 1
                assert_same(restored, state)
            assert "checkpoints/1 is damaged" in told
        file.write_bytes(sound)
    assert_same(reader(tmp_path, 1).state(shapes_of(state)), state)


@pytest.mark.parametrize("files", [("state/_METADATA", "unfinished"), ("unfinished.unfinished",)])
def test_the_oldest_go_and_what_was_left_unfinished_goes_when_a_run_begins(tmp_path, files):
    folder, state = tmp_path / "checkpoints", four()
    (folder / "9" / "state").mkdir(parents=True)
    for file in files:
        (folder / "9" / file).touch()
    assert steps_in(tmp_path) == []
    assert [p.name for p in folder.iterdir()] == ["9"]
    with begun(tmp_path, keep=2) as opened:
        for step in (1, 3, 20, 100, 100):  # one that is saved stays
            opened.save(snapshot(step, state))
        opened.wait()
        # No checkpoint any more; its files go when the next is written, or at the end.
        assert sorted(p.name for p in folder.iterdir()) == ["100", "20", "3"]
        assert steps_in(tmp_path) == [20, 100]
    assert sorted(p.name for p in folder.iterdir()) == ["100", "20"]


def test_a_save_that_ends_between_any_two_writes_to_the_disk_leaves_a_whole_checkpoint(
    tmp_path, monkeypatch
):
    state, newest = four(), []
    for last in itertools.count():
        workdir, synced = tmp_path / str(last), itertools.count()

        def fsync(_, last=last, synced=synced):
            if next(synced) >= last:
                raise OSError("no more")

        with begun(workdir) as opened:
            opened.save(snapshot(1, state, host_files={"position": b"1"}))
            opened.wait()
            with monkeypatch.context() as patch:
                patch.setattr(os, "fsync", fsync)
                opened.save(snapshot(2, state, host_files={"position": b"2"}))
                try:
                    opened.wait()
                except RunError:
                    ended = False
                else:
                    ended = True
        with begun(workdir) as opened:  # as whoever goes on
            newest.append(opened.saved_step)
            assert opened.restore_host_file("position") == str(newest[-1]).encode()
            assert opened.restore_state(shapes_of(state)) is not None
            assert not list((workdir / "checkpoints").rglob("*unfinished"))
        if ended:
            break
    # Ten files and folders, the last of which is that of the manifest.
    assert newest == [1] * 10 + [2]


def test_nothing_is_written_before_what_comes_first_is_done(tmp_path):
    state, seen = four(), []

    def fail():
        seen.append(steps_in(tmp_path))
        raise ZeroDivisionError("no metrics")

    with begun(tmp_path) as opened:
        opened.save(snapshot(1, state, before=fail))
        with pytest.raises(ZeroDivisionError, match="no metrics"):
            opened.wait()
        assert seen == [steps_in(tmp_path)] == [[]]
        opened.save(snapshot(1, state))  # A save that failed may be tried again.
    assert steps_in(tmp_path) == [1]


def test_a_checkpoint_that_was_replaced_meanwhile_is_called_no_damage(tmp_path):
    state = four()
    for step in (1, 2):
        save(tmp_path, state, step)
    opened = reader(tmp_path, 1)
    (tmp_path / "checkpoints" / "1").rename(tmp_path / "gone")
    with pytest.raises(RunError, match="checkpoints/1 does not exist any more: a run"):
        opened.state(shapes_of(state))


def test_a_folder_may_be_named_by_a_way_up_and_down(tmp_path):
    (tmp_path / "a").mkdir()
    state = four()
    save(tmp_path / "a" / ".." / "run", state)
    for folder in (tmp_path / "run", tmp_path / "a" / ".." / "run"):
        assert_same(reader(folder, 1).state(shapes_of(state)), state)


def test_a_state_of_another_precision_is_told_by_its_cause(tmp_path):
    save(tmp_path, {"w": Layout.make(4).put(np.ones((4, 3), np.float32), "members")})
    told = r"float32\[4, 3\] in .* and float64\[4, 3\] here. .* JAX_ENABLE"
    with jax.enable_x64(True):
        wide = {"w": Layout.make(4).put(jnp.ones((4, 3), "float64"), "members")}
        with pytest.raises(RunError, match=told):
            reader(tmp_path, 1).state(shapes_of(wide))
