"""Groups of members, each with a training and a test set of its own: a table and its splits."""

import dataclasses
import json
import re

import jax
import numpy as np
import optax
import pytest
from scipy.special import log_softmax
from sklearn.preprocessing import StandardScaler

import dist_ens as de
from dist_ens.data import ArraySplit, Source, Spec, evaluation_batches
from dist_ens.evaluation import Evaluator, curves_of, evaluate
from dist_ens.experiment import DataConfig, Experiment, describe_source, open_source
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.replay import replay
from dist_ens.experiment.train import train
from dist_ens.ground.errors import UserError
from dist_ens.layout import Layout
from dist_ens.sampling import Order
from networks import layout_on
from scored import linear_members

TABLE = {
    "data": np.array([[1.0, 7.0, 10.0], [3.0, 7.0, 20.0], [5.0, 7.0, 60.0], [9.0, 7.0, 40.0]]),
    "index_features": np.array([0, 1]),
    "index_target": np.array(2),
    "train_idx": np.array([[0, 1], [3, 2]]),
    "test_idx": np.array([[2, 3], [1, 0]]),
}


def written(path, **changes):
    """A table's file with some arrays replaced, or left out where they are None."""
    arrays = {key: value for key, value in (TABLE | changes).items() if value is not None}
    np.savez(path / "table.npz", **arrays)
    return DataConfig(source=f"uci:{path / 'table.npz'}", examples="splits", global_batch_size=1)


