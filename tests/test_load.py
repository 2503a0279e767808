"""A run that is loaded: with which parts and data, and in which units it is scored."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
from commands import dist_ens
from dist_ens.data import Spec, Standardization
from dist_ens.experiment import DataConfig, Experiment, LoadedRun, open_source
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.config_file import ConfigFile
from dist_ens.experiment.record import Run
from dist_ens.experiment.train import train
from dist_ens.ground.errors import UserError
from dist_ens.layout import Layout
from dist_ens.metrics import Metric
from test_own_arrays import experiment

OWN = """
import numpy as np
from ml_collections import ConfigDict
from dist_ens.data import source_of_arrays

def get_config():
    return ConfigDict(dict(
        num_members=3, steps=8, steps_per_call=8, execution="vmap", data=dict(global_batch_size=8),
        model=dict(name="mlp", hidden_sizes=(4,)),
        optimizer=dict(learning_rate=0.1),
        evaluation=dict(pooling="vote", global_batch_size=16),
    ))

def make_source(data_config):
    x = np.random.default_rng(0).normal(size=(48, 4)).astype(np.float32)
    y = np.arange(48) % 3
    return source_of_arrays((x[:32], y[:32]), (x[32:], y[32:]), num_classes=3)
"""


def write_table(path, x, target, train, test):
    """Writes a table of the UCI format, whose splits are rows of it."""
    columns = {"index_features": np.arange(x.shape[1]), "index_target": x.shape[1]}
    rows = {"train_idx": train[None], "test_idx": test[None]}
    np.savez(path, data=np.column_stack([x, target]), **columns, **rows)


@pytest.fixture(scope="module")
def of_table(tmp_path_factory):
    """The folder of a run on a table, and the inputs, targets and test rows of the table."""
    folder, random = tmp_path_factory.mktemp("table"), np.random.default_rng(1)
    x = random.normal(5, 3, size=(96, 2))
    target = 1000 + 50 * x[:, 0] + 10 * random.normal(size=96)  # far from 0
    train_rows, test_rows = np.split(random.permutation(96), [64])
    write_table(folder / "table.npz", x, target, train_rows, test_rows)
    train(experiment(f"uci:{folder / 'table.npz'}", "gaussian"), folder / "run")
    return folder / "run", x, target, test_rows


@pytest.fixture(scope="module")
def of_own_data(tmp_path_factory):
    """The folder of a run whose config file makes its data, and that file."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own.py").write_text(OWN)
    file = ConfigFile(str(folder / "own.py"))
    asked = file.experiment()
    train(asked, folder / "run", source=file.source(asked.data))
    return folder / "run", file


def test_arrays_of_a_table_are_scored_as_its_test_split_is(of_table):
    folder, inputs, targets, rows = of_table
    run = de.load(folder)
    expected = run.evaluate()
    prediction = run.predict(inputs[rows])
    rmse = np.sqrt(np.square(targets[rows] - np.asarray(prediction.mean)).mean())
    assert expected.ensemble["rmse"] == pytest.approx(rmse, rel=1e-4)
    data = {"inputs": inputs[rows], "labels": targets[rows]}
    batches = [{name: leaf[at] for name, leaf in data.items()} for at in (slice(20), slice(20, 32))]
    source = open_source(run.run.experiment.data)
    for given in (data, batches, source, source.test):
        scores = run.evaluate(given)
        for name, value in expected.ensemble.items():
            assert scores.ensemble[name] == pytest.approx(value, rel=1e-4), name


def test_an_option_changes_nothing_but_what_it_says(of_table):
    folder, *_ = of_table
    run = de.load(folder)
    expected = run.evaluate()
    plain = run.evaluate(intervals=False, batch_size=8)
    assert plain.intervals is None
    assert plain.ensemble == pytest.approx(expected.ensemble, rel=1e-5)
    # The mean of standardised labels is near 0.
    metric = Metric("label", lambda prediction, labels: labels)
    more = run.evaluate(metrics=[metric], intervals=False).ensemble
    assert abs(more.pop("label")) < 1
    assert more == pytest.approx(expected.ensemble, rel=1e-5)


