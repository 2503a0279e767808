"""Checkpoints that declare more than they hold: refused before memory is allocated."""

import dataclasses
import json
import types

import jax
import numpy as np
import psutil
import pytest
import tensorstore as ts
from rich.table import Table

from dist_ens.checkpoint import CheckpointStore
from dist_ens.checkpoint.lineage import Event
from dist_ens.checkpoint.manifest import MANIFEST, Manifest
from dist_ens.checkpoint.verify import faults_of
from dist_ens.checkpoint.writing import database_spec
from dist_ens.errors import RunError, UserError
from dist_ens.exit_codes import ExitCode
from dist_ens.layout import MEMBERS, Layout
from dist_ens.metrics.table import as_text
from launch import members as commands
from test_checkpoint import reseal
from test_golden_checkpoints import copied

pytestmark = pytest.mark.quick
MOST_BYTES = 32 * 2**20
HUGE = 2**50  # Of 4 bytes each: no machine has the memory, so that an attempt ends the process.


def edit_description(step, edit):
    """Changes the file `zarr.json` of the leaf `w`, as if it had been saved so.

    Args:
        step: Folder of the checkpoint, of either format.
        edit: Function that changes the content, a dict.
    """
    database = ts.KvStore.open(
        {**database_spec(step / "state"), "config": {"max_inline_value_bytes": 1024}}
    ).result()
    content = json.loads(database.read(b"w/zarr.json").result().value)
    edit(content)
    database.write(b"w/zarr.json", json.dumps(content).encode()).result()
    if (step / MANIFEST).exists():
        reseal(step)


def edit_leaf(step, **changes):
    """Changes the entry of the leaf `w` in the manifest."""
    manifest = Manifest.read(step)
    leaves = {**manifest.leaves, "w": dataclasses.replace(manifest.leaves["w"], **changes)}
    (step / MANIFEST).write_bytes(dataclasses.replace(manifest, leaves=leaves).to_bytes())


def shape_of(content, shape):
    """Gives a leaf another shape, with parts of two members."""
    content["shape"] = [*shape]
    content["chunk_grid"]["configuration"]["chunk_shape"] = [2, *shape[1:]]
    codec = content["codecs"][0]
    if codec["name"] == "sharding_indexed":
        codec["configuration"]["chunk_shape"] = [1, *shape[1:]]


def part_of(content, length):
    """Gives a leaf parts that are wider than it is."""
    grid = content["chunk_grid"]["configuration"]
    grid["chunk_shape"][1] = length
    codec = content["codecs"][0]
    if codec["name"] == "sharding_indexed":
        codec["configuration"]["chunk_shape"][1] = length


def refusal(step, shape=(4, 3)):
    """The message by which a run that asks for a shape of `w` refuses a checkpoint.

    Other leaves are asked for as they are. The memory that the refusal takes is bounded.
    """
    of_others = {"half": "bfloat16", "flag": bool, "step": "int32", "member_id": "int32"}
    asked = {name: jax.ShapeDtypeStruct((4,), dtype) for name, dtype in of_others.items()}
    asked |= {
        "w": jax.ShapeDtypeStruct(shape, "float32"),
        "key": jax.ShapeDtypeStruct((4, 2), "uint32"),
    }
    sharding = Layout.make(4, ensemble_axis=1, devices=jax.devices()[:1]).sharding(MEMBERS)
    asked = {name: leaf.update(sharding=sharding) for name, leaf in asked.items()}
    before = psutil.Process().memory_info().rss
    with pytest.raises(RunError) as refused:
        CheckpointStore(step.parent.parent, read_only=True).restore_state(3, asked)
    assert psutil.Process().memory_info().rss - before < MOST_BYTES
    assert refused.value.exit_code == ExitCode.DAMAGED
    return str(refused.value)