def test_a_table_is_standardised_on_each_splits_training_rows(tmp_path):
    config = written(tmp_path)
    source = open_source(config)
    # Split 0 trains on 1 and 3 (mean 2, deviation 1), tests on 5 and 9; split 1 trains on 9 and 5
    # (mean 7, deviation 2), tests on 3 and 1. The second feature is constant: 0. Targets: 10 and 20
    # (15 and 5), then 60 and 40; 40 and 60 (50 and 10), then 20 and 10.
    np.testing.assert_array_equal(source.train.inputs, [[-1, 0], [1, 0], [1, 0], [-1, 0]])
    np.testing.assert_array_equal(source.test.inputs, [[3, 0], [7, 0], [-2, 0], [-3, 0]])
    np.testing.assert_array_equal(source.train.labels, [-1, 1, -1, 1])
    np.testing.assert_array_equal(source.test.labels, [9, 5, -3, -4])
    assert source.train.inputs.dtype == source.train.labels.dtype == np.float32
    assert (source.spec.num_groups, source.num_train_examples) == (2, 2)
    given = source.spec.standardization
    assert (given.target_mean, given.target_std) == ((15.0, 50.0), (5.0, 10.0))
    np.testing.assert_array_equal(given.of_inputs(TABLE["data"][:1, :2]), [[[-1, 0]], [[-3, 0]]])
    assert Spec.from_dict(json.loads(json.dumps(source.spec.to_dict()))) == source.spec
    assert describe_source(config) == (source.spec, 2)
    of_one = open_source(written(tmp_path, train_idx=np.array([0, 1]), test_idx=np.array([2, 3])))
    np.testing.assert_array_equal(of_one.train.inputs, source.train.inputs[:2])


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": None}, "lacks data. It has 'index_features, index_target, train_idx, test_idx'"),
        ({"data": np.full((4, 3), np.nan)}, "data has NaN, in 4 of 4 examples"),
        ({"index_features": np.array([0, 2])}, "column 2 is the target. Take it out of index_fe"),
        ({"test_idx": np.array([[2, 3], [1, 3]])}, "row 3 is in both parts of split 1."),
        ({"index_features": np.array([[0, 1]])}, "index_features [1, 2], index_target [], train"),
        ({"test_idx": np.array([[2, 3]])}, "train_idx [2, 2], test_idx [1, 2]. Save data [rows"),
        ({"index_features": np.array([True, False])}, "index_features has the type bool. Conv"),
        ({"index_features": np.array([0, -1])}, "index_features has -1, and the table has 0 to 2."),
        ({"train_idx": np.array([[0, 1], [3, 4]])}, "train_idx has 4, and the table has 0 to 3."),
        (
            {"data": np.where(TABLE["data"] == 40, 60, TABLE["data"])},
            "the target is constant in the training rows of split 1. Check that it is the target",
        ),
        ({"train_idx": np.array([[0, 1], [3]], object)}, "Object arrays cannot be loaded"),
        (
            {"data": np.array([[1, 2, 3]] * 3 + [[2**53 + 1, 2, 4]])},
            "data: the value 9007199254740993 at index (3, 0) does not fit in float64",
        ),
        # The first feature's training rows are 1 and 3: a deviation of 1, far below 1e39.
        (
            {"data": np.where(np.arange(12).reshape(4, 3) == 6, 1e39, TABLE["data"])},
            "inputs, standardised, [split, row, column]: the value 1e+39 at index",
        ),
    ],
)
def test_a_table_that_cannot_be_used_is_told(tmp_path, changes, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        open_source(written(tmp_path, **changes))


def test_a_table_is_scaled_as_scikit_learn_does(tmp_path):
    generator = np.random.default_rng(0)
    noise = generator.normal(size=60)
    columns = {
        "plain": noise,
        "constant": np.full(60, 5.0),
        "tiny constant": np.full(60, 1e-30),
        "tiny": 1e-30 * noise,
        "large offset": 1e9 + noise,
        "constant but for rounding": 0.1 + np.where(noise > 0, 2e-17, 0.0) + 1e9 - 1e9,
        "offset beyond its digits": 1e16 + np.round(noise),
        "rare": np.arange(60) == 3,
    }
    data = np.stack([*columns.values(), noise + 1], axis=1)
    train, test = np.arange(40)[None], np.arange(40, 60)[None]
    changes = dict(data=data, train_idx=train, test_idx=test, index_target=np.array(8))
    source = open_source(written(tmp_path, **changes, index_features=np.arange(8)))
    scaler = StandardScaler().fit(data[:40, :8])
    np.testing.assert_array_equal(source.train.inputs, np.float32(scaler.transform(data[:40, :8])))
    np.testing.assert_array_equal(source.test.inputs, np.float32(scaler.transform(data[40:, :8])))
    given = source.spec.standardization
    np.testing.assert_allclose(given.input_mean[0], scaler.mean_, rtol=1e-15)
    np.testing.assert_allclose(given.input_std[0], scaler.scale_, rtol=1e-9)


def test_a_member_sees_the_examples_of_its_group_in_an_order_of_its_own():
    one = Order(7, 3, per_member=True)
    of_groups = dataclasses.replace(one, num_groups=4)
    cursor, rows = one.cursor(5, range(7)), np.arange(3)  # 7 steps of 3: three epochs of 7
    for member_id in (2, 5):
        seen = of_groups.indices(cursor, rows, np.array([member_id]))
        np.testing.assert_array_equal(
            seen, one.indices(cursor, rows, np.array([member_id])) + 7 * (member_id % 4)
        )
        on_device = of_groups.indices(jax.numpy.asarray(cursor), rows, jax.numpy.int32(member_id))
        np.testing.assert_array_equal(seen, on_device)
        epochs = np.sort(seen.reshape(3, 7), axis=1)
        np.testing.assert_array_equal(epochs - 7 * (member_id % 4), [range(7)] * 3)
    assert one.cursor(5, range(0)).shape == (0, 3)
    with pytest.raises(UserError, match="at most 1,073,741,824 examples"):
        Order(2**29, 3, per_member=True, num_groups=3)


def test_batches_of_groups_hold_every_groups_examples_once():
    split = ArraySplit(np.arange(10), np.arange(10) * 2)  # two groups of five
    batches = list(
        evaluation_batches(split, global_batch_size=4, host_rows=np.array([2, 3]), num_groups=2)
    )
    # This host has the second half of each batch of 4: of 0 1 2 3, then of 4 and copies of it.
    assert [b["inputs"].tolist() for b in batches] == [[[2, 3], [7, 8]], [[4, 4], [9, 9]]]
    assert [b["labels"].tolist() for b in batches] == [[[4, 6], [14, 16]], [[8, 8], [18, 18]]]
    assert [b["mask"].tolist() for b in batches] == [[True, True], [False, False]]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(2, 2), (6, 1)])
