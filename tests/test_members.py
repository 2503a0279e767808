"""Members of saved runs by their ids: read alone, copied, joined, added, exported, imported."""

import dataclasses
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from absl.testing import flagsaver

import dist_ens as de
import test_replay
from commands import dist_ens
from dist_ens.checkpoint import Checkpoints, Lineage, SavedMembers, read_lineages, read_members
from dist_ens.checkpoint.leaves import named_leaves
from dist_ens.checkpoint.lineage import Event
from dist_ens.checkpoint.manifest import Manifest
from dist_ens.experiment import OwnParts
from dist_ens.experiment.members import _free_ids, copy_members, extend
from dist_ens.experiment.networks import (
    export_members,
    import_members,
    network_paths,
    parts_from,
    read_network,
    write_network,
)
from dist_ens.experiment.replay import replay
from dist_ens.experiment.train import train
from dist_ens.ground.errors import RunError, UserError
from dist_ens.layout import Layout
from dist_ens.processes import cluster
from dist_ens.storage import Disk
from launch import members as launch_members
from saving import rewrite, save, steps_in, verified

STEPS = 6
FIRST = "params.0.b"  # Name of the first array of the network.
LINEAR = (
    lambda key: {"w": jax.random.normal(key, (3, 2)), "b": jnp.zeros(2)},
    lambda params, inputs: inputs @ params["w"] + params["b"][None],
)
DATA = {
    "inputs": np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32),
    "labels": np.arange(8) % 2,
}


def experiment(**fields):
    return test_replay.experiment(**{"num_members": 4, "layout": {"ensemble_axis": 2}} | fields)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs: `four` and `six` members of one seed, and `other` of another seed."""
    folder = tmp_path_factory.mktemp("members")
    train(experiment(), folder / "four")
    train(experiment(num_members=6), folder / "six")
    train(experiment(num_members=2, seed=5), folder / "other")
    return folder


@pytest.fixture(scope="module", autouse=True)
def without_a_data_axis():
    """A run takes as many devices as divide its members, so that no member is split."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "_cores_are_devices", True)
        yield


def assert_equal(members, others):
    assert members.member_ids == others.member_ids
    jax.tree.map(np.testing.assert_array_equal, members.leaves, others.leaves)


def part_of(members, positions):
    return dataclasses.replace(
        members,
        lineages=tuple(members.lineages[place] for place in positions),
        leaves={name: leaf[positions] for name, leaf in members.leaves.items()},
    )


def test_members_are_read_alone_in_the_order_of_the_given_ids(runs):
    whole = read_members(runs / "four")
    assert_equal(read_members(runs / "four", member_ids=[3, 1]), part_of(whole, [3, 1]))
    loaded = de.load(runs / "four", members=[3, 1])
    assert loaded.ensemble.ids.tolist() == loaded.state.member_id.tolist() == [3, 1]
    first = jax.tree.leaves(loaded.state.params)[0]
    np.testing.assert_array_equal(first, whole.leaves[FIRST][[3, 1]])


def test_only_the_bytes_of_the_members_are_read(tmp_path):
    layout = Layout.make(64, devices=jax.devices()[:1])
    ids = np.arange(64, dtype=np.int32)
    state = layout.put({"member_id": ids, "w": np.zeros((64, 100_000), np.float32)}, "members")
    save(tmp_path, state)
    program = """
import sys
import tensorstore
from dist_ens.checkpoint import read_members
read_members(sys.argv[1], member_ids=[3, 5])
counted = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
print(sum(value["value"] for metric in counted for value in metric["values"]))
"""
    words = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    # Two members of 100,000 numbers of 4 bytes are 800,000 bytes of 25,600,000.
    assert 800_000 <= int(done.stdout) <= 820_000


