"""What `evaluate` says beside scores: detection, shift, calibration, conformal, out of bag."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from scipy.special import entr, log_softmax, softmax
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from dist_ens.data import ArraySplit, Spec
from dist_ens.evaluation import Evaluator
from dist_ens.evaluation.ood import Unlabelled, detection
from dist_ens.evaluation.out_of_bag import examples_out_of_bag
from dist_ens.evaluation.shift import shifted_splits
from dist_ens.experiment import Experiment, open_source
from dist_ens.experiment.assessment import Assessment, EvaluationRequest, assess
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.train import train
from dist_ens.ground.errors import BrokenMembersError, UserError
from dist_ens.layout import BATCH, Layout
from dist_ens.losses import Categorical, Gaussian, Point, Quantiles, log_normalized_sigmoid
from dist_ens.metrics import bootstrap_weights, interval, mean_of
from dist_ens.report import read_run, write_report
from dist_ens.storage import Disk
from scored import linear_members
from test_load import write_table

RANDOM, LONG = np.random.default_rng(0), pytest.mark.long


def network(num_outputs, num_members, examples=30):
    """Random linear members on two devices, examples, and the outputs for them by NumPy."""
    layout = Layout.make(num_members, ensemble_axis=1, devices=jax.devices()[:2])
    ensemble, state, weights = linear_members(layout, num_outputs)
    inputs = RANDOM.normal(size=(examples, 4)).astype(np.float32)
    return ensemble, state, inputs, np.einsum("nf,mfc->mnc", inputs, weights)


LABELS = RANDOM.integers(0, 3, 30).astype(np.int32)


def test_pooled_predictions_are_what_their_names_say():
    ensemble, state, inputs, logits = network(3, 4)
    votes = np.eye(3)[logits.argmax(-1)].mean(0)
    sigmoid = 1 / (1 + np.exp(-logits))
    expected = {
        Categorical(): softmax(logits, -1).mean(0),
        Categorical(pooling="logits"): softmax(log_softmax(logits, -1).mean(0), -1),
        Categorical(pooling="vote"): votes,
        Categorical(log_normalized_sigmoid): (sigmoid / sigmoid.sum(-1, keepdims=True)).mean(0),
    }
    for distribution, probs in expected.items():
        evaluator = Evaluator(ensemble, 8, distribution=distribution)
        predicted = evaluator.predict(state, inputs)["probs"]
        np.testing.assert_allclose(predicted, probs, rtol=1e-4, atol=1e-6)
        scores = evaluator.evaluate(state, ArraySplit(inputs, LABELS)).scores().ensemble
        brier = np.square(probs - np.eye(3)[LABELS]).sum(-1).mean()
        assert scores["brier"] == pytest.approx(brier, rel=1e-4)


@pytest.mark.parametrize("num_members", [1, 3])
def test_what_samples_of_a_member_differ_by_is_told_apart_from_their_noise(num_members):
    logits = 3 * RANDOM.normal(size=(num_members, 5, 20, 4))  # members, samples, examples, classes
    probs = softmax(logits, -1)
    noise = entr(probs).sum(-1).mean(axis=(0, 1))
    distribution = Categorical(pooling="logits")  # how members are pooled is another question
    predictions = jax.vmap(distribution.from_outputs)(np.float32(logits))
    diversity = distribution.diversity(predictions)
    np.testing.assert_allclose(diversity["aleatoric"], noise, rtol=1e-5)
    of_all = entr(probs.mean(axis=(0, 1))).sum(-1)
    np.testing.assert_allclose(diversity["mutual_information"], of_all - noise, rtol=1e-4)
    for member, of_member in enumerate(probs):
        prediction = jax.tree.map(lambda leaf, m=member: leaf[m], predictions)
        values = distribution.row_statistics(prediction, np.zeros(20, np.int32))
        noise = entr(of_member).sum(-1).mean(0)
        np.testing.assert_allclose(values["aleatoric"], noise, rtol=1e-5)
        of_all = entr(of_member.mean(0)).sum(-1)
        np.testing.assert_allclose(values["mutual_information"], of_all - noise, rtol=1e-4)
    pooled = distribution.row_statistics(distribution.pool(predictions), np.zeros(20, np.int32))
    assert "mutual_information" not in pooled  # its is the members'
    alone = distribution.from_outputs(np.float32(logits[0, :1]))
    assert "mutual_information" not in distribution.row_statistics(alone, np.zeros(20, np.int32))


@pytest.mark.slow
def test_what_predictions_add_to_scores_is_that_of_the_examples_that_count():
    ensemble, state, inputs, _ = network(3, 4)
    evaluator = Evaluator(ensemble, 8)
    told = evaluator.pooled_predictions(state, ArraySplit(inputs, LABELS))["log_probs"][0]
    counts = RANDOM.random(30) < 0.6
    for kept, given in ((np.ones(30, bool), None), (counts, counts)):
        evaluation = evaluator.evaluate(state, ArraySplit(inputs[kept], LABELS[kept]))
        values, classwise = evaluator.values_of({"log_probs": told}, LABELS, given)
        np.testing.assert_allclose(classwise, evaluation.group_classwise[0], atol=1e-5)
        np.testing.assert_allclose(values["nll"], evaluation.groups["nll"][0], atol=1e-5)


def test_real_targets_are_pooled_as_one_normal_as_a_mixture_or_as_quantiles():
    ensemble, state, inputs, outputs = network(2, 3)
    targets = RANDOM.normal(size=30).astype(np.float32)
    split, spec = ArraySplit(inputs, targets), Spec((4,), "float32", (), None)
    means, deviations = outputs[..., 0], np.sqrt(np.log1p(np.exp(outputs[..., 1])) + 1e-6)
    mixture = -np.log(norm.pdf(targets, means, deviations).mean(0)).mean()
    variance = (deviations**2 + means**2).mean(0) - means.mean(0) ** 2
    as_one = -norm.logpdf(targets, means.mean(0), np.sqrt(variance)).mean()

    def scored(distribution):
        return Evaluator(ensemble, 8, spec, distribution).evaluate(state, split).scores().ensemble

    assert scored(Gaussian())["nll"] == pytest.approx(as_one, rel=1e-4)
    assert scored(Gaussian(pooling="mixture"))["nll"] == pytest.approx(mixture, rel=1e-4)
    assert "nll" not in scored(Point())
    low, high = np.sort(outputs, -1).mean(0).T
    scores = scored(Quantiles((0.25, 0.5)))  # of two outputs: the second is the median
    assert scores["mae"] == pytest.approx(np.abs(targets - high).mean(), rel=1e-4)
    assert scores["coverage"] == pytest.approx(((low <= targets) & (targets <= high)).mean())
    assert scores["width"] == pytest.approx((high - low).mean(), rel=1e-4)


def test_ensembles_of_fewer_members_are_scored_as_such():
    ensemble, state, inputs, logits = network(3, 4)
    evaluation = Evaluator(ensemble, 7).evaluate(state, ArraySplit(inputs, LABELS), by_size=True)
    scores = evaluation.scores(intervals=True)
    curve = evaluation.score_against_members()
    assert curve["num_members"] == [1, 2, 3, 4]
    # Of all there is one ensemble; of one the mean over orders is near the mean member.
    assert curve["nll"]["mean"][-1] == pytest.approx(scores.ensemble["nll"], rel=1e-5)
    orders = np.random.default_rng(0)
    pairs = [orders.permutation(4)[:2] for _ in range(8)]
    probs = softmax(logits, -1)[:, range(30), LABELS]
    of_two = np.mean([-np.log(probs[pair].mean(0)).mean() for pair in pairs])
    assert curve["nll"]["mean"][1] == pytest.approx(of_two, rel=1e-4)
    for name in ("nll", "accuracy"):
        low, mean, high = (np.array(curve[name][n]) for n in ("low", "mean", "high"))
        assert (low <= mean).all()
        assert (mean <= high).all()
    low, high = scores.intervals["ensemble"]["nll"]
    assert low < scores.ensemble["nll"] < high
    assert set(scores.intervals["members"][0]) >= {"member_id", "accuracy", "nll", "aurc"}


@pytest.mark.quick
def test_an_interval_holds_the_truth_as_often_as_it_says():
    # Means of 40 draws of accuracy 0.8: the 95 % interval holds 0.8 in about 95 of 100 sets.
    held = 0
    for seed in range(100):
        right = np.random.default_rng(seed).random(40) < 0.8
        low, high = interval(mean_of(right.astype(np.float32), bootstrap_weights(40, 400, seed)))
        held += low <= 0.8 <= high
    assert 85 <= held <= 99


@pytest.mark.quick
def test_examples_of_another_kind_come_in_the_type_of_the_run_where_their_values_fit():
    def taken(inputs, dtype):
        split = ArraySplit(np.array(inputs), np.zeros(3, np.int32))
        return Unlabelled(split, Spec((2,), dtype, (), 3), "--ood=x").take(np.array([2, 0]))

    numbers = np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    found = taken(numbers.astype(np.float64), "uint8")["inputs"]
    assert (found.dtype, found.tolist()) == ("uint8", [[5, 6], [1, 2]])
    with pytest.raises(UserError, match=r"--ood=x: the value 300.0 at index \(0, 1\) does not fit"):
        taken(numbers * [[1, 60]] - [[0, 60]], "uint8")


@pytest.mark.slow
@pytest.mark.quick
def test_what_is_far_from_the_data_is_told_by_the_measures_that_scikit_learn_scores():
    ensemble, state, inputs, both = network(3, 4, examples=50)
    evaluator = Evaluator(ensemble, 8)
    inside = evaluator.evaluate(state, ArraySplit(inputs[:30], LABELS))
    split = ArraySplit(inputs[30:], np.full(20, 99))  # labels that are no classes of the run
    spec = Spec((4,), "float32", (), 3)
    beyond = evaluator.evaluate(state, Unlabelled(split, spec, "outside"))
    found = detection(inside, beyond)
    probs, is_out = softmax(both, -1), np.arange(50) >= 30

    def entropy(p):
        return -(p * np.log(p)).sum(-1)

    pooled = probs.mean(0)
    measures = {
        "entropy": entropy(pooled),
        "max_probability": -pooled.max(-1),
        "mutual_information": entropy(pooled) - entropy(probs).mean(0),
        "energy": -np.log(np.exp(both).sum(-1)).mean(0),
    }
    for name, values in measures.items():
        got = found["ood"]["ensemble"][name]
        assert got["auroc"] == pytest.approx(roc_auc_score(is_out, values), abs=1e-6)
        low, high = found["ood_interval"]["ensemble"][name]["auroc"]
        assert low <= got["auroc"] <= high
        sign = -1 if name == "max_probability" else 1
        assert got["mean_in"] == pytest.approx(sign * values[~is_out].mean(), rel=1e-5)
        assert got["mean_out"] == pytest.approx(sign * values[is_out].mean(), rel=1e-5)
    members = [roc_auc_score(is_out, entropy(p)) for p in probs]
    got = found["ood"]["mean_member"]["entropy"]["auroc"]
    assert got == pytest.approx(np.mean(members), abs=1e-6)
    assert "mutual_information" not in found["ood"]["mean_member"]


@pytest.mark.quick
def test_shifts_keep_labels_and_grow_with_their_strength():
    pictures = RANDOM.integers(20, 200, (12, 10, 10)).astype(np.uint8)
    split = ArraySplit(pictures, np.arange(12))
    shifted = shifted_splits(split, Spec((10, 10), "uint8", (), 12))
    assert set(shifted) == {"gaussian_noise", "blur", "contrast", "rotation"}
    for name, splits in shifted.items():
        taken = [each.take(np.arange(12)) for each in splits]
        assert all(np.array_equal(batch["labels"], np.arange(12)) for batch in taken)
        if name in ("gaussian_noise", "contrast"):
            far = [np.abs(b["inputs"] - pictures.astype(float)).mean() for b in taken]
            assert far == sorted(far)
        # An example is shifted in the same way, whatever comes beside it.
        alone = splits[2].take(np.array([7]))["inputs"]
        np.testing.assert_array_equal(alone[0], taken[2]["inputs"][7])
    numbers = ArraySplit(RANDOM.normal(size=(5, 3)).astype(np.float32), np.zeros(5))
    assert set(shifted_splits(numbers, Spec((3,), "float32", (), 2))) == {"gaussian_noise"}


@pytest.mark.slow
def test_scores_without_a_member_that_has_no_numbers_are_those_of_the_others():
    ensemble, state, inputs, logits = network(3, 4)
    split = ArraySplit(inputs, LABELS)
    state = broken(ensemble, state, [2])
    evaluation = Evaluator(ensemble, 8).evaluate(state, split, by_size=True)
    assert evaluation.broken_members == [2]
    assert np.isnan(evaluation.scores().ensemble["nll"])
    evaluator = Evaluator(ensemble, 8).without([2])
    assert evaluator.without([0]).left_out == (0, 2)
    without = evaluator.evaluate(state, split, by_size=True)
    nll = -np.log(softmax(logits[[0, 1, 3]], -1).mean(0))[range(30), LABELS].mean()
    assert without.scores().ensemble["nll"] == pytest.approx(nll, rel=1e-4)
    assert without.sizes == [1, 2, 3]


DIGITS = {"source": "digits", "std": (16.0,), "global_batch_size": 64}


def experiment(data, **changes):
    values = {
        "num_members": 8,
        "steps": 40,
        "steps_per_call": 20,
        "execution": "vmap",
        "data": data,
        "model": {"name": "mlp", "hidden_sizes": (16,)},
        "optimizer": {"learning_rate": 0.01},
    }
    return Experiment.from_dict(values | changes)


def table(path, rows=400):
    random = np.random.default_rng(1)
    x = random.normal(size=(rows, 2))
    targets = 10 + 3 * x[:, 0] - x[:, 1] + random.normal(size=rows)
    train, test = np.split(random.permutation(rows), [rows * 3 // 4])
    write_table(path / "table.npz", x, targets, train, test)
    return f"uci:{path / 'table.npz'}"


def assessed(workdir, pooling=None, **questions):
    run, ensemble, state, *_ = open_finished(workdir)
    source, request = open_source(run.experiment.data), EvaluationRequest(**questions)
    return assess(run, run.evaluator(ensemble, pooling), state, source, request)


def broken(ensemble, state, positions):
    """A state in which some members predict NaN."""
    params = jax.tree.map(lambda leaf: np.array(leaf), state.params)
    jax.tree.leaves(params)[0][list(positions)] = np.nan
    return state._replace(params=ensemble.layout.put(params, "members"))


@pytest.mark.long
def test_digits_are_calibrated_covered_and_shifted(tmp_path):
    train(experiment(DIGITS | {"validation": 0.2, "examples": "bootstrap"}), tmp_path)
    asked = {"calibration": "temperature", "conformal": "aps", "level": 0.8, "ood": "digits"}
    found = assessed(tmp_path, shift=True, out_of_bag=True, **asked)
    told = json.loads(json.dumps(found.to_dict()))
    assert told["calibrated"]["test"]["nll"] < told["test"]["nll"]
    of_several = {"aleatoric", "mutual_information", "disagreement", "variance"}
    assert set(told["calibrated"]["test"]) == set(told["test"]) - of_several
    assert set(told["calibrated"]["test_interval"]) == set(told["calibrated"]["test"])
    low, high = told["conformal"]["interval"]["coverage"]
    share = told["conformal"]["coverage"]
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(share * (1 - share) / 360), rel=0.2)
    # 360 test rows: a standard error of 0.02.
    assert told["conformal"]["coverage"] == pytest.approx(0.8, abs=0.08)
    assert told["ood"]["ensemble"]["entropy"]["auroc"] == pytest.approx(0.5)  # the same examples
    strengths = told["shift"]["gaussian_noise"]
    noise = [at["test"]["accuracy"] for at in strengths]
    assert noise[0] > noise[-1]
    for at in strengths:
        assert set(at["test"]) == set(told["test"]) == set(at["test_interval"])
        assert len(at["members"]) == len(at["members_interval"]) == 8
        nll = np.mean([member["nll"] for member in at["members"]])
        assert at["mean_member"]["nll"] == pytest.approx(nll)
    assert 0.5 < told["out_of_bag"]["scores"]["accuracy"] <= 1
    # Of eight Poisson samples all hold an example with probability (1 - 1/e)^8 = 0.0255.
    assert told["out_of_bag"]["not_scored"] == pytest.approx(0.0255 * 1150, abs=20)
    assert len(found.sentences()) == 8  # four shifts among them
    assert f"{noise[2]:.4f} at" in " ".join(found.sentences())
    write_report(Disk(tmp_path), told, found.curves, found.pictures)
    run = read_run(tmp_path)
    assert len(run.pictures) == 24
    assert {"reliability", "risk_coverage", "disagreement"} <= set(run.curves)


@pytest.mark.parametrize(
    "changes",
    [{"examples": "kfold", "num_folds": 4}, pytest.param({"examples": "bootstrap"}, marks=LONG)],
)
def test_out_of_bag_predictions_are_of_members_that_never_saw_the_example(tmp_path, changes):
    # Labels by chance: who has seen an example knows its label, nobody else can.
    random = np.random.default_rng(0)
    images = random.normal(size=(40, 30)).astype(np.float32)
    labels = random.integers(0, 2, 40)
    both = {"train_images": images, "test_images": images}
    np.savez(tmp_path / "noise.npz", train_labels=labels, test_labels=labels, **both)
    data = {"source": f"npz:{tmp_path / 'noise.npz'}", "global_batch_size": 20}
    options = {"steps": 100, "optimizer": {"learning_rate": 0.05}}
    train(experiment(data | changes, **options), tmp_path / "run")
    told = assessed(tmp_path / "run", out_of_bag=True).to_dict()
    assert told["test"]["accuracy"] > 0.9  # which are the training examples
    held_out = told["out_of_bag"]
    assert held_out["scores"]["accuracy"] < 0.8
    assert set(held_out["interval"]) == set(held_out["scores"])
    assert "classwise_ece" in held_out["scores"]
    low, high = held_out["interval"]["accuracy"]
    assert low < held_out["scores"]["accuracy"] < high
    masks = examples_out_of_bag(np.arange(8), 40, seed=0, num_folds=4)
    assert (masks.sum(0) == 2).all()


@pytest.mark.parametrize(
    ("method", "loss", "data"),
    [
        ("cqr", "quantiles", {"validation": 0.3}),
        pytest.param("cqr", "gaussian", {"validation": 0.3}, marks=LONG),
        pytest.param("cv+", "squared_error", {"examples": "kfold", "num_folds": 4}, marks=LONG),
        pytest.param("jackknife+", "gaussian", {"examples": "bootstrap"}, marks=LONG),
    ],
)
def test_intervals_of_real_targets_hold_as_often_as_asked(tmp_path, method, loss, data):
    data |= {"source": table(tmp_path), "global_batch_size": 48}
    members = 8 if method == "cv+" else 16
    options = {"loss": {"name": loss}, "num_members": members, "steps": 200}
    train(experiment(data, **options), tmp_path / "run")
    calibration = "variance" if (method, loss) == ("cqr", "gaussian") else None
    asked = {"conformal": method, "level": 0.8, "calibration": calibration}
    told = assessed(tmp_path / "run", **asked).to_dict()
    # 100 test rows, calibrated on 90 and more: a standard error of 0.06.
    assert 0.62 < told["conformal"]["coverage"] < 0.98
    # A normal's central 80 % is 2.56 deviations wide; the noise has 1.
    assert 2 < told["conformal"]["mean_width"] < 6
    if calibration is not None:
        calibrated = told["calibrated"]
        assert calibrated["parameters"]["scale"] > 0
        assert calibrated["test"]["rmse"] == pytest.approx(told["test"]["rmse"], rel=1e-3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of four members, and its evaluator, source and state, in which member 1 is broken."""
    workdir = tmp_path_factory.mktemp("run")
    data = DIGITS | {"validation": 0.2, "examples": "kfold", "num_folds": 2}
    train(experiment(data, steps=20, num_members=4), workdir)
    run, ensemble, state, *_ = open_finished(workdir)
    evaluator, source = run.evaluator(ensemble), open_source(run.experiment.data)
    return run, evaluator, source, broken(ensemble, state, [1]), broken(ensemble, state, range(4))