def test_each_group_is_an_ensemble_scored_on_its_own_examples(mesh):
    random = np.random.default_rng(0)
    inputs = random.normal(size=(3, 5, 4)).astype(np.float32)  # three groups of five examples
    labels = random.integers(0, 3, (3, 5)).astype(np.int32)
    ensemble, state, weights = linear_members(layout_on(mesh, 6), 3, num_groups=3)
    split = ArraySplit(inputs.reshape(15, 4), labels.ravel())
    scores = Evaluator(ensemble, 4).evaluate(state, split).scores()

    groups, alone = [], {}
    for group in range(3):
        members = (group, group + 3)
        log_probs = {m: log_softmax(inputs[group] @ weights[m], axis=-1) for m in members}
        mixture = np.log(np.mean([np.exp(log_probs[m]) for m in members], axis=0))
        groups.append(-mixture[range(5), labels[group]].mean())
        alone |= {m: -log_probs[m][range(5), labels[group]].mean() for m in members}
    assert [scored["nll"] for scored in scores.groups] == pytest.approx(groups, rel=1e-4)
    assert [scored["member_id"] for scored in scores.members] == list(range(6))
    of_members = {scored["member_id"]: scored["nll"] for scored in scores.members}
    assert of_members == pytest.approx(alone, rel=1e-4)
    predicted = Evaluator(ensemble, 4).predict(state, inputs[0])  # the same five by every group
    assert predicted["probs"].shape == (3, 5, 3)
    for group in range(3):
        probs = [np.exp(log_softmax(inputs[0] @ weights[m], axis=-1)) for m in (group, group + 3)]
        np.testing.assert_allclose(predicted["probs"][group], np.mean(probs, axis=0), rtol=1e-4)
    as_dict = scores.to_dict()
    assert as_dict["test"]["nll"] == pytest.approx(np.mean(groups), rel=1e-4)
    assert as_dict["test_std"]["nll"] == pytest.approx(np.std(groups), rel=1e-4)


def test_members_in_another_order_than_their_groups_are_not_scored():
    uneven, _, _ = linear_members(Layout.make(4), 3, num_groups=3)
    with pytest.raises(UserError, match="not the same number of each of the 3 groups"):
        Evaluator(uneven, 4)
    ensemble, state, _ = linear_members(Layout.make(4), 3, num_groups=2)
    split = ArraySplit(np.ones((6, 4), np.float32), np.zeros(6, np.int32))
    source = Source(Spec((4,), "float32", (), 3, num_groups=2), train=split, test=split)
    with pytest.raises(UserError, match=re.escape("The members [1, 0, 2, 3] are not")):
        evaluate(ensemble, state.select([1, 0, 2, 3]), source)


RANDOM = np.random.default_rng(0)
LINE = RANDOM.normal(size=(40, 3))
LINE[:, 2] = 1000 + 50 * (LINE[:, 0] - 2 * LINE[:, 1]) + RANDOM.normal(size=40)
PARTS = np.stack([RANDOM.permutation(40) for _ in range(2)])


def line(path, splits=(0, 1), data=LINE):
    """A table and some of its two splits."""
    parts = PARTS[list(splits)]
    return written(path, data=data, train_idx=parts[:, :30], test_idx=parts[:, 30:])


def experiment(data):
    values = {"num_members": None, "members_per_group": 2, "steps": 60, "steps_per_call": 20}
    values |= {"execution": "vmap", "loss": {"name": "gaussian"}}
    values |= {"model": {"name": "mlp", "hidden_sizes": (16,), "init": "fan_in_uniform"}}
    values |= {"optimizer": {"learning_rate": 0.05}}
    values |= {"data": {"source": data.source, "examples": "splits", "global_batch_size": 8}}
    return Experiment.from_dict(values)