def test_a_copy_resumes_and_is_evaluated_as_if_it_had_never_had_more(runs, tmp_path):
    before = read_members(runs / "four")
    copy_members([runs / "four"], tmp_path / "two", member_ids=[3, 1])
    assert_equal(read_members(tmp_path / "two"), part_of(before, [3, 1]))
    assert_equal(read_members(runs / "four"), before)
    stored = json.loads((tmp_path / "two" / "experiment.json").read_text())
    assert stored["member_ids"] == [3, 1]
    longer = experiment(num_members=2, member_ids=(3, 1), steps=STEPS + 3)
    resumed = train(longer, tmp_path / "two")
    assert resumed.step == STEPS + 3
    train(longer, tmp_path / "never_more")
    assert_equal(read_members(tmp_path / "two"), read_members(tmp_path / "never_more"))
    assert [member["member_id"] for member in resumed.scores.members] == [3, 1]


def test_members_of_two_seeds_are_joined_and_each_says_where_it_comes_from(runs, tmp_path):
    copied = copy_members([runs / "four", runs / "other"], tmp_path / "both")
    assert copied.member_ids == list(range(6))
    step, lineages = read_lineages(tmp_path / "both")
    assert step == STEPS
    other = str((runs / "other").resolve())
    assert lineages[5] == Lineage(5, 5, 1, other, (Event(STEPS, f"copied from {other}"),))
    of_other = read_members(runs / "other").renamed([4, 5])
    assert_equal(read_members(tmp_path / "both", member_ids=[4, 5]), of_other)
    assert len(de.load(tmp_path / "both").evaluate(intervals=False).members) == 6
    # It is trained alone from its own seed and id.
    assert replay(tmp_path / "both", 5, progress=False).differences == {}
    longer = experiment(num_members=6, steps=STEPS + 1)
    assert train(longer, tmp_path / "both").step == STEPS + 1
    assert read_lineages(tmp_path / "both")[1][5].seed == 5


def test_some_members_of_each_run_are_copied(runs, tmp_path):
    copied = copy_members([runs / "six", runs / "other"], tmp_path / "some", member_ids=[5, 1])
    assert copied.member_ids == [5, 1, 6]
    assert [member.seed for member in copied.lineages] == [11, 11, 5]
    with pytest.raises(UserError, match=r"four has 0-3; .*other has 0, 1\. Give ids"):
        copy_members([runs / "four", runs / "other"], tmp_path / "none", member_ids=[1, 9])


