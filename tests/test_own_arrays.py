"""Arrays of one's own: real targets and names of classes, from files and in Python."""

import functools
import json

import flax.linen as nn
import numpy as np
import optax
import pytest

import dist_ens as de
from commands import dist_ens
from dist_ens.data import source_of_arrays
from dist_ens.experiment import DataConfig, Experiment, describe_source, open_source
from dist_ens.experiment.train import train
from dist_ens.ground.errors import UserError

EXAMPLES = 60
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(5, 3, size=(EXAMPLES, 2))
# Targets in a unit of their own, far from 0.
TARGETS = 1000 + 50 * X[:, 0] + RANDOM.normal(size=EXAMPLES)
CLASSES = np.where(X[:, 0] > 5, 1, 0) + np.where(X[:, 1] > 6, 1, 0)
NAMES = np.array(["dog", "cat", "ant"])[CLASSES]
# In the order of the sorted names: ant, cat, dog.
NUMBERS = np.array([2, 1, 0])[CLASSES]


def saved(folder, **arrays):
    np.savez(folder / "d.npz", **arrays)
    return DataConfig(source=f"npz:{folder / 'd.npz'}", global_batch_size=16)


def experiment(source, loss):
    values = {"num_members": 2, "steps": 8, "steps_per_call": 8, "execution": "vmap"}
    values["data"] = {"source": source, "global_batch_size": 16}
    values |= {"loss": {"name": loss}, "model": {"name": "mlp", "hidden_sizes": (4,)}}
    return Experiment.from_dict(values | {"optimizer": {"learning_rate": 0.1}})


# Real targets


@pytest.mark.parametrize(
    ("loss", "shape"),
    [
        ("gaussian", (EXAMPLES,)),
        pytest.param("squared_error", (EXAMPLES, 1), marks=pytest.mark.long),
        pytest.param("beta_gaussian", (EXAMPLES, 1), marks=pytest.mark.long),
        pytest.param("quantiles", (EXAMPLES,), marks=pytest.mark.long),
    ],
)
def test_real_targets_of_a_file_are_trained_on_and_scored_in_their_own_unit(tmp_path, loss, shape):
    y = TARGETS.reshape(shape)
    config = saved(tmp_path, x_train=X[:40], y_train=y[:40], x_test=X[40:], y_test=y[40:])
    train(experiment(config.source, loss), tmp_path / "run")
    run = de.load(tmp_path / "run")
    given, (low, high) = run.run.spec.standardization, (TARGETS[:40].min(), TARGETS[:40].max())
    assert given.target_mean == pytest.approx((TARGETS[:40].mean(),))
    assert given.input_std[0] == pytest.approx(tuple(X[:40].std(axis=0)))
    # The prediction of inputs in their own unit, and its error by hand.
    mean = np.asarray(run.predict(X[40:]).mean, np.float64)
    assert low < mean.mean() < high
    rmse = np.sqrt(np.square(TARGETS[40:] - mean).mean())
    for scores in (run.evaluate(), run.evaluate({"inputs": X[40:], "labels": TARGETS[40:, None]})):
        assert scores.ensemble["rmse"] == pytest.approx(rmse, rel=1e-4)


def test_a_file_of_x_and_y_is_divided_in_the_same_way_each_time(tmp_path):
    config = saved(tmp_path, x=X, y=TARGETS)
    first, second = open_source(config), open_source(config)
    assert describe_source(config) == (first.spec, 48)  # A fifth of 60 are test examples.
    assert first.fingerprint == second.fingerprint
    given, labels = first.spec.standardization, [first.train.labels, first.test.labels]
    in_own_unit = np.concatenate(labels) * given.target_std[0] + given.target_mean[0]
    np.testing.assert_allclose(np.sort(in_own_unit), np.sort(TARGETS), rtol=1e-5)
    # Of classes a fifth of each is held out: every fifth of 5, 10 and 45 examples.
    labels = np.repeat([0, 1, 2], [5, 10, 45])[RANDOM.permutation(EXAMPLES)]
    of_classes = open_source(saved(tmp_path, x=X, y=labels))
    assert np.bincount(of_classes.test.labels).tolist() == [1, 2, 9]
    assert np.bincount(of_classes.train.labels).tolist() == [4, 8, 36]


def test_pictures_with_real_targets_keep_their_values(tmp_path):
    pictures = RANDOM.normal(size=(EXAMPLES, 3, 3)).astype(np.float32)
    config = saved(tmp_path, x=pictures, y=TARGETS)
    source = open_source(config)
    assert (source.spec.input_shape, source.spec.standardization.has_inputs) == ((3, 3), False)
    together = np.concatenate([source.train.inputs, source.test.inputs])
    np.testing.assert_array_equal(np.sort(together.ravel()), np.sort(pictures.ravel()))
    train(experiment(config.source, "gaussian"), tmp_path / "run")
    assert (np.abs(np.asarray(de.load(tmp_path / "run").predict(pictures).mean) - 1250) < 500).all()


# Names of classes


