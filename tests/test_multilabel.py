"""Several labels of an example that are each 0 or 1, beside scikit-learn and SciPy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.optimize import minimize_scalar
from scipy.special import expit
from sklearn import metrics as sklearn_metrics

import dist_ens as de
from commands import dist_ens
from dist_ens import losses, methods
from dist_ens.data import Spec, convert_inputs, source_of_arrays
from dist_ens.experiment import LossConfig, make_objective
from dist_ens.ground.errors import UserError
from tabled import ROWS, data_of, tabled

LABELS = 3
RANDOM = np.random.default_rng(0)
TRUTH = RANDOM.normal(size=(ROWS, LABELS)) - [0, 0.5, 1.5]
Y = (TRUTH + RANDOM.normal(size=TRUTH.shape) > 0).astype(int)
OUTPUTS = (2 * TRUTH + RANDOM.normal(size=(4, ROWS, LABELS))).astype(np.float32)


def probs_of(outputs=OUTPUTS):
    return expit(outputs.astype(np.float64))


def test_the_loss_is_the_sum_of_the_binary_cross_entropies():
    objective = losses.multilabel(2)
    outputs = jnp.log(jnp.array([[3.0, 1 / 3]]))  # Probabilities 3/4 and 1/4.
    for labels in (jnp.array([[1, 1]]), jnp.array([[True, True]])):
        loss = objective.example_loss(outputs, labels)
        np.testing.assert_allclose(loss, [np.log(4 / 3) + np.log(4)], rtol=1e-6)
        assert objective.training_scores(outputs, labels)["exact_match"].tolist() == [0]
    # The gradient of a logit is its probability less its label.
    slope = jax.grad(lambda o: objective.example_loss(o, jnp.array([[1, 0]])).sum())(outputs)
    np.testing.assert_allclose(slope, [[-1 / 4, 1 / 4]], rtol=1e-6)


def test_probabilities_are_averaged_and_uncertainty_is_that_of_each_label():
    ensemble, state = tabled(OUTPUTS, losses.multilabel(LABELS))
    prediction = ensemble.predict(state, np.eye(ROWS, dtype=np.float32))
    probs = probs_of()

    def entropy(p):
        return -p * np.log(p) - (1 - p) * np.log(1 - p)

    total, aleatoric = entropy(probs.mean(0)), entropy(probs).mean(0)
    np.testing.assert_allclose(prediction.mean, probs.mean(0), rtol=1e-5)
    np.testing.assert_allclose(prediction.members, probs, rtol=1e-5)
    np.testing.assert_allclose(prediction.total, total, rtol=1e-5)
    np.testing.assert_allclose(prediction.aleatoric, aleatoric, rtol=1e-5)
    np.testing.assert_allclose(prediction.epistemic, total - aleatoric, atol=1e-6)
    assert prediction.unit == "nats"


@pytest.mark.parametrize("labels", [Y, Y.astype(bool)], ids=["int", "bool"])
def test_scores_are_those_of_scikit_learn(labels):
    ensemble, state = tabled(OUTPUTS, losses.multilabel(LABELS))
    scores = de.evaluate(ensemble, state, data_of(labels), metrics=["auroc"])
    probs = probs_of().mean(0)
    predicted = probs > 0.5
    of_labels = range(LABELS)
    expected = {
        "exact_match": sklearn_metrics.accuracy_score(Y, predicted),
        "nll": sum(sklearn_metrics.log_loss(Y[:, k], probs[:, k]) for k in of_labels),
        "brier": np.mean(
            [sklearn_metrics.brier_score_loss(Y[:, k], probs[:, k]) for k in of_labels]
        ),
        "macro_f1": sklearn_metrics.f1_score(Y, predicted, average="macro"),
        "average_precision": sklearn_metrics.average_precision_score(Y, probs),
        "auroc": sklearn_metrics.roc_auc_score(Y, probs),
    }
    assert {n: scores.ensemble[n] for n in expected} == pytest.approx(expected, abs=1e-6)
    f1 = sklearn_metrics.f1_score(Y, predicted, average=None)
    auroc = sklearn_metrics.roc_auc_score(Y, probs, average=None)
    assert [row["f1"] for row in scores.by_target] == pytest.approx(f1)
    assert [row["auroc"] for row in scores.by_target] == pytest.approx(auroc)
    assert [row["target"] for row in scores.by_target] == [0, 1, 2]
    assert "exact_match" not in scores.by_target[0]
    low, high = scores.intervals["ensemble"]["macro_f1"]
    assert low < expected["macro_f1"] < high
    member = probs_of()[1] > 0.5
    assert scores.members[1]["exact_match"] == sklearn_metrics.accuracy_score(Y, member)


def test_a_label_without_ones_does_not_count():
    labels = Y.copy()
    labels[:, 1] = 0
    outputs = OUTPUTS.copy()
    outputs[:, :, 1] = -4  # Label 1 is never predicted either.
    ensemble, state = tabled(outputs, losses.multilabel(LABELS))
    scores = de.evaluate(ensemble, state, data_of(labels), metrics=["auroc"])
    probs, others = probs_of(outputs).mean(0), [0, 2]
    f1 = sklearn_metrics.f1_score(labels[:, others], probs[:, others] > 0.5, average="macro")
    precision = sklearn_metrics.average_precision_score(labels[:, others], probs[:, others])
    auroc = sklearn_metrics.roc_auc_score(labels[:, others], probs[:, others])
    found = [scores.ensemble[name] for name in ("macro_f1", "average_precision", "auroc")]
    assert found == pytest.approx([f1, precision, auroc], abs=1e-6)
    assert "f1" not in scores.by_target[1]
    assert scores.by_target[1]["nll"] == pytest.approx(np.log1p(np.exp(-4)), rel=1e-5)


def test_weights_are_those_of_examples():
    ensemble, state = tabled(OUTPUTS, losses.multilabel(LABELS))
    counts = np.arange(ROWS) % 3
    data = data_of(Y)
    weighted = de.evaluate(ensemble, state, data | {"weights": counts.astype(np.float32)})
    repeated = {name: np.repeat(leaf, counts, axis=0) for name, leaf in data.items()}
    expected = de.evaluate(ensemble, state, repeated)
    assert weighted.ensemble == pytest.approx(expected.ensemble, rel=1e-5)


def test_one_temperature_is_fitted_for_all_labels():
    ensemble, state = tabled(OUTPUTS, losses.multilabel(LABELS))
    data = data_of(Y.astype(bool))
    calibration = de.calibrate(ensemble, state, data)
    pooled = probs_of().mean(0)
    log_odds = np.log(pooled) - np.log1p(-pooled)

    def nll(temperature):
        p = expit(log_odds / temperature)
        return -np.log(np.where(Y, p, 1 - p)).mean()

    best = minimize_scalar(nll, bounds=(0.1, 10), options={"xatol": 1e-7}, method="bounded").x
    assert calibration.parameters["temperature"] == pytest.approx(best, rel=1e-4)
    prediction = ensemble.predict(state, data["inputs"], calibration=calibration)
    p = expit(log_odds / best)
    np.testing.assert_allclose(prediction.mean, p, rtol=1e-4)
    entropy = -p * np.log(p) - (1 - p) * np.log(1 - p)
    np.testing.assert_allclose(prediction.total, entropy, rtol=1e-3)
    with pytest.raises(UserError, match="'vector' does not fit MultiLabel predictions"):
        de.calibrate(ensemble, state, data, method="vector")


def test_conformal_sets_hold_each_label():
    random = np.random.default_rng(1)
    count = 3000
    network = (lambda key: jnp.zeros(()), lambda params, x: x + params)
    ensemble = de.Ensemble(network, optax.sgd(0.1), losses.multilabel(3), num_members=2)

    def drawn():
        x = random.normal(size=(count, 3)).astype(np.float32)
        # The members are too certain of the first label, and too uncertain of the last one.
        labels = random.random((count, 3)) < expit(x * [0, 1, 5])
        return {"inputs": x, "labels": labels}

    state = ensemble.init(drawn())
    calibration = de.calibrate(ensemble, state, drawn(), conformal="lac", level=0.8)
    calibration = type(calibration).from_dict(json.loads(json.dumps(calibration.to_dict())))
    new = drawn()
    sets = ensemble.predict(state, new["inputs"], calibration=calibration).sets
    assert sets.shape == (count, 3, 2)
    holds = np.where(new["labels"], sets[..., 1], sets[..., 0])
    # The deviation of a share of 3000 and of a rule of 3000 is sqrt(2 * 0.16 / 3000) = 0.0103.
    np.testing.assert_allclose(holds.mean(axis=0), 0.8, atol=0.035)


def test_mixup_and_label_smoothing_take_probabilities_of_one():
    objective = losses.multilabel(2)
    info = methods.LossInfo(jax.random.key(0), jax.random.key(1), 0, None, objective)

    def labels_of(params, state, batch, info):
        return batch["labels"], (state, {})

    batch = {"inputs": jnp.zeros((2, 1)), "labels": jnp.array([[1, 0], [1, 1]])}
    smooth = methods.label_smoothing(0.2)(labels_of)({}, {}, batch, info)[0]
    np.testing.assert_allclose(smooth, [[0.9, 0.1], [0.9, 0.9]], rtol=1e-6)
    mixed = np.asarray(methods.mixup(0.5)(labels_of)({}, {}, batch, info)[0])
    np.testing.assert_allclose(mixed[:, 0], 1, rtol=1e-6)
    assert mixed[:, 1].sum() == pytest.approx(1)


def test_labels_that_are_not_0_or_1_are_refused():
    x = np.eye(8, dtype=np.float32)
    ensemble, _ = tabled(np.zeros((1, 8, 2), np.float32), losses.multilabel(2))
    for labels, told in (
        (np.full((8, 2), 2), r"The labels lie in \[2, 2\], and the objective has 2 classes"),
        (np.full((8, 2), 1.5), r"lie in \[1.5, 1.5\], and multilabel has labels that are 0 or 1"),
        (np.ones(8, int), "has 2 targets"),
    ):
        with pytest.raises(UserError, match=told):
            de.fit(ensemble, {"inputs": x, "labels": labels}, steps=1, progress=False)
    with pytest.raises(UserError, match="whole numbers from 0 to 3 in 2 columns of labels"):
        source_of_arrays(
            (x, np.full((8, 2), 3) * (x[:, :2] > 0).astype(int)), (x, np.ones((8, 2), int))
        )


def test_a_source_tells_labels_from_text():
    x = np.arange(16, dtype=np.int32).reshape(8, 2)
    source = source_of_arrays((x, Y[:8] > 0), (x, Y[:8] > 0))
    spec = source.spec
    assert (spec.label_shape, spec.num_classes, spec.num_targets) == ((3,), 2, 3)
    assert spec.example["labels"].dtype == np.int32
    assert str(spec) == "int32[2] with 3 labels each"
    # The inputs of a text are checked to be classes; these are not.
    np.testing.assert_array_equal(convert_inputs(spec, x, "x"), x)
    assert Spec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    found = make_objective(LossConfig(name="multilabel"), spec.num_classes, spec.num_targets)
    assert (found.name, found.num_outputs) == ("multilabel", 3)
    with pytest.raises(UserError, match=r"Try multilabel. If the rows are one-hot, save argmax"):
        make_objective(LossConfig(name="categorical"), spec.num_classes, spec.num_targets)
    with pytest.raises(UserError, match=r"'multilabel' does not fit .* classes. Try categorical"):
        make_objective(LossConfig(name="multilabel"), 3)


def test_a_run_from_a_config_takes_several_labels(tmp_path):
    random = np.random.default_rng(2)
    x = random.normal(size=(300, 4)).astype(np.float32)
    y = x[:, :2] + 0.5 * random.normal(size=(300, 2)) > 0.3
    np.savez(tmp_path / "labels.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", x[:7])
    workdir = tmp_path / "run"
    config = {
        "steps": 60,
        "num_members": 4,
        "data.source": f"npz:{tmp_path}/labels.npz",
        "data.std": 1.0,
        "data.validation": 0.3,
        "data.global_batch_size": 32,
        "loss.name": "multilabel",
        "evaluation.metrics": "auroc",
    }
    flags = [f"--config.{name}={value}" for name, value in config.items()]
    for words in (
        ("train", "--config=configs/digits.py", *flags),
        ("evaluate", "--calibration=temperature", "--conformal=lac"),
        (
            *("predict", f"--input={tmp_path}/x.npy", f"--output={tmp_path}/p.npz"),
            *("--calibrated", "--conformal=0.8"),
        ),
    ):
        ended = dist_ens(*words, f"--workdir={workdir}")
        assert ended.returncode == 0, ended.stderr
    run = de.load(workdir)
    prediction = run.predict(x[:7], calibrated=True, conformal=0.8)
    with np.load(tmp_path / "p.npz") as found:
        np.testing.assert_allclose(found["probs"], prediction.mean, rtol=1e-5)
        np.testing.assert_array_equal(found["sets"], prediction.sets)
        assert found["member_probs"].shape == (4, 7, 2)
    scores = run.evaluate({"inputs": x, "labels": y})
    probs = run.predict(x).mean
    auroc = sklearn_metrics.roc_auc_score(y, probs)
    assert scores.ensemble["auroc"] == pytest.approx(auroc, abs=1e-6)
    assert scores.ensemble["exact_match"] > 0.5
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["by_target"][1]["auroc"] > 0.8
    by_size = json.loads((workdir / "curves.json").read_text())["score_against_members"]
    assert by_size["nll"]["mean"][-1] == pytest.approx(summary["test"]["nll"], rel=1e-5)
    page = (workdir / "report.html").read_text()
    assert "<h2>Targets</h2>" in page
    assert "macro F1" in page