def test_members_are_not_joined_with_themselves_or_with_another_network(runs, tmp_path):
    with pytest.raises(UserError, match="member 0 of the seed 11 is in both"):
        copy_members([runs / "four", runs / "six"], tmp_path / "to")
    wider = copy_members([runs / "other"], tmp_path / "wider")
    record = json.loads(json.dumps(wider.record))
    record["experiment"]["model"]["options"]["hidden_sizes"] = [9]
    rewrite(tmp_path / "wider" / "checkpoints" / str(STEPS), run=record)
    told = r"model.hidden_sizes is \(8,\) in the first and \(9,\) in the second"
    with pytest.raises(UserError, match=told):
        copy_members([runs / "four", tmp_path / "wider"], tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_only_the_ids_that_are_taken_change_when_runs_are_joined():
    for ids, others, groups, free in (
        ([0, 1, 2, 3], [3, 7], 1, [4, 7]),
        ([0, 1], [0, 2, 3], 1, [4, 2, 3]),
        # Members of two groups: 2 and 3 stay in the groups 0 and 1.
        ([0, 1, 2, 3], [2, 3], 2, [4, 5]),
        ([2, 3], [2, 3, 4, 5], 2, [6, 7, 4, 5]),
    ):
        first, second = (
            SavedMembers(STEPS, {"num_groups": groups}, tuple(map(Lineage, each)), {})
            for each in (ids, others)
        )
        assert _free_ids(first, second) == free


def test_added_members_are_those_of_a_larger_ensemble_and_the_first_keep_every_bit(
    runs, tmp_path, monkeypatch
):
    # The callbacks of the run's config file are not called.
    own = OwnParts(callbacks=[lambda info: pytest.fail("called")])
    monkeypatch.setattr("dist_ens.experiment.members.parts_of", lambda *_: own)
    extend(runs / "four", [4, 5], tmp_path / "grown")
    assert_equal(read_members(tmp_path / "grown"), read_members(runs / "six"))
    with pytest.raises(UserError, match="Give ids that it does not have"):
        extend(runs / "four", [3, 4], tmp_path / "again")


def test_members_of_a_run_made_in_python_are_copied_and_resumed(tmp_path):
    def run(folder, steps, **fields):
        ensemble = de.Ensemble(LINEAR, optax.sgd(0.1), de.losses.categorical(2), **fields)
        checkpoints = Checkpoints(folder)
        return de.fit(ensemble, DATA, steps=steps, checkpoints=checkpoints, progress=False)

    run(tmp_path / "four", 3, num_members=4)
    copy_members([tmp_path / "four"], tmp_path / "two", member_ids=[3, 1])
    resumed = run(tmp_path / "two", 5, num_members=2, member_ids=[3, 1])
    whole = run(tmp_path / "never", 5, num_members=2, member_ids=[3, 1])
    np.testing.assert_array_equal(resumed.state.params["w"], whole.state.params["w"])
    four = de.Ensemble(LINEAR, optax.sgd(0.1), de.losses.categorical(2), num_members=4)
    state = de.load(tmp_path / "four", ensemble=four).state
    joined = de.State.concatenate([state.select([2]), state.select([0, 1])])
    assert joined.member_id.tolist() == [2, 0, 1]
    with pytest.raises(UserError, match="have the same id"):
        de.State.concatenate([state, state.select([1])])


def test_an_exported_network_has_names_that_a_person_knows_and_is_imported_again(runs, tmp_path):
    paths = export_members(runs / "four", tmp_path / "nets", member_ids=[1, 3])
    assert [path.rpartition("/")[2] for path in paths] == [
        "member_01.safetensors",
        "member_03.safetensors",
    ]
    with pytest.raises(UserError, match="nets is not empty"):
        export_members(runs / "other", tmp_path / "nets")
    arrays = safetensors.numpy.load_file(paths[1])
    whole = read_members(runs / "four")
    np.testing.assert_array_equal(arrays["0.w"], whole.leaves["params.0.w"][3])
    with safetensors.safe_open(paths[1], "np") as file:
        assert file.metadata()["member_id"] == "3"
        assert json.loads(file.metadata()["lineage"])["seed"] == 11
    made = import_members([str(tmp_path / "nets")], experiment(), tmp_path / "imported")
    assert made.member_ids == [0, 1]
    scores = de.load(tmp_path / "imported").evaluate(intervals=False)
    expected = de.load(runs / "four", members=[1, 3]).evaluate(intervals=False)
    assert scores.ensemble == expected.ensemble
    with pytest.raises(UserError, match="Member 0 was imported from"):
        replay(tmp_path / "imported", 0, progress=False)


OF_LEAVES = {"w": optax.contrib.schedule_free_sgd(0.5), "b": optax.set_to_zero()}


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.multi_transform(OF_LEAVES, {"w": "w", "b": "b"}),
        # After three steps, sam is between two updates of the outer optimizer.
        optax.contrib.sam(optax.sgd(0.5), optax.contrib.normalize()),
    ],
    ids=["schedule-free", "sam"],
)
def test_an_exported_network_has_the_parameters_with_which_it_is_evaluated(optimizer, tmp_path):
    ensemble = de.Ensemble(LINEAR, optimizer, de.losses.categorical(2), num_members=2)
    saved = Checkpoints(tmp_path / "run")
    state = de.fit(ensemble, DATA, steps=3, batch_size=8, checkpoints=saved, progress=False).state
    x = DATA["inputs"]
    outputs = np.asarray(ensemble.apply(state, x))
    for number, path in enumerate(export_members(tmp_path / "run", tmp_path / "nets")):
        found = safetensors.numpy.load_file(path)
        np.testing.assert_allclose(x @ found["w"] + found["b"], outputs[number], atol=1e-5)
        assert not np.allclose(found["w"], state.params["w"][number], atol=1e-3)