def test_dropout_samples_are_averaged_and_differ(tmp_path):
    model = {"name": "mlp_bn_dropout", "hidden_sizes": (32,), "dropout_rate": 0.5}
    trained = train(experiment(DIGITS, steps=20, num_members=2, model=model), tmp_path)
    split = open_source(trained.run.experiment.data).test
    images = split.take(np.arange(5))["inputs"]
    plain = Evaluator(trained.ensemble, 8).predict(trained.state, images)
    samples = trained.ensemble.replace(dropout_samples=64)
    outputs = np.asarray(samples.outputs(trained.state, samples.layout.put(images[:4], BATCH)))
    assert outputs.shape == (2, 4, 64, 10)
    assert (outputs.std(axis=2) > 0).all()
    averaged = Evaluator(samples, 8).predict(trained.state, images)
    expected = softmax(outputs, -1).mean(2)
    np.testing.assert_allclose(averaged["member_probs"][:, :4], expected, atol=0.12)
    assert np.abs(averaged["member_probs"] - plain["member_probs"]).max() > 0.01
    few = ArraySplit(split.inputs[:64], split.labels[:64])
    scores = Evaluator(samples, 64).evaluate(trained.state, few).scores(intervals=True)
    assert all(member["mutual_information"] > 0.01 for member in scores.members)
    assert scores.ensemble["mutual_information"] > scores.mean_member["mutual_information"]
    low, high = scores.intervals["mean_member"]["mutual_information"]
    assert low < scores.mean_member["mutual_information"] < high
    for asked, drawn in [(None, None), (64, 64), (0, None)]:
        opened = open_finished(tmp_path, dropout_samples=asked)
        of_run = opened.run.experiment.evaluation.dropout_samples
        assert opened.ensemble.dropout_samples == of_run == drawn