def test_names_of_classes_in_a_file_are_kept_and_shown(tmp_path):
    config = saved(tmp_path, x=X, y=NAMES)
    (tmp_path / "c.py").write_text(
        "from ml_collections import ConfigDict\n"
        "def get_config():\n"
        f"    return ConfigDict({experiment(config.source, 'categorical').to_dict()!r})\n"
    )
    np.save(tmp_path / "x.npy", X[:4])
    ended = dist_ens("train", f"--config={tmp_path / 'c.py'}", f"--workdir={tmp_path / 'run'}")
    assert ended.returncode == 0, ended.stderr
    assert "class ant" in ended.stdout
    files = [f"--input={tmp_path / 'x.npy'}", f"--output={tmp_path / 'p.npz'}"]
    assert dist_ens("predict", f"--workdir={tmp_path / 'run'}", *files).returncode == 0
    assert np.load(tmp_path / "p.npz")["class_names"].tolist() == ["ant", "cat", "dog"]
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["class_names"] == ["ant", "cat", "dog"]
    report = (tmp_path / "run/report.html").read_text()
    assert ">ant</td>" in report.partition('<section id="classes">')[2]
    assert ">dog</td>" in report.partition('<section id="most_uncertain">')[2]
    run = de.load(tmp_path / "run")
    assert run.predict(X[:4]).class_names == ("ant", "cat", "dog")
    by_names, by_numbers = (run.evaluate({"inputs": X, "labels": y}) for y in (NAMES, NUMBERS))
    assert by_names.ensemble == by_numbers.ensemble
    assert [row["examples"] for row in by_names.by_class] == np.bincount(NUMBERS).tolist()


@functools.cache  # Its programs are compiled once.
def classifier():
    network, loss = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)]), de.losses.categorical(3)
    return de.Ensemble(network, optax.adam(0.1), loss, num_members=2, execution="vmap")


def fit(labels, x=X, **options):
    data = {"inputs": x, "labels": labels}
    return de.fit(classifier(), data, steps=8, progress=False, **options)


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """A result of names, and the folder of its run."""
    folder = tmp_path_factory.mktemp("named")
    return fit(NAMES.astype(object), validation=0.2, checkpoints=de.Checkpoints(folder)), folder


def test_names_are_classes_in_the_order_of_the_sorted_names(named):
    result, folder = named
    numbers = fit(NUMBERS, validation=0.2)
    weights = [np.asarray(each.state.params["layers_0"]["kernel"]) for each in (result, numbers)]
    np.testing.assert_array_equal(*weights)
    assert result.scores.ensemble == numbers.scores.ensemble
    run = de.load(folder, ensemble=classifier())
    for state in (result.state, run.state, result.state.select([1])):
        of_names = de.evaluate(classifier(), state, {"inputs": X, "labels": NAMES[:, None]})
        of_numbers = de.evaluate(classifier(), state, {"inputs": X, "labels": NUMBERS})
        assert of_names.ensemble == of_numbers.ensemble
        assert classifier().predict(state, X[:1]).class_names == ("ant", "cat", "dog")
    # The scores of a class are those of its examples.
    for row, name in zip(of_names.by_class, ("ant", "cat", "dog"), strict=True):
        of_class = {"inputs": X[name == NAMES], "labels": NAMES[name == NAMES]}
        alone = de.evaluate(classifier(), state, of_class).ensemble
        assert (row["class"], row["examples"]) == (name, (name == NAMES).sum())
        assert row["nll"] == pytest.approx(alone["nll"], rel=1e-5)
        assert row["accuracy"] == pytest.approx(alone["accuracy"])
    # Training goes on with the same numbers, though these rows have fewer names.
    rows = NAMES != "ant"
    further = fit(NAMES[rows], X[rows], state=result.state)
    assert further.state.class_names == ("ant", "cat", "dog")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (np.where(NAMES == "ant", "cat", NAMES), "2 names of classes, 'cat', 'dog', and"),
        (np.where(np.arange(EXAMPLES) == 3, "eel", NAMES), "'ant', 'cat', 'dog', 'eel'"),
    ],
)
def test_as_many_names_as_the_objective_has_classes_are_taken(names, told):
    with pytest.raises(UserError, match=told):
        fit(names)
    with pytest.raises(UserError, match=told):
        de.fit(classifier(), source_of_arrays((X, names), (X, names)), steps=8, progress=False)


def test_names_that_training_did_not_see_are_refused(named):
    result, folder = named
    others = np.where(NAMES == "cat", "cats", NAMES)
    told = r"has the class 'cats', which training did not see .* Did you mean 'cat'\?"
    for use in (
        lambda: de.evaluate(classifier(), result.state, {"inputs": X, "labels": others}),
        lambda: de.load(folder, ensemble=classifier()).evaluate({"inputs": X, "labels": others}),
        lambda: fit(NAMES, eval_data={"inputs": X, "labels": others}),
        lambda: fit(others, state=result.state),
    ):
        with pytest.raises(UserError, match=told):
            use()
    with pytest.raises(UserError, match="names of the classes is .* there and .*cats.* here"):
        fit(others, validation=0.2, checkpoints=de.Checkpoints(folder))
    with pytest.raises(UserError, match="the members were trained on class numbers"):
        de.evaluate(classifier(), fit(NUMBERS).state, {"inputs": X, "labels": NAMES})