def test_networks_of_numpy_and_orbax_are_imported_and_those_of_other_shapes_refused(runs, tmp_path):
    [path] = export_members(runs / "four", tmp_path / "nets", member_ids=[3])
    arrays = safetensors.numpy.load_file(path)
    np.savez(tmp_path / "net_2.npz", **arrays)
    tree = {layer: {name: arrays[f"{layer}.{name}"] for name in "wb"} for layer in "01"}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "net_10", {"params": tree})
    given = [str(tmp_path / "net_*")]
    assert [each.name for each in network_paths(given)] == ["net_2.npz", "net_10"]
    import_members(given, experiment(), tmp_path / "imported")
    leaves = read_members(tmp_path / "imported").leaves
    for name, array in arrays.items():
        np.testing.assert_array_equal(leaves[f"params.{name}"], np.stack([array, array]))
    three = experiment(num_members=3, member_ids=(4, 5, 6))
    with pytest.raises(UserError, match="params has 2 members, and the ensemble has 3"):
        import_members(given, three, tmp_path / "other")
    arrays |= {"more": np.zeros(3, np.float32), "0.w": arrays["0.w"][:, :1]}
    safetensors.numpy.save_file(arrays, path)
    with pytest.raises(UserError, match=r"0\.w is float32\[64, 1\] there and float32\[64, 8\]"):
        import_members([str(path)], experiment(), tmp_path / "other")
    assert not (tmp_path / "other" / "checkpoints").exists()


def test_networks_are_imported_at_a_step_beyond_32_bits(tmp_path):
    shapes = {"0.w": (64, 8), "0.b": (8,), "1.w": (8, 10), "1.b": (10,)}
    np.savez(tmp_path / "a.npz", **{name: np.zeros(s, np.float32) for name, s in shapes.items()})
    step = 2**32 - 7
    import_members([str(tmp_path / "a.npz")], experiment(steps=step), tmp_path / "imported")
    members = read_members(tmp_path / "imported")
    assert members.step == step
    assert members.leaves["step"].tolist() == [-7]  # The state counts modulo 2^32.


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=str)
def test_a_network_of_orbax_is_read_however_it_was_written(tmp_path, options):
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.zeros(2, np.float32)}
    with ocp.PyTreeCheckpointer(**options) as checkpointer:
        checkpointer.save(tmp_path / "net", {"params": {"dense/1": arrays}})
    like = {"dense.1": arrays}
    params, _ = parts_from(read_network(tmp_path / "net"), (like, ()), tmp_path / "net")
    jax.tree.map(np.testing.assert_array_equal, params, like)


@pytest.mark.parametrize(
    "parts",
    [
        ({"mlp/~/linear_0": {"w": 1.0}}, {}),  # Haiku
        ({"params": {"w": 1.0}, "w": 2.0}, {"batch_stats": {"params": 3.0}}),
        ({"model_state": {"w": 1.0}}, {"w": 2.0}),
        (1.0, ()),
        ((), 1.0),
    ],
    ids=str,
)
def test_every_network_that_is_exported_can_be_imported(tmp_path, parts):
    parts = jax.tree.map(lambda value: np.full((2, 3), value, ml_dtypes.bfloat16), parts)
    state = de.State((), (), (), *parts, ())
    write_network(Disk(tmp_path), "a.safetensors", named_leaves(state), Lineage(0), STEPS)
    read = parts_from(read_network(tmp_path / "a.safetensors"), parts, tmp_path)
    assert jax.tree.structure(read) == jax.tree.structure(parts)
    jax.tree.map(np.testing.assert_array_equal, read, parts)


