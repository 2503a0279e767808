"""How the messages of `dist_ens.experiment` are provoked."""

import dataclasses
import errno

import jax.numpy as jnp
import numpy as np
from dist_ens.config import Experiment, LossConfig, OwnParts
from dist_ens.config.failure_policy import FailurePolicy

from dist_ens.checkpoint import (
    Checkpoints,
    Lineage,
    SavedMembers,
    read_members,
    write_members,
)
from dist_ens.checkpoint.lineage import FAILED, Event
from dist_ens.data import Source, Spec, Standardization
from dist_ens.experiment import (
    assess,
    build,
    checks,
    loaded,
    members,
    network_files,
    networks,
    objectives,
    part_checks,
    replay,
    train,
    workdir,
)
from dist_ens.experiment.config_file import ConfigFile, ExperimentFile
from dist_ens.experiment.record import Run
from dist_ens.layout import Layout
from dist_ens.losses import squared_error
from dist_ens.members import as_member
from dist_ens.metrics import Metric
from dist_ens.state import State
from provocations._parts import (
    CLASSES,
    FEATURES,
    apply,
    batch,
    ensemble,
    examples,
    network,
    raises,
    source,
)

_SPEC = Spec((FEATURES,), "float32", (), CLASSES)
_TEXT = Spec((8,), "int32", (8,), 5)
_STANDARD = Standardization(((0.0,) * 4,), ((1.0,) * 4,), (0.0,), (1.0,))
_TABLE = Spec((FEATURES,), "float32", (), None, standardization=_STANDARD)
_GROUPS = Spec((FEATURES,), "float32", (), CLASSES, num_groups=2)


def _loss(params, model_state, batch, key):
    return jnp.square(apply(params, batch["inputs"])).mean(), (model_state, {})


def _full_init(key, inputs):
    return {"w": jnp.zeros((FEATURES, CLASSES))}, {"mean": jnp.zeros(CLASSES)}


def _experiment(*, data=None, **fields):
    """An experiment of two linear networks on few examples."""
    small = {"num_members": 2, "steps": 1, "model": {"name": "mlp", "hidden_sizes": ()}}
    return Experiment.from_dict(small | {"data": {"global_batch_size": 8} | (data or {})} | fields)


def _run(spec=_SPEC, *, parts=None, member_file=None, network=None, **fields):
    return Run(_experiment(**fields), spec, 8, member_file, network=network, parts=parts)


def _built(parts=None, *, given=None, **fields):
    build.build(_experiment(**fields), parts=parts or OwnParts(), source=given or source())


def _with_network(apply, init=None):
    """Builds a run with a network that does something else in training."""
    member = as_member(init=init or _full_init, apply=apply)
    _built(OwnParts(member=member))


def a_level_in_percent():
    assess.EvaluationRequest(level=90)


class _Pooled:
    """Stands for an evaluator that pools in some way."""

    def __init__(self, pooling="probs"):
        self.distribution = self
        self.pooling = pooling


def _out_of_bag(run, pooling="probs", model_state=()):
    state = State(None, None, None, None, model_state, None)
    assess.out_of_bag_of(run, _Pooled(pooling), state)


def out_of_bag_predictions_of_shared_examples():
    _out_of_bag(_run())


def out_of_bag_predictions_of_batch_statistics():
    _out_of_bag(_run(data={"examples": "bootstrap"}), model_state=jnp.zeros(2))


def out_of_bag_predictions_of_votes():
    _out_of_bag(_run(data={"examples": "bootstrap"}), pooling="vote")


def out_of_bag_predictions_of_groups():
    _out_of_bag(_run(_GROUPS, data={"examples": "bootstrap"}))


def other_examples_for_a_text():
    assess._other_kind(_run(_TEXT), "text:a.txt")


def other_examples_for_groups():
    assess._other_kind(_run(_GROUPS), "npz:a.npz")


def a_loss_function_without_a_network():
    _built(OwnParts(loss=_loss))


def a_score_of_a_loss_function():
    build.evaluator_of_run(_run(), ensemble(_loss))


def a_metric_of_a_loss_function():
    _built(OwnParts(loss=_loss, member=network(), metrics=[Metric("margin")]))