def test_every_group_scores_arrays_in_their_own_units():
    of_inputs = ((5.0, 5.0), (4.0, 6.0)), ((3.0, 3.0), (2.0, 4.0))
    given = Standardization(*of_inputs, (9.0, 1.0), (2.0, 4.0))
    spec = Spec((2,), "float32", (), None, num_groups=2, standardization=given)
    values = {"steps": 1, "num_members": 2, "execution": "vmap", "data": {"examples": "splits"}}
    values |= {"loss": {"name": "squared_error"}, "model": {"name": "mlp", "hidden_sizes": ()}}
    run = Run(Experiment.from_dict(values), spec, 8)
    ensemble = build_ensemble(run, Layout.make(2, devices=jax.devices()[:1]))
    state = ensemble.init(run.batch(8))
    inputs, targets = np.array([[1.0, 2.0], [3.0, 5.0], [8.0, 1.0]]), np.array([7.0, 3.0, 5.0])
    data = {"inputs": inputs, "labels": targets}
    scores = LoadedRun(run, ensemble, state, 0, spec=spec).evaluate(data, intervals=False)
    members = de.unstack_members(state.params)
    for group, (member, scored) in enumerate(zip(members, scores.groups, strict=True)):
        standard = (inputs - given.input_mean[group]) / given.input_std[group]
        output = ensemble.member.apply(member, (), standard.astype("f"), None, False)[0][:, 0]
        mean = output * given.target_std[group] + given.target_mean[group]
        rmse = np.sqrt(np.square(targets - mean).mean())
        assert scored["rmse"] == pytest.approx(rmse, rel=1e-4)


def test_data_that_a_config_file_makes_is_what_its_run_is_scored_on(of_own_data):
    folder, file = of_own_data
    test = file.source(DataConfig()).test
    run = de.load(folder, config=file.path)
    scores = run.evaluate()
    probs = np.asarray(run.predict(test.inputs).mean)
    brier = np.square(probs - np.eye(3)[test.labels]).sum(-1).mean()
    assert scores.ensemble["brier"] == pytest.approx(brier, rel=1e-5)
    message = "^The data from digits is not what the run was trained on: .*make_source of a config"
    with pytest.raises(UserError, match=message):
        de.load(folder).evaluate()


def test_a_loaded_run_predicts_with_the_pooling_of_its_config(of_own_data):
    folder, file = of_own_data
    prediction = de.load(folder).predict(file.source(DataConfig()).test.inputs)
    votes = 3 * np.asarray(prediction.mean)  # of three members
    np.testing.assert_allclose(votes, votes.round(), atol=1e-5)
    assert np.abs(np.asarray(prediction.members) - prediction.mean[None]).max() > 0.1


def test_a_step_that_was_never_saved_is_told_with_those_that_were(of_own_data, in_python):
    message = "^There is no checkpoint of step 7 in .*: the saved steps are 8. Give one"
    for folder, parts in ((of_own_data[0], {}), (in_python[0], {"ensemble": in_python[1]})):
        with pytest.raises(UserError, match=message):
            de.load(folder, step=7, **parts)
        assert de.load(folder, step=8, **parts).step == 8


def network(activation):
    return (
        lambda key: {"w": np.linspace(-1, 1, 6, dtype=np.float32).reshape(3, 2)},
        lambda params, inputs: activation(inputs @ params["w"]),
    )


def ensemble_in_python(activation, **options):
    options = {"num_members": 2, "execution": "vmap"} | options
    return de.Ensemble(network(activation), optax.sgd(0.1), de.losses.categorical(2), **options)


@pytest.fixture(scope="module")
def in_python(tmp_path_factory):
    """The folder of a run that was made in Python, and its ensemble."""
    folder, ensemble = tmp_path_factory.mktemp("python"), ensemble_in_python(jnp.tanh)
    data = {"inputs": np.ones((8, 3), np.float32), "labels": np.arange(8) % 2}
    options = {"steps": 8, "batch_size": 8, "steps_per_call": 8, "progress": False}
    de.fit(ensemble, data, checkpoints=de.Checkpoints(folder), **options)
    return folder, ensemble


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"activation": jax.nn.relu}, "a method or a hyperparameter was changed"),
        ({"num_members": 4}, "num_members is 2 there and 4 here"),
        ({"seed": 1}, "the seed is 0 there and 1 here"),
    ],
)
def test_another_ensemble_than_the_runs_is_not_loaded(in_python, options, told):
    folder, _ = in_python
    other = ensemble_in_python(**{"activation": jnp.tanh} | options)
    with pytest.raises(UserError, match=f"^The ensemble is not that of the run in .*: .*{told}"):
        de.load(folder, ensemble=other)