def test_a_parameter_and_other_state_of_one_name_are_not_imported_as_one(tmp_path):
    like = ({"mean": np.zeros(2, np.float32)}, {"mean": np.zeros(2, np.float32)})
    with pytest.raises(UserError, match="Two arrays of the network have the same name"):
        parts_from({"mean": np.zeros(2, np.float32)}, like, tmp_path / "a.npz")


def test_the_command_line_copies_and_lists(runs, tmp_path):
    three = tmp_path / "three"
    for words, told in (
        ([runs / "four", "copy", "--ids=0-1,3", f"--to={three}"], "Wrote 3 members (ids 0, 1, 3)"),
        ([three, "list"], "3 members"),
    ):
        ended = dist_ens("members", *words)
        assert ended.returncode == 0, ended.stderr
        assert f"{told} at step {STEPS}" in ended.stdout


def test_the_words_of_the_command_line_are_folders_an_action_and_networks():
    def prepared(*words):
        line = launch_members._CommandLine()
        with flagsaver.flagsaver():
            left = line.prepare(["members", *words])
        return left, [path.name for path in line.workdirs], line.action, line.networks

    # A word is not taken for the value of a flag.
    flags = ["--to", "nets", "--step", "3"]
    for words in ([*flags, "nets", "export"], ["nets", "export", *flags]):
        assert prepared(*words) == (["members", *flags], ["nets"], "export", [])
    assert prepared("a", "b", "copy")[1:3] == (["a", "b"], "copy")
    for words in (["a"], ["a", "verfy"], ["a", "b", "list"], ["a", "copy", "b"]):
        with pytest.raises(UserError, match="dist-ens members takes|copy takes no 'b'"):
            prepared(*words)


def test_text_from_files_is_escaped_on_the_terminal(runs, tmp_path, monkeypatch, capsys):
    # A terminal would clear itself, or take another title.
    clear, title = "\x1b[2J", "\x1b]0;title\x07"
    copy_members([runs / "other"], tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / str(STEPS)
    events = (Event(1, f"{title}:smile: [b]"),)
    members = [
        dataclasses.replace(each, run=f"{clear}a", events=events)
        for each in Manifest.read(Disk(step)).members
    ]
    rewrite(step, members=tuple(members))
    (step / f"{clear}b").touch()
    monkeypatch.setattr(launch_members, "_STEP", types.SimpleNamespace(value=None))
    launch_members._list(tmp_path / "run")
    printed = "\n".join([capsys.readouterr().out, *verified(tmp_path / "run")[1]])
    assert printed.replace("\n", "").isprintable()
    assert ":smile: [b]" in printed
    assert r"the file \x1b[2Jb does not belong to it" in printed


def test_a_write_that_was_interrupted_is_done_again_by_the_same_command(
    runs, tmp_path, monkeypatch
):
    def full(*_):
        raise OSError(28, "No space left on device")

    to = tmp_path / "two"

    def copy():
        return copy_members([runs / "four"], to, member_ids=[3, 1])

    with monkeypatch.context() as patch:
        patch.setattr("dist_ens.checkpoint.members.write_checkpoint", full)
        with pytest.raises(RunError, match="Remove the cause, and run the same command again"):
            copy()
    (to / "checkpoints" / "6" / "state").mkdir(parents=True)
    (to / "checkpoints" / "6" / "unfinished").touch()
    assert copy().member_ids == [3, 1]
    names = sorted(path.name for path in to.iterdir())
    assert names == [".digests", "checkpoints", "experiment.json"]
    assert steps_in(to) == [STEPS]
    with pytest.raises(UserError, match="is not empty"):
        copy()
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / ".lock").touch()
    with pytest.raises(UserError, match="is not empty"):
        copy_members([runs / "four"], tmp_path / "training")