def test_a_run_with_a_member_without_numbers_is_assessed_without_it(finished):
    run, evaluator, source, state, all_broken = finished
    with_all = assess(run, evaluator, state, source, EvaluationRequest())
    assert with_all.broken == [1]
    assert with_all.curves == {}
    assert "Pass --leave_out_broken to average the others" in with_all.sentences()[0]
    for question in ({"ood": "digits"}, {"shift": True}):
        with pytest.raises(UserError, match=r"Members \[1\] predict NaN.* Pass --leave_out_broken"):
            assess(run, evaluator, state, source, EvaluationRequest(**question))
    asked = EvaluationRequest(ood="digits", out_of_bag=True, leave_out_broken=True)
    without = assess(run, evaluator, state, source, asked)
    told = without.to_dict()
    assert np.isfinite(told["out_of_bag"]["scores"]["nll"])
    assert told["out_of_bag"]["not_scored"] == 0  # member 3 left out what member 1 did
    assert told["broken_members"] == told["left_out_members"] == [1]
    others = [m["nll"] for m in without.scores.members if m["member_id"] != 1]
    assert without.scores.mean_member["nll"] == pytest.approx(np.mean(others))
    low, high = without.scores.intervals["mean_member"]["nll"]
    assert low < np.mean(others) < high
    assert told["ood"]["ensemble"]["entropy"]["auroc"] == pytest.approx(0.5)
    assert len(told["ood"]["members"]) == len(others)
    assert "reliability" in without.curves
    assert 1 not in without.curves["member_id"]
    assert len(without.curves["disagreement"]) == len(others)
    (sentence,) = assess(run, evaluator, all_broken, source, EvaluationRequest()).sentences()
    assert "that is all of them" in sentence
    assert "--leave_out_broken" not in sentence


