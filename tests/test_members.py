"""Members of saved runs by their ids: read alone, taken out, joined, added, exported, imported."""

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
import tensorstore as ts
from absl.testing import flagsaver

import dist_ens as de
from commands import dist_ens
from dist_ens import cluster
from dist_ens.checkpoint import (
    Checkpoints,
    CheckpointStore,
    Lineage,
    SavedMembers,
    read_lineages,
    read_members,
)
from dist_ens.checkpoint.leaves import named_leaves
from dist_ens.checkpoint.manifest import MANIFEST, LeafEntry, Manifest
from dist_ens.checkpoint.reading import check_arrays
from dist_ens.checkpoint.writing import database_spec
from dist_ens.errors import RunError, UserError
from dist_ens.experiment import Experiment, OwnParts
from dist_ens.experiment.members import _free_ids, drop, extend, merge, require_folder, select
from dist_ens.experiment.network_files import (
    network_paths,
    parts_from,
    read_network,
    require_no_other_networks,
    write_network,
)
from dist_ens.experiment.networks import export_members, import_members
from dist_ens.experiment.replay import replay
from dist_ens.experiment.train import train
from dist_ens.layout import Layout
from launch import members as launch_members

STEPS = 6
FIRST = "params.0.b"  # Name of the first array of the network.


def experiment(**fields):
    return Experiment.from_dict(
        {
            "num_members": 4,
            "steps": STEPS,
            "seed": 11,
            "execution": "loop",
            "data": {"global_batch_size": 32, "std": (16.0,), "examples": "permuted"},
            "model": {"name": "mlp", "hidden_sizes": (8,)},
            "loss": {"mixup": 0.2},
            "layout": {"ensemble_axis": 2},
        }
        | fields
    )


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
    assert members.leaves.keys() == others.leaves.keys()
    for name, leaf in members.leaves.items():
        np.testing.assert_array_equal(leaf, others.leaves[name], err_msg=name)


def test_members_are_read_alone_in_the_order_of_the_given_ids(runs):
    whole = read_members(runs / "four")
    assert_equal(read_members(runs / "four", member_ids=[3, 1]), whole.select([3, 1]))
    loaded = de.load(runs / "four", members=[3, 1])
    assert loaded.ensemble.ids.tolist() == loaded.state.member_id.tolist() == [3, 1]
    first = jax.tree.leaves(loaded.state.params)[0]
    np.testing.assert_array_equal(first, whole.leaves[FIRST][[3, 1]])