def _negative(params, inputs):
    return -apply(params, inputs)


def other_parts_than_those_of_the_run():
    made = ensemble(num_members=2)
    run = build.identified(_run(), made, OwnParts(member=made.member), source(), batch())
    other = ensemble(member=network(_negative))
    build.check_network(run, other, OwnParts(member=other.member), batch())


def a_mean_of_a_table():
    build.build_ensemble(_run(_TABLE, loss={"name": "mse"}, data={"mean": (1.0,)}), Layout.make(2))


def a_share_of_a_source_that_was_given():
    _built(data={"validation": 0.25})


def means_of_other_features():
    _built(data={"mean": (0.0, 1.0)})


def mixup_of_a_text():
    build.methods_of(_run(_TEXT, loss={"mixup": 0.2}), None)


def an_objective_that_standardises():
    build.objective_of(_run(_TABLE), OwnParts(objective=squared_error(standardize=True)))


def data_that_has_changed():
    run = dataclasses.replace(_run(), examples=source().fingerprint)
    inputs, labels = examples()
    checks.require_trained_on(
        run, dataclasses.replace(source(), train=type(source().train)(inputs + 1, labels))
    )


def data_with_other_examples():
    checks.require_trained_on(_run(), source(12))


def a_network_that_raises_in_training():
    def apply(params, model_state, inputs, key, train):
        return (raises() if train else inputs @ params["w"]), model_state

    _with_network(apply)


def a_network_with_other_outputs_in_training():
    def apply(params, model_state, inputs, key, train):
        outputs = inputs @ params["w"]
        return (outputs[:, :2] if train else outputs), model_state

    _with_network(apply)


def a_network_with_another_model_state_in_training():
    def apply(params, model_state, inputs, key, train):
        state = {"mean": jnp.zeros(2)} if train else model_state
        return inputs @ params["w"], state

    _with_network(apply)


def a_state_larger_than_the_memory(monkeypatch):
    monkeypatch.setattr(Layout, "free_bytes", lambda self: 2**20)
    wide = as_member(
        init=lambda key: {"w": jnp.zeros((FEATURES, CLASSES)), "more": jnp.zeros(2**20)},
        apply=lambda params, inputs: inputs @ params["w"],
    )
    checks.check_room(ensemble(member=wide, num_members=2), batch())


def dropout_samples_of_a_network_without_dropout():
    _built(evaluation={"dropout_samples": 8})


def a_mean_of_a_loss_function():
    _built(OwnParts(loss=_loss, member=network()), data={"mean": (1.0,)})


def _config(folder, content):
    (folder / "config.py").write_text(content)
    return ConfigFile(str(folder / "config.py"))