@pytest.mark.parametrize("name", ["format_1", "format_2"])
def test_arrays_that_declare_more_than_their_files_hold_are_refused(tmp_path, name):
    step = copied(name, tmp_path)
    edit_description(step, lambda content: shape_of(content, (4, HUGE)))
    assert "damaged: its arrays declare 18,014,398,509,4" in refusal(step)  # 4 * 4 * 2**50
    [*_, fault] = [each for each in faults_of(step) if "declare" in each]
    assert "its arrays declare 18,014,398,509,4" in fault


def test_they_are_refused_too_where_the_manifest_and_the_run_agree_with_them(tmp_path):
    step = copied("format_2", tmp_path)
    edit_description(step, lambda content: shape_of(content, (4, HUGE)))
    edit_leaf(step, shape=(4, HUGE))
    assert "damaged: its arrays declare" in refusal(step, (4, HUGE))


def test_more_members_than_the_files_hold_are_refused(tmp_path):
    step = copied("format_2", tmp_path)
    edit_description(step, lambda content: shape_of(content, (HUGE, 3)))
    edit_leaf(step, shape=(HUGE, 3))
    assert "damaged: its arrays declare" in refusal(step, (HUGE, 3))


@pytest.mark.parametrize("name", ["format_1", "format_2"])
def test_a_part_that_is_larger_than_its_array_is_refused(tmp_path, name):
    step = copied(name, tmp_path)
    edit_description(step, lambda content: part_of(content, HUGE))
    told = f"leaf w declares parts of the shape [2, {HUGE}], and its whole shape is [4, 3]"
    assert told in refusal(step)


def test_a_manifest_that_declares_another_shape_than_the_array_is_refused(tmp_path):
    step = copied("format_2", tmp_path)
    edit_leaf(step, shape=(4, HUGE))
    assert "the array of leaf w is not the one that was saved" in refusal(step)


def test_a_manifest_with_too_few_digests_is_refused(tmp_path):
    step = copied("format_2", tmp_path)
    edit_leaf(step, digests=(1, 2))
    assert "leaf w has another number of members than manifest.json" in refusal(step)


def test_many_small_parts_that_the_index_compresses_are_read(tmp_path):
    # 3,200 parts of 800 bytes, all zero, are far smaller in the files than in memory.
    layout = Layout.make(8, devices=jax.devices()[:8])
    leaves = {f"leaf_{number}": np.zeros((8, 200), np.float32) for number in range(400)}
    state = layout.put(leaves | {"empty": np.zeros((8, 0), np.float32)}, "members")
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, {})
    folder = tmp_path / "checkpoints" / "1" / "state"
    in_files = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert in_files < 400 * 8 * 800
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored = CheckpointStore(tmp_path, read_only=True).restore_state(1, shapes)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((state, restored)))


def test_text_from_files_is_escaped_on_the_terminal(tmp_path, monkeypatch, capsys):
    # A terminal would clear itself, or take another title.
    clear, title = "\x1b[2J", "\x1b]0;title\x07"
    step = copied("format_2", tmp_path)
    manifest = Manifest.read(step)
    members = [
        dataclasses.replace(each, run=f"{clear}a", events=(Event(1, f"{title}:smile: [b]"),))
        for each in manifest.members
    ]
    changed = dataclasses.replace(manifest, members=tuple(members))
    (step / MANIFEST).write_bytes(changed.to_bytes())
    (step / f"{clear}b").touch()
    monkeypatch.setattr(commands, "_STEP", types.SimpleNamespace(value=None))
    commands._list(tmp_path)
    commands._verify(tmp_path)
    printed = capsys.readouterr().out
    assert printed.replace("\n", "").isprintable()
    assert ":smile: [b]" in printed
    assert r"the file \x1b[2Jb does not belong to it" in printed
    assert str(UserError(f"The class {clear}.")) == str(RunError(f"The class {clear}."))
    assert str(UserError(f"The class {clear}.")) == r"The class \x1b[2J."
    table = Table(title=title)
    table.add_column(clear)
    assert as_text(table).replace("\n", "").isprintable()