@pytest.mark.slow
def test_members_of_several_splits_are_trained_and_scored_in_their_targets_unit(tmp_path):
    trained = train(experiment(line(tmp_path)), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["groups"], summary["num_members"]) == (2, 4)
    assert set(summary["test_std"]) == set(summary["test"]) == set(summary["mean_member"])
    # The target deviates by about 110; a line is learned, its noise 1.
    assert summary["test"]["rmse"] < 40
    run, ensemble, state, *_ = open_finished(tmp_path / "run")
    evaluator = Evaluator(ensemble, 4, run.spec)
    evaluation = evaluator.evaluate(state, open_source(run.experiment.data).test, by_size=True)
    again = evaluation.scores()
    assert again.ensemble == pytest.approx(trained.scores.ensemble, rel=1e-4)

    # From predictions of the raw rows, each group's for its own test rows.
    predicted = evaluator.predict(state, LINE[:, :2])
    assert predicted["member_mean"].shape == predicted["member_variance"].shape == (4, 40)
    doubts, squares = [], []
    for group in range(2):
        test, target = PARTS[group, 30:], LINE[PARTS[group, 30:], 2]
        means, variances = (
            predicted[f"member_{name}"][[group, group + 2]][:, test].astype(np.float64)
            for name in ("mean", "variance")
        )
        mean = means.mean(0)
        variance = (variances + means**2).mean(0) - mean**2
        np.testing.assert_allclose(predicted["mean"][group, test], mean, rtol=1e-5)
        np.testing.assert_allclose(predicted["variance"][group, test], variance, rtol=1e-2)
        rmse = np.sqrt(np.mean((target - mean) ** 2))
        nll = np.mean(np.log(2 * np.pi * variance) + (target - mean) ** 2 / variance) / 2
        assert trained.scores.groups[group]["rmse"] == pytest.approx(rmse, rel=1e-3)
        assert trained.scores.groups[group]["nll"] == pytest.approx(nll, abs=2e-3)
        alone = [trained.scores.members[m]["rmse"] for m in (group, group + 2)]
        assert alone == pytest.approx(np.sqrt(np.mean((target - means) ** 2, axis=1)), rel=1e-3)
        doubts.append(variance)
        squares.append((target - mean) ** 2)

    # What is drawn of both groups: the error of the surest of all their examples.
    drawn = curves_of(evaluation)["risk_coverage"]
    surest_first = np.concatenate(squares)[np.argsort(np.concatenate(doubts))]
    for share in (0.25, 0.5, 1.0):
        kept = surest_first[: round(share * len(surest_first))]
        at = drawn["coverage"].index(share)
        assert drawn["ensemble"][at] == pytest.approx(np.sqrt(kept.mean()), rel=1e-3)
    # Of groups whose targets were divided by 1 and by 30.
    values, units = evaluation.groups, np.array([[1.0], [30.0]])
    drawn = curves_of(dataclasses.replace(evaluation, units=units[:, 0]))["risk_coverage"]
    order = np.argsort((values["variance"] * units**2).ravel())
    kept = (values["squared_error"] * units**2).ravel()[order][: len(order) // 2]
    assert drawn["ensemble"][50] == pytest.approx(np.sqrt(kept.mean()), rel=1e-5)
    assert drawn["score"] == "RMSE"
    assert len(drawn["mean_member"]) == len(drawn["coverage"])

    # The same table with another number in it is another.
    changed = LINE.copy()
    changed[PARTS[0, 0], 0] += 1
    with pytest.raises(UserError, match="standardization=.* there and .*standardization=.* here"):
        train(experiment(line(tmp_path, data=changed)), tmp_path / "run")


@pytest.mark.parametrize("changes", [{"validation": 0.2}, {"shuffle": False}])
def test_a_member_of_a_group_is_replayed(tmp_path, changes):
    values = experiment(line(tmp_path)).to_dict() | {"execution": "loop", "steps": 3}
    values["data"] |= changes
    train(Experiment.from_dict(values), tmp_path / "run")
    assert replay(tmp_path / "run", 1, progress=False).largest[1] < 1e-5


@pytest.mark.slow
def test_a_group_learns_nothing_of_another_splits_examples(tmp_path):
    # Member 0 is of split 0, beside members of split 1 and without them; and member 1 of split 1,
    # whatever split 0 is.
    network = (lambda key: {"w": jax.random.normal(key, (2, 2))}, lambda p, x: x @ p["w"])

    def trained(*splits):
        source = open_source(line(tmp_path, splits))
        groups = source.spec.num_groups
        options = {"num_members": 2 * groups, "num_groups": groups}
        ensemble = de.Ensemble(network, optax.sgd(0.05), de.losses.gaussian(), **options)
        order = de.data.permuted()
        result = de.fit(ensemble, source, steps=20, batch_size=8, order=order, progress=False)
        predicted = Evaluator(ensemble, 40, source.spec).predict(result.state, LINE[:, :2])
        return np.asarray(result.state.params["w"]), predicted["mean"].shape

    (both, of_both), (alone, of_one), (second, _) = trained(0, 1), trained(0), trained(1, 1)
    assert (of_both, of_one) == ((2, 40), (40,))
    np.testing.assert_allclose(both[0], alone[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(both[1], second[1], rtol=1e-5, atol=1e-6)
    assert not np.allclose(both[0], second[0])