def a_config_that_is_absent(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ConfigFile("configs/digit.py")


def an_experiment_file_that_is_not_there():
    ExperimentFile("runs/digit/experiment.json")


def an_experiment_file_that_holds_a_list(tmp_path):
    (tmp_path / "experiment.json").write_text("[1]")
    ExperimentFile(str(tmp_path / "experiment.json"))


def an_experiment_that_cannot_be_stored(tmp_path):
    stored = train._StoredExperiment(_experiment(), tmp_path / "missing")
    stored.begin(None)


def a_config_that_returns_a_dict(tmp_path):
    _config(tmp_path, "def get_config():\n    return {}\n").experiment()


def a_config_whose_network_is_none(tmp_path):
    _config(tmp_path, "def make_member(spec):\n    return 3\n").make_member(_SPEC)


def a_config_with_two_losses(tmp_path):
    _config(tmp_path, "make_objective = make_loss = print\n")


def a_config_with_a_function_misspelt(tmp_path):
    _config(tmp_path, "def make_optimiser(spec): ...\n")


def a_config_without_get_config(tmp_path):
    _config(tmp_path, "config = 3\n").experiment()


def a_config_that_raises(tmp_path):
    _config(tmp_path, "\nraise ValueError('no such data set')\n")


def _trained(folder, record):
    """Writes the checkpoint of a run with a record. Its state is not read."""
    with Checkpoints(folder).open(record) as opened:
        opened.save(1, {"w": jnp.zeros(2)})
    return folder


def _record():
    return loaded.record_of(ensemble(), batch()).to_dict()


def a_run_with_another_ensemble(tmp_path):
    loaded.load(_trained(tmp_path, _record()), ensemble=ensemble(seed=1))


def a_run_of_python_without_its_ensemble(tmp_path):
    loaded.load(_trained(tmp_path, _record()))


def a_run_of_a_config_with_an_ensemble(tmp_path):
    loaded.load(_trained(tmp_path, {"experiment": {}}), ensemble=ensemble())


def a_folder_without_a_checkpoint(tmp_path):
    loaded.load(tmp_path)


def a_source_that_standardises_otherwise():
    other = dataclasses.replace(_STANDARD, target_mean=(5.0,))
    spec = dataclasses.replace(_TABLE, standardization=other)
    loaded._examples(_TABLE, Source(spec, source().train, source().test))


def a_prediction_of_groups():
    two = Standardization(*(2 * each for each in dataclasses.astuple(_STANDARD)))
    spec = dataclasses.replace(_TABLE, num_groups=2, standardization=two)
    loaded.LoadedRun(None, None, 1, _run(spec)).predict(examples()[0])


def a_score_of_a_run_of_python_without_data():
    loaded.LoadedRun(None, None, 1).evaluate()


def a_loss_of_classes_for_a_table():
    objectives.make_objective(LossConfig(name="softmax_cross_entropy"), None)


def a_loss_of_targets_for_classes():
    objectives.make_objective(LossConfig(name="mse"), CLASSES)


def a_part_that_is_none():
    part_checks.check_part("make_objective", None, "configs/digits.py")


def a_part_with_other_parameters():
    def loss(params, batch):
        return 0.0

    part_checks.check_part("make_loss", loss, "configs/digits.py")


def a_record_that_is_damaged():
    Run.from_dict({"spec": {}})


def a_bootstrap_of_one_example():
    run = dataclasses.replace(_run(data={"examples": "bootstrap"}), num_train_examples=1)
    assert run.order


def a_folder_with_another_run():
    _run().check_resumes(_run(seed=1, num_members=4), "runs/digits")


def a_dict_in_place_of_an_experiment(tmp_path):
    train.train({"steps": 1}, tmp_path)


def _parts_of(run, given=None):
    workdir.parts_of(run, "runs/digits", None if given is None else lambda spec: given)


def parts_of_a_run_without_parts():
    run = dataclasses.replace(_run(), examples={})
    _parts_of(run, OwnParts(member=network()))


def a_run_of_python_without_its_parts():
    _parts_of(_run(network="Net"))


def a_run_without_its_config_file():
    _parts_of(_run(network="Net", member_file="configs/digits.py"))


def a_workdir_without_a_checkpoint(tmp_path):
    workdir.open_finished(tmp_path)


def a_run_loaded_without_its_config_file(tmp_path):
    record = _run(network="Net", member_file="configs/digits.py").to_dict()
    loaded.load(_trained(tmp_path, record))


def _saved_members(folder, *ids, step=6, python=False, **fields):
    """Saves members without a network, and returns the folder of their run."""
    record = _record() if python else _run(**fields).with_members(ids).to_dict()
    leaves = {"member_id": np.asarray(ids, np.int32), "params.w": np.zeros((len(ids), 3))}
    lineages = tuple(Lineage(member_id, 0, run="runs/a") for member_id in ids)
    write_members(folder, SavedMembers(step, record, lineages, leaves))
    return folder


def a_member_to_replay_that_was_rolled_back():
    lineage = Lineage(3, events=(Event(50, f"{FAILED}the loss is not finite"),))
    replay._require_no_rollback(lineage, FailurePolicy(policy="rollback"))


def a_member_to_replay_whose_training_ends_early():
    made = ensemble(num_members=1)
    trained = made.init(batch())
    replay._at_same_step(trained._replace(step=trained.step + 8), trained, 3)


def a_member_to_replay_that_was_imported(tmp_path):
    folder = _saved_members(tmp_path, 0)
    saved = read_members(folder)
    imported = dataclasses.replace(saved, lineages=(Lineage(0, None, run="nets/a.npz"),))
    write_members(folder / "imported", imported)
    replay.replay(folder / "imported", 0)


def out_of_bag_examples_of_a_merged_run():
    members = (Lineage(0, 0, run="runs/a"), Lineage(1, 5, 0, run="runs/b"))
    workdir.Finished(_run(), None, None, 6, OwnParts(), members).require_own_members()


def members_to_drop_that_are_not_there(tmp_path):
    members.drop(_saved_members(tmp_path / "run", 0, 1), [2], tmp_path / "new")


def all_members_to_drop(tmp_path):
    members.drop(_saved_members(tmp_path / "run", 0, 1), [0, 1], tmp_path / "new")


def one_run_to_merge(tmp_path):
    members.merge([tmp_path], tmp_path / "new")


def _merge(tmp_path, **other):
    runs = [
        _saved_members(tmp_path / "one", 0, 1),
        _saved_members(tmp_path / "two", *other.pop("ids", (0, 1)), **other),
    ]
    members.merge(runs, tmp_path / "new")


def runs_of_two_steps_to_merge(tmp_path):
    _merge(tmp_path, step=7)


def other_runs_to_merge(tmp_path):
    _merge(tmp_path, epochs=2.0, steps=None, model={"name": "mlp", "hidden_sizes": (3,)})


def a_run_of_python_to_merge(tmp_path):
    _merge(tmp_path, python=True)


def one_member_in_both_runs(tmp_path):
    _merge(tmp_path, ids=(1, 2))


def no_free_id_for_a_member_to_merge():
    first, second = (
        SavedMembers(6, {"member": "Net"}, tuple(map(Lineage, ids)), {})
        for ids in ((0, 2**31 - 1), (0, 1))
    )
    members._free_ids(first, second)


def members_that_the_run_has_already(tmp_path):
    members.extend(_saved_members(tmp_path / "run", 0, 1), [1, 2], tmp_path / "new")


def a_type_that_safetensors_lacks(tmp_path, monkeypatch):
    def refused(*_):
        raise TypeError("dtype uint4 is not covered.")

    monkeypatch.setattr(network_files.safetensors.numpy, "save", refused)
    network_files.write_network(tmp_path / "a.safetensors", {}, Lineage(3), 6)


def _full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def a_network_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(network_files, "replaced_file", _full)
    network_files.write_network(tmp_path / "a.safetensors", {}, Lineage(3), 6)


def a_folder_of_networks_that_cannot_be_made(tmp_path):
    (tmp_path / "nets").write_text("")
    networks.export_members(_saved_members(tmp_path / "run", 0), tmp_path / "nets" / "new")


def no_networks_to_import():
    network_files.network_paths([])


def networks_that_are_not_there():
    network_files.network_paths(["nets/*.npz"])


def a_network_that_is_no_file_of_arrays(tmp_path, monkeypatch):
    def refused(path):
        raise ValueError("header too large")

    monkeypatch.setattr(network_files.safetensors.numpy, "load_file", refused)
    network_files.read_network(tmp_path / "a.safetensors")


def a_network_with_one_name_for_two_arrays(tmp_path):
    leaves = {"params.mean": np.zeros(2), "model_state.mean": np.ones(2)}
    network_files.write_network(tmp_path / "a.safetensors", leaves, Lineage(3), 6)


def a_network_of_another_shape(tmp_path):
    like = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(2, np.float32)}
    arrays = {"w": np.zeros((3, 3), np.float32), "c": np.zeros(2, np.float32)}
    network_files.parts_from(arrays, (like, ()), tmp_path / "a.npz")


def networks_for_another_number_of_ids(tmp_path):
    (tmp_path / "a.npz").touch()
    experiment = dataclasses.replace(_run().experiment, num_members=2, member_ids=(4, 5))
    networks.import_members([str(tmp_path / "a.npz")], experiment, tmp_path / "imported")


def networks_of_another_export(tmp_path):
    (tmp_path / "member_07.safetensors").touch()
    network_files.require_no_other_networks(tmp_path, {})