# The commands


WITH_LOSS = (
    OWN.replace('evaluation=dict(pooling="vote", global_batch_size=16),', "")
    + """
import flax.linen as nn
import jax.numpy as jnp

def make_member(spec):
    return nn.Dense(1)

def make_loss(spec):
    def loss(params, model_state, batch, key):
        outputs = nn.Dense(1).apply({"params": params}, batch["inputs"])[:, 0]
        return jnp.square(outputs - batch["labels"]).mean(), (model_state, {})
    return loss
"""
)
WITH_STEP = (
    OWN.replace('model=dict(name="mlp", hidden_sizes=(4,)),', "")
    .replace("optimizer=dict(learning_rate=0.1),", "")
    .replace('pooling="vote", ', "")
    + """
import jax
import optax

def make_step(spec):
    def init(key, batch):
        return {"w": jax.random.normal(key, (4, spec.num_classes)), "key": key}

    def apply(state, inputs):
        return inputs @ state["w"]

    def step(state, batch, key):
        def loss_of(w):
            losses = optax.softmax_cross_entropy_with_integer_labels
            return losses(batch["inputs"] @ w, batch["labels"]).mean()

        loss, grad = jax.value_and_grad(loss_of)(state["w"])
        return state | {"w": state["w"] - 0.1 * grad}, {"loss": loss}

    return {"init": init, "step": step, "apply": apply}
"""
)


def printed_by(*arguments):
    ended = dist_ens(*map(str, arguments))
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def trained_by_command(folder, text):
    """Trains a config file with the command, and returns the flags and the path of the file."""
    file = folder / "own.py"
    file.write_text(text)
    flags = f"--config={file}", f"--workdir={folder / 'run'}"
    printed_by("train", *flags)
    return flags, file


@pytest.mark.parametrize(
    ("text", "metric"),
    [(WITH_LOSS, "loss"), pytest.param(WITH_STEP, "nll", marks=pytest.mark.long)],
)
def test_a_run_with_a_part_of_its_own_is_planned_and_scored_by_its_commands(tmp_path, text, metric):
    flags, file = trained_by_command(tmp_path, text)
    assert "The best mesh for 3 members" in printed_by("plan", flags[0])
    assert metric in printed_by("evaluate", *flags, f"--json={tmp_path / 'scores.json'}")
    members = json.loads((tmp_path / "scores.json").read_text())["members"]
    of_members = de.load(tmp_path / "run", config=file).evaluate().members
    assert [m[metric] for m in of_members] == pytest.approx([m[metric] for m in members])
    if text == WITH_LOSS:
        with pytest.raises(UserError, match=r"in Python load\('.*run', config='.*own\.py'\)\.$"):
            de.load(tmp_path / "run")
        ended = dist_ens("evaluate", *flags, "--shift")
        assert ended.returncode == 2
        assert "--shift asks for predictions, and the loss of this run is a func" in ended.stderr
        return
    more = tmp_path / "more"
    printed_by("members", tmp_path / "run", "extend", "--ids=3", f"--to={more}", flags[0])
    assert de.load(more, config=file).state.member_id.tolist() == [0, 1, 2, 3]
    printed_by("replay", more, "--member=3", flags[0])


def test_out_of_bag_predictions_are_of_the_data_that_the_config_file_makes(tmp_path):
    text = OWN.replace("global_batch_size=8", "global_batch_size=8, examples='bootstrap'")
    flags, _ = trained_by_command(tmp_path, text.replace("vote", "probs"))
    printed_by("predict", *flags, "--out_of_bag", f"--output={tmp_path / 'p.npz'}")
    assert np.load(tmp_path / "p.npz")["probs"].shape == (32, 3)