def test_nothing_is_calibrated_by_a_member_without_numbers(finished):
    run, evaluator, source, state, _ = finished
    for question in ({"calibration": "temperature"}, {"conformal": "aps"}):
        with pytest.raises(BrokenMembersError, match=r"Members \[1\] predict NaN"):
            assess(run, evaluator, state, source, EvaluationRequest(**question))
    asked = EvaluationRequest(calibration="temperature", conformal="aps", leave_out_broken=True)
    told = assess(run, evaluator, state, source, asked).to_dict()
    assert told["calibrated"]["test"]["nll"] < told["test"]["nll"]
    assert told["conformal"]["coverage"] > 0.8


def test_a_member_that_is_broken_by_other_examples_alone_is_named():
    ensemble, state, inputs, _ = network(3, 4)
    weights = np.asarray(state.params["w"]).copy()
    weights[2, 0, 0] = np.inf  # no number where it meets a zero
    state = state._replace(params={"w": ensemble.layout.put(weights, "members")})
    evaluator = Evaluator(ensemble, 8)
    inside = evaluator.without([2]).evaluate(state, ArraySplit(inputs, LABELS))
    outside = evaluator.evaluate(state, ArraySplit(np.zeros_like(inputs), LABELS))
    with pytest.raises(BrokenMembersError) as raised:
        detection(inside, outside)
    assert raised.value.member_ids == (2,)