def test_only_the_bytes_of_the_members_are_read(tmp_path):
    layout = Layout.make(64, devices=jax.devices()[:1])
    ids = np.arange(64, dtype=np.int32)
    state = layout.put({"member_id": ids, "w": np.zeros((64, 100_000), np.float32)}, "members")
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, {})
    program = """
import sys
import tensorstore
from dist_ens.checkpoint import read_members
read_members(sys.argv[1], member_ids=[3, 5])
counted = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
print(sum(value["value"] for metric in counted for value in metric["values"]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True
    )
    # Two members of 100,000 numbers of 4 bytes are 800,000 bytes of 25,600,000.
    assert 800_000 <= int(done.stdout) <= 820_000


def test_a_selected_run_resumes_and_is_evaluated_as_if_it_had_never_had_more(runs, tmp_path):
    select(runs / "four", [3, 1], tmp_path / "two")
    stored = json.loads((tmp_path / "two" / "experiment.json").read_text())
    assert stored["member_ids"] == [3, 1]
    longer = experiment(num_members=2, member_ids=(3, 1), steps=STEPS + 3)
    resumed = train(longer, tmp_path / "two")
    assert resumed.step == STEPS + 3
    train(longer, tmp_path / "never_more")
    assert_equal(read_members(tmp_path / "two"), read_members(tmp_path / "never_more"))
    assert [member["member_id"] for member in resumed.scores.members] == [3, 1]


def test_members_that_are_dropped_are_not_in_the_new_run_and_stay_in_the_old_one(runs, tmp_path):
    before = read_members(runs / "four")
    drop(runs / "four", [1], tmp_path / "three")
    assert_equal(read_members(tmp_path / "three"), before.select([0, 2, 3]))
    assert_equal(read_members(runs / "four"), before)
    assert de.load(tmp_path / "three").evaluate(intervals=False).members[1]["member_id"] == 2


def test_runs_of_two_seeds_are_merged_and_each_member_says_where_it_comes_from(runs, tmp_path):
    merged = merge([runs / "four", runs / "other"], tmp_path / "both")
    assert merged.member_ids == list(range(6))
    step, lineages = read_lineages(tmp_path / "both")
    assert step == STEPS
    last = lineages[5]
    assert (last.seed, last.original_id, last.run) == (5, 1, str((runs / "other").resolve()))
    assert [event.what for event in last.events] == [f"merged from {(runs / 'other').resolve()}"]
    both, other = read_members(tmp_path / "both"), read_members(runs / "other")
    assert_equal(both.select([4, 5]), other.renamed([4, 5]))
    assert len(de.load(tmp_path / "both").evaluate(intervals=False).members) == 6
    # It is trained alone from its own seed and id.
    assert replay(tmp_path / "both", 5, progress=False).differences == {}
    longer = experiment(num_members=6, steps=STEPS + 1)
    assert train(longer, tmp_path / "both").step == STEPS + 1
    assert read_lineages(tmp_path / "both")[1][5].seed == 5


def test_a_run_is_not_merged_with_its_own_members_or_another_network(runs, tmp_path):
    with pytest.raises(UserError, match="member 0 of the seed 11 is in both"):
        merge([runs / "four", runs / "six"], tmp_path / "to")
    wider = {"name": "mlp", "hidden_sizes": (9,)}
    train(experiment(num_members=2, seed=1, model=wider), tmp_path / "wider")
    with pytest.raises(
        UserError, match=r"model.hidden_sizes is \(8,\) in the first and \(9,\) in the second"
    ):
        merge([runs / "four", tmp_path / "wider"], tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_added_members_are_those_of_a_larger_ensemble_and_the_first_keep_every_bit(runs, tmp_path):
    extend(runs / "four", [4, 5], tmp_path / "grown")
    assert_equal(read_members(tmp_path / "grown"), read_members(runs / "six"))
    with pytest.raises(UserError, match="Give ids that it does not have"):
        extend(runs / "four", [3, 4], tmp_path / "again")


def test_no_members_are_added_to_a_run_whose_keys_are_of_another_version(
    runs, tmp_path, monkeypatch
):
    monkeypatch.setattr("dist_ens.experiment.checks.KEY_RULE", 3)
    with pytest.raises(UserError, match="a run of another version of dist_ens"):
        extend(runs / "four", [4], tmp_path / "other")


def test_a_run_made_in_python_is_selected_and_resumed(tmp_path):
    network = (
        lambda key: {"w": jax.random.normal(key, (3, 2))},
        lambda params, inputs: inputs @ params["w"],
    )
    data = {"inputs": np.ones((8, 3)), "labels": np.ones(8, int)}

    def run(folder, steps, **fields):
        ensemble = de.Ensemble(network, optax.sgd(0.1), de.losses.categorical(2), **fields)
        checkpoints = Checkpoints(folder)
        return de.fit(ensemble, data, steps=steps, checkpoints=checkpoints, progress=False)

    run(tmp_path / "four", 3, num_members=4)
    select(tmp_path / "four", [3, 1], tmp_path / "two")
    resumed = run(tmp_path / "two", 5, num_members=2, member_ids=[3, 1])
    whole = run(tmp_path / "never", 5, num_members=2, member_ids=[3, 1])
    np.testing.assert_array_equal(resumed.state.params["w"], whole.state.params["w"])
    four = de.Ensemble(network, optax.sgd(0.1), de.losses.categorical(2), num_members=4)
    state = de.load(tmp_path / "four", ensemble=four).state
    joined = de.State.concatenate([state.select([2]), state.select([0, 1])])
    assert joined.member_id.tolist() == [2, 0, 1]
    with pytest.raises(UserError, match="some have the same id"):
        de.State.concatenate([state, state.select([1])])


def test_an_exported_network_has_names_that_a_person_knows_and_is_imported_again(runs, tmp_path):
    paths = export_members(runs / "four", tmp_path / "nets", member_ids=[1, 3])
    assert [path.name for path in paths] == ["member_01.safetensors", "member_03.safetensors"]
    assert export_members(runs / "four", tmp_path / "nets", member_ids=[1, 3]) == paths
    with pytest.raises(UserError, match="is a network that would be mixed with those to export"):
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


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.multi_transform(
            {"w": optax.contrib.schedule_free_sgd(0.5), "b": optax.set_to_zero()},
            {"w": "w", "b": "b"},
        ),
        # After three steps, sam is between two updates of the outer optimizer.
        optax.contrib.sam(optax.sgd(0.5), optax.contrib.normalize()),
    ],
    ids=["schedule-free", "sam"],
)
def test_an_exported_network_has_the_parameters_with_which_it_is_evaluated(optimizer, tmp_path):
    network = (
        lambda key: {"w": jax.random.normal(key, (3, 2)), "b": jnp.zeros(2)},
        lambda params, inputs: inputs @ params["w"] + params["b"][None],
    )
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    ensemble = de.Ensemble(network, optimizer, de.losses.categorical(2), num_members=2)
    data = {"inputs": x, "labels": np.arange(8) % 2}
    saved = Checkpoints(tmp_path / "run")
    state = de.fit(ensemble, data, steps=3, batch_size=8, checkpoints=saved, progress=False).state
    outputs = np.asarray(ensemble.apply(state, x))
    for number, path in enumerate(export_members(tmp_path / "run", tmp_path / "nets")):
        found = safetensors.numpy.load_file(path)
        np.testing.assert_allclose(x @ found["w"] + found["b"], outputs[number], atol=1e-5)
        assert not np.allclose(found["w"], state.params["w"][number], atol=1e-3)


def test_networks_of_numpy_and_orbax_are_imported(runs, tmp_path):
    [path] = export_members(runs / "four", tmp_path / "nets", member_ids=[3])
    arrays = safetensors.numpy.load_file(path)
    np.savez(tmp_path / "net_2.npz", **arrays)
    tree = {}
    for name, array in arrays.items():
        *parents, last = name.split(".")
        branch = tree
        for key in parents:
            branch = branch.setdefault(key, {})
        branch[last] = array
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "net_10", {"params": tree})
    given = [str(tmp_path / "net_*")]
    assert [each.name for each in network_paths(given)] == ["net_2.npz", "net_10"]
    import_members(given, experiment(), tmp_path / "imported")
    leaves = read_members(tmp_path / "imported").leaves
    for name, array in arrays.items():
        found = leaves[f"params.{name}"]
        np.testing.assert_array_equal(found, np.stack([array, array]))


def test_a_network_of_another_shape_is_refused_by_the_names_of_its_arrays(runs, tmp_path):
    [path] = export_members(runs / "four", tmp_path, member_ids=[0])
    arrays = safetensors.numpy.load_file(path)
    arrays["more"] = np.zeros(3, np.float32)
    arrays["0.w"] = arrays["0.w"][:, :1]
    safetensors.numpy.save_file(arrays, path)
    with pytest.raises(UserError, match=r"0\.w is float32\[64, 1\] there and float32\[64, 8\]"):
        import_members([str(path)], experiment(), tmp_path / "imported")
    assert not (tmp_path / "imported" / "checkpoints").exists()


@pytest.mark.parametrize("dtype", ["uint4", "int4", "uint2", "float8_e4m3", "float8_e4m3fn"])
def test_values_of_a_type_that_tensorstore_lacks_are_saved_too(tmp_path, dtype):
    values = np.arange(12).reshape(4, 3) % 4
    layout = Layout.make(4, devices=jax.devices()[:2])
    array = layout.put(jnp.asarray(values, dtype=getattr(ml_dtypes, dtype)), "members")
    state = {"member_id": layout.put(np.arange(4, dtype=np.int32), "members"), "w": array}
    with CheckpointStore(tmp_path) as store:
        store.save(1, state, {})
    assert Manifest.read(tmp_path / "checkpoints" / "1").leaves["w"].dtype == dtype
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    restored = CheckpointStore(tmp_path, read_only=True).restore_state(1, shapes)
    assert restored["w"].dtype == array.dtype
    np.testing.assert_array_equal(np.asarray(restored["w"]).astype(int), values)


def test_a_manifest_without_lineages_is_read(runs, tmp_path):
    select(runs / "four", [2], tmp_path / "run")
    path = tmp_path / "run" / "checkpoints" / str(STEPS) / MANIFEST
    manifest = Manifest.read(path.parent)
    values = json.loads(manifest.to_bytes().partition(b"\n")[0])
    values["members"] = [{"member_id": 2}]
    [lineage] = manifest.from_bytes(_with_hash(values)).members
    assert (lineage.member_id, lineage.seed, lineage.events) == (2, None, ())


def _with_hash(values):
    import hashlib

    line = json.dumps(values).encode()
    return line + b"\n" + json.dumps({"sha256": hashlib.sha256(line).hexdigest()}).encode() + b"\n"


def test_the_command_line_selects_lists_and_refuses(runs, tmp_path):
    selected = dist_ens(
        "members", str(runs / "four"), "select", "--members=0-1,3", f"--to={tmp_path / 'three'}"
    )
    assert selected.returncode == 0, selected.stderr
    assert f"Wrote 3 members (ids 0, 1, 3) at step {STEPS} to" in selected.stdout
    listed = dist_ens("members", str(tmp_path / "three"), "list")
    assert listed.returncode == 0, listed.stderr
    assert f"3 members at step {STEPS}" in listed.stdout
    refused = dist_ens(
        "members", str(runs / "four"), "select", "--members=9", f"--to={tmp_path / 'none'}"
    )
    assert refused.returncode == 2
    assert "there is no member 9. The run has the ids 0-3." in refused.stderr


def test_a_write_that_was_interrupted_is_done_again_by_the_same_command(
    runs, tmp_path, monkeypatch
):
    def full(*_, before, **__):
        before()
        raise OSError(28, "No space left on device")

    to = tmp_path / "two"
    with monkeypatch.context() as patch:
        patch.setattr("dist_ens.checkpoint.members.write_checkpoint", full)
        with pytest.raises(RunError, match="Remove the cause, and run the same command again"):
            select(runs / "four", [3, 1], to)
    (to / "checkpoints" / "6.dist_ens-0a-1.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    assert select(runs / "four", [3, 1], to).member_ids == [3, 1]
    names = sorted(path.name for path in to.iterdir())
    assert names == [".digests", "checkpoints", "experiment.json"]
    assert CheckpointStore(to, read_only=True).steps() == [STEPS]
    with pytest.raises(UserError, match="is not empty"):
        select(runs / "four", [3, 1], to)


def test_trained_members_are_kept_where_they_could_not_be_added(tmp_path):
    new = tmp_path / "to" / "new_members"
    new.mkdir(parents=True)
    (tmp_path / "to" / "checkpoints").mkdir()
    (tmp_path / "to" / "experiment.json").write_text("{}")
    require_folder(tmp_path / "to", may_hold=["new_members"])
    for path in (tmp_path / "to" / ".lock", tmp_path / "to" / "checkpoints" / "6"):
        path.mkdir()
        with pytest.raises(UserError, match="is not empty"):
            require_folder(tmp_path / "to", may_hold=["new_members"])
        path.rmdir()


def orbax_network(folder, **options):
    """Writes a network with Orbax, and returns its two arrays."""
    arrays = {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "b": np.zeros(2, np.float32)}
    with ocp.PyTreeCheckpointer(**options) as checkpointer:
        checkpointer.save(folder, {"params": {"dense/1": arrays}})
    return {"params": {"dense.1": arrays}}


@pytest.mark.parametrize("options", [{}, {"use_ocdbt": False}, {"use_zarr3": True}], ids=str)
def test_a_network_of_orbax_is_read_however_it_was_written(tmp_path, options):
    tree = orbax_network(tmp_path / "net", **options)
    params, _ = parts_from(read_network(tmp_path / "net"), (tree["params"], ()), tmp_path / "net")
    jax.tree.map(np.testing.assert_array_equal, params, tree["params"])


@pytest.mark.parametrize("length", [2**50, 2**20])
def test_a_network_that_declares_more_than_it_holds_is_refused_before_it_is_read(tmp_path, length):
    like = orbax_network(tmp_path / "net")["params"]
    database = ts.KvStore.open(database_spec(tmp_path / "net")).result()
    description = json.loads(database.read(b"params.dense/1.w/.zarray").result().value)
    description |= {"shape": [length, 2], "chunks": [3, 2]}
    database.write(b"params.dense/1.w/.zarray", json.dumps(description).encode()).result()
    told = "its arrays declare" if length > 2**20 else r"dense\.1\.w is float32\[1048576, 2\] there"
    with pytest.raises(UserError, match=told):
        parts_from(read_network(tmp_path / "net"), (like, ()), tmp_path / "net")


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
    write_network(tmp_path / "a.safetensors", named_leaves(state), Lineage(0), STEPS)
    read = parts_from(read_network(tmp_path / "a.safetensors"), parts, tmp_path)
    assert jax.tree.structure(read) == jax.tree.structure(parts)
    jax.tree.map(np.testing.assert_array_equal, read, parts)


def test_a_parameter_and_other_state_of_one_name_are_not_imported_as_one(tmp_path):
    like = ({"mean": np.zeros(2, np.float32)}, {"mean": np.zeros(2, np.float32)})
    with pytest.raises(UserError, match="Two arrays of the network have the name 'mean'"):
        parts_from({"mean": np.zeros(2, np.float32)}, like, tmp_path / "a.npz")


@pytest.mark.parametrize(
    ("ids", "others", "groups", "free"),
    [
        ([0, 1, 2, 3], [3, 7], 1, [4, 7]),
        ([0, 1, 2, 3], [4, 5], 1, [4, 5]),
        ([0, 1], [0, 2, 3], 1, [4, 2, 3]),
        # Members of two groups: 2 and 3 stay in the groups 0 and 1.
        ([0, 1, 2, 3], [2, 3], 2, [4, 5]),
        ([2, 3], [2, 3, 4, 5], 2, [6, 7, 4, 5]),
    ],
)
def test_only_the_ids_that_are_taken_change_when_runs_are_merged(ids, others, groups, free):
    record = {"num_groups": groups}
    first, second = (
        SavedMembers(STEPS, record, tuple(map(Lineage, each)), {}) for each in (ids, others)
    )
    assert _free_ids(first, second) == free


def test_networks_are_imported_with_the_given_ids_or_not_at_all(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.npz").touch()
    given = experiment(num_members=2, member_ids=(4, 5))
    with pytest.raises(UserError, match="member_ids has 2 ids for 3 networks to import"):
        import_members([str(tmp_path)], given, tmp_path / "imported")


def test_networks_are_imported_at_a_step_beyond_32_bits(tmp_path):
    shapes = {"0.w": (64, 8), "0.b": (8,), "1.w": (8, 10), "1.b": (10,)}
    np.savez(tmp_path / "a.npz", **{name: np.zeros(s, np.float32) for name, s in shapes.items()})
    step = 2**32 - 7
    import_members([str(tmp_path / "a.npz")], experiment(steps=step), tmp_path / "imported")
    members = read_members(tmp_path / "imported")
    assert members.step == step
    assert members.leaves["step"].tolist() == [-7]  # The state counts modulo 2^32.


def test_members_of_runs_with_other_policies_for_failures_are_joined():
    def members(*ids, **leaves):
        leaves = {"member_id": np.asarray(ids), **leaves}
        return SavedMembers(STEPS, {}, tuple(map(Lineage, ids)), leaves)

    checked = members(0, 1, **{"failures.is_frozen": np.array([False, True])})
    joined = checked.joined(members(2))
    assert joined.leaves["failures.is_frozen"].tolist() == [False, True, False]
    joined = members(2).joined(checked)
    assert joined.leaves["failures.is_frozen"].tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("dtype", "stored", "is_right"),
    [
        ("float8_e4m3", "uint8", True),
        ("float8_e4m3", "float8_e4m3", True),
        ("float8_e4m3fn", "uint8", True),
        ("float8_e4m3fn", "float8_e4m3", False),
        ("int8", "uint8", False),
        ("bfloat16", "uint8", False),
    ],
)
def test_values_of_one_byte_are_read_by_any_version_of_tensorstore(dtype, stored, is_right):
    leaf = LeafEntry(dtype, (1, 3), (5,))
    manifest = Manifest(1, {}, {}, (Lineage(0),), {"w": leaf}, {})
    array = types.SimpleNamespace(dtype=types.SimpleNamespace(name=stored), shape=(1, 3))
    if is_right:
        check_arrays({"w": array}, manifest)
    else:
        with pytest.raises(ValueError, match="the array of leaf w is not the one that was saved"):
            check_arrays({"w": array}, manifest)


def test_networks_of_several_exports_are_not_mixed_in_one_folder(tmp_path):
    path = tmp_path / "member_00.safetensors"
    write_network(path, {"params.w": np.zeros(2)}, Lineage(0, seed=5), STEPS)
    require_no_other_networks(tmp_path, {path: Lineage(0, seed=5)})
    for others in ({path: Lineage(0, seed=6)}, {path.with_name("member_01"): Lineage(0, seed=5)}):
        with pytest.raises(UserError, match="is a network that would be mixed with those"):
            require_no_other_networks(tmp_path, others)


def test_a_word_is_not_taken_for_the_value_of_a_flag():
    line = ["members", "--to", "nets", "--step", "3", "nets", "export"]
    with flagsaver.flagsaver():
        assert launch_members._CommandLine().prepare(line) == line[:5]
        assert launch_members._CommandLine().prepare([line[0], *line[5:], *line[1:5]]) == line[:5]


def test_members_are_added_without_the_callbacks_of_the_config_file(runs, tmp_path, monkeypatch):
    class StoppedError(Exception):
        pass

    def stop(*_, parts, **__):
        assert parts.callbacks == ()
        raise StoppedError

    own = OwnParts(callbacks=[print])
    monkeypatch.setattr("dist_ens.experiment.members.parts_of", lambda *_: own)
    monkeypatch.setattr("dist_ens.experiment.members.train", stop)
    with pytest.raises(StoppedError):
        extend(runs / "four", [4], tmp_path / "to")