@pytest.mark.slow
def test_the_interval_of_a_calibration_error_holds_the_error():
    # Calibrated predictions: a resample of them seems less calibrated than they are.
    ensemble, state, inputs, logits = network(3, 2, examples=400)
    labels = np.array([RANDOM.choice(3, p=p) for p in softmax(logits, -1).mean(0)], np.int32)
    evaluation = Evaluator(ensemble, 400).evaluate(state, ArraySplit(inputs, labels))
    scores = evaluation.scores(intervals=True)
    for name in ("ece", "aece", "classwise_ece"):
        low, high = scores.intervals["ensemble"][name]
        assert 0 <= low <= scores.ensemble[name] <= high


def test_a_split_of_too_many_rows_has_no_intervals_and_it_is_told(monkeypatch):
    monkeypatch.setattr("dist_ens.evaluation.scores._MOST_DRAWN", 2_999)  # 100 draws of 29 rows
    ensemble, state, inputs, _ = network(3, 2)
    evaluation = Evaluator(ensemble, 30).evaluate(state, ArraySplit(inputs, LABELS))
    scores = evaluation.scores(intervals=True)
    assert scores.intervals is None
    found = detection(evaluation, evaluation)
    assert "ood_interval" not in found
    assert found["ood"]["ensemble"]["entropy"]["auroc"] == pytest.approx(0.5)
    assert "there are no intervals" in Assessment(scores, {}, {}, ()).sentences()[0]


def test_training_does_not_import_what_only_some_questions_need():
    code = "import sys, launch.train; print([m for m in sys.modules if m in sys.argv[1:]])"
    slow = ["scipy.optimize", "scipy.ndimage", "sklearn", "matplotlib", "jinja2"]
    ended = subprocess.run(
        [sys.executable, "-c", code, *slow], capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "[]"
