"""Several real targets of an example: losses, scores, units, calibrations and intervals."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy.stats import norm

import dist_ens as de
from commands import dist_ens
from dist_ens import losses
from dist_ens.data import Spec, Standardization, source_of_arrays
from dist_ens.ensemble.initial_state import set_label_scale
from dist_ens.ground.errors import UserError
from dist_ens.losses.heads import of_heads
from tabled import ROWS, data_of, tabled

# softplus(RAW) + 1e-6 is 4, and that of ONE is 1.
RAW, ONE = (float(np.log(np.expm1(v - 1e-6))) for v in (4, 1))
RANDOM = np.random.default_rng(0)
TARGETS = np.stack([RANDOM.normal(size=ROWS), 100 + 7 * RANDOM.normal(size=ROWS)], axis=1)
ALONE = {
    "gaussian": losses.gaussian,
    "beta_gaussian": losses.beta_gaussian,
    "squared_error": losses.squared_error,
    "quantiles": losses.quantiles,
}


@pytest.mark.parametrize(
    ("objective", "outputs", "loss"),
    [
        # Means 1 and 7, then variances 4 and 1. Errors 2 and 3:
        # (log(8 pi) + 4 / 4) / 2 + (log(2 pi) + 9) / 2.
        (losses.gaussian(targets=2), [1, 7, RAW, ONE], (np.log(16 * np.pi**2) + 10) / 2),
        # The first NLL times 4 ** 0.5, the second times 1.
        (
            losses.beta_gaussian(0.5, targets=2),
            [1, 7, RAW, ONE],
            np.log(8 * np.pi) + 1 + (np.log(2 * np.pi) + 9) / 2,
        ),
        (losses.squared_error(targets=2), [1, 7], 4 + 9),
        # Quantiles 0, 1, 2 of target 3 (see test_objectives): 2.2 / 3; 10, 11, 12 of 10:
        # (0.9 * 0 + 0.5 * 1 + 0.1 * 2) / 3.
        (
            losses.quantiles((0.1, 0.5, 0.9), targets=2),
            [0, 10, 1, 11, 2, 12],
            (2.2 + 0.7) / 3,
        ),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_loss_of_an_example_is_the_sum_over_its_targets(objective, outputs, loss):
    outputs, labels = jnp.array([outputs], jnp.float32), jnp.array([[3.0, 10.0]])
    assert objective.num_outputs == outputs.shape[-1]
    np.testing.assert_allclose(objective.example_loss(outputs, labels), [loss], rtol=1e-5)
    [score] = objective.training_scores(outputs, labels)["squared_error"]
    medians = {"quantiles": (4 + 1) / 2}  # 3 - 1 and 10 - 11; the others 3 - 1 and 10 - 7.
    assert float(score) == pytest.approx(medians.get(objective.name, (4 + 9) / 2))
    assert objective.distribution.predict(outputs[None]).mean.shape == (1, 2)


def outputs_of(name, members=3):
    """Outputs of members for both targets [members, ROWS, 2 k], and for each target alone."""
    random, numbers = np.random.default_rng(1), ALONE[name]().num_outputs
    centre = (TARGETS - [0, 100]) / [1, 7]
    own = centre[:, :, None] + random.normal(size=(members, ROWS, 2, numbers))
    both = np.moveaxis(own, -1, -2).reshape(members, ROWS, -1)
    return both.astype(np.float32), [own[:, :, t].astype(np.float32) for t in range(2)]


@pytest.mark.parametrize("name", ALONE)
def test_scores_of_a_target_are_those_of_the_target_alone(name):
    both, alone = outputs_of(name)
    found = {}
    for key, outputs, labels, targets in (
        ("both", both, TARGETS, 2),
        *((t, alone[t], TARGETS[:, t], None) for t in range(2)),
    ):
        objective = ALONE[name](standardize=True, targets=targets)
        ensemble, state = tabled(outputs, objective)
        data = data_of(labels)
        state = set_label_scale(ensemble.layout, state, labels, objective.label_shape)
        found[key] = de.evaluate(ensemble, state, data), ensemble.predict(state, data["inputs"])
    scores, prediction = found.pop("both")
    rows = [each.ensemble for each, _ in found.values()]
    for number, own in enumerate(rows):
        assert scores.by_target[number].pop("target") == number
        assert scores.by_target[number] == pytest.approx(own, rel=1e-5)
    sums = {n: sum(own[n] for own in rows) for n in rows[0]}
    in_nats = ("nll", "mixture_nll")
    expected = {n: total / (1 if n in in_nats else 2) for n, total in sums.items()}
    assert scores.ensemble == pytest.approx(expected, rel=1e-5)
    for number, (_, own) in found.items():
        for field in ("mean", "std", "members", "member_variance", "epistemic", "quantiles"):
            whole, part = getattr(prediction, field), getattr(own, field)
            if part is not None:
                at = (..., number, slice(None)) if field == "quantiles" else (..., number)
                np.testing.assert_allclose(np.asarray(whole)[at], part, rtol=2e-5)


def test_the_nll_is_that_of_independent_normal_distributions():
    both, (first, second) = outputs_of("gaussian")
    ensemble, state = tabled(both, losses.gaussian(targets=2))
    targets = (TARGETS - [0, 100]) / [1, 7]
    scores = de.evaluate(ensemble, state, data_of(targets))
    nll = np.zeros(ROWS)
    for outputs, labels in zip((first, second), targets.T, strict=True):
        means, raw = np.moveaxis(outputs.astype(np.float64), -1, 0)
        variance = (np.log1p(np.exp(raw)) + 1e-6).mean(0) + means.var(0)
        nll -= norm.logpdf(labels, means.mean(0), np.sqrt(variance))
    assert scores.ensemble["nll"] == pytest.approx(nll.mean(), rel=1e-6)
    error = both.astype(np.float64).mean(0)[:, :2] - targets
    expected = np.sqrt(np.square(error).mean(0)).mean()
    assert scores.ensemble["rmse"] == pytest.approx(expected, rel=1e-6)
    # Resamples draw examples with both targets: the interval of the NLL is that of these sums.
    draws = de.metrics.bootstrap_weights(ROWS, 400, 0) @ nll / ROWS
    assert scores.intervals["ensemble"]["nll"] == pytest.approx(np.quantile(draws, [0.025, 0.975]))


def test_weights_of_examples_count_all_of_their_targets():
    both, _ = outputs_of("gaussian")
    ensemble, state = tabled(both, losses.gaussian(targets=2))
    targets = (TARGETS - [0, 100]) / [1, 7]
    counts = np.arange(ROWS) % 3
    weighted = de.evaluate(
        ensemble, state, data_of(targets) | {"weights": counts.astype(np.float32)}
    )
    repeated = {n: np.repeat(leaf, counts, axis=0) for n, leaf in data_of(targets).items()}
    expected = de.evaluate(ensemble, state, repeated)
    assert weighted.ensemble == pytest.approx(expected.ensemble, rel=1e-5)
    assert weighted.by_target[1] == pytest.approx(expected.by_target[1], rel=1e-5)


def noisy(count, seed):
    """Inputs, and targets with noise of standard deviations 1 and 20 around known lines."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 2)).astype(np.float32)
    return x, np.stack([x[:, 0], 500 - 100 * x[:, 1]], 1) + random.normal(size=(count, 2)) * [1, 20]


LINEAR = lambda key: {"w": 0.1 * jax.random.normal(key, (2, 4)), "b": jnp.zeros((1, 4))}  # noqa: E731


def trained(objective, steps=200, y_scale=(1, 1)):
    x, y = noisy(400, 0)
    width = objective.num_outputs
    network = (
        lambda key: jax.tree.map(lambda leaf: leaf[..., :width], LINEAR(key)),
        lambda params, x: x @ params["w"] + params["b"],
    )
    ensemble = de.Ensemble(network, optax.adam(3e-2), objective, num_members=3)
    data = {"inputs": x, "labels": y * np.array(y_scale)}
    result = de.fit(ensemble, data, steps=steps, batch_size=80, progress=False)
    return ensemble, result.state


def test_each_target_is_standardised_by_its_own_numbers():
    ensemble, state = trained(losses.gaussian(standardize=True, targets=2))
    x, _ = noisy(400, 0)
    prediction = ensemble.predict(state, x)
    np.testing.assert_allclose(prediction.std.mean(0), [1, 20], rtol=0.15)
    wide, of_wide = trained(losses.gaussian(standardize=True, targets=2), y_scale=(1, 1000))
    other = wide.predict(of_wide, x)
    np.testing.assert_allclose(other.mean[:, 0], prediction.mean[:, 0], rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(other.mean[:, 1], 1000 * prediction.mean[:, 1], rtol=1e-3)
    with pytest.raises(UserError, match="All labels of target 1 are equal"):
        trained(losses.gaussian(standardize=True, targets=2), y_scale=(1, 0))


@pytest.mark.parametrize("make", [losses.gaussian, losses.quantiles])
def test_conformal_intervals_cover_each_target(make):
    objective = make(standardize=True, targets=2)
    x, y = noisy(3000, 1)
    network = (
        lambda key: jnp.zeros(()),
        lambda params, x: params + jnp.tile(x, objective.num_outputs // 2),
    )
    ensemble = de.Ensemble(network, optax.sgd(0.0), objective, num_members=2)
    state = de.fit(ensemble, {"inputs": x, "labels": y}, steps=1, progress=False).state
    calibration = de.calibrate(
        ensemble, state, {"inputs": x, "labels": y}, method=None, conformal="cqr", level=0.8
    )
    calibration = type(calibration).from_dict(json.loads(json.dumps(calibration.to_dict())))
    x_new, y_new = noisy(3000, 2)
    low, high = ensemble.predict(state, x_new, calibration=calibration).interval
    assert low.shape == (3000, 2)
    # The deviation of a share of 3000 and of a rule of 3000 is sqrt(2 * 0.16 / 3000) = 0.0103.
    np.testing.assert_allclose(((low <= y_new) & (y_new <= high)).mean(axis=0), 0.8, atol=0.035)


def test_variances_are_calibrated_target_by_target():
    # Variances of 1 are predicted, and the errors are ±2 and ±0.5.
    signs = np.where(np.arange(ROWS) % 2, 1.0, -1.0)
    outputs = np.tile(np.array([0, 0, ONE, ONE], np.float32), (2, ROWS, 1))
    ensemble, state = tabled(outputs, losses.gaussian(targets=2))
    data = data_of(np.stack([2 * signs, signs / 2], axis=1))
    calibration = de.calibrate(ensemble, state, data)
    np.testing.assert_allclose(calibration.parameters["scale"], [4, 0.25], rtol=1e-5)
    std = ensemble.predict(state, data["inputs"], calibration=calibration).std
    np.testing.assert_allclose(std, np.tile([2, 0.5], (ROWS, 1)), rtol=1e-5)


def test_a_source_standardises_each_target_and_tells_it():
    x, y = noisy(50, 0)
    source = source_of_arrays((x, y), (x[:10], y[:10]), standardize=True)
    spec = source.spec
    assert (spec.label_shape, spec.num_targets, spec.num_classes) == ((2,), 2, None)
    np.testing.assert_allclose(source.train.labels.mean(axis=0), [0, 0], atol=1e-6)
    np.testing.assert_allclose(source.train.labels.std(axis=0), [1, 1], rtol=1e-5)
    given = spec.standardization
    np.testing.assert_allclose(given.target_mean, [y.mean(axis=0)])
    np.testing.assert_allclose(given.of_targets(y)[0], source.train.labels, atol=1e-6)
    assert Spec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec
    with pytest.raises(UserError, match=r"one-hot rows to class numbers with argmax"):
        source_of_arrays((x, np.eye(2)[np.arange(50) % 2]), (x, y))
    with pytest.raises(UserError, match="the target 1 is constant"):
        source_of_arrays((x, y * [1, 0]), (x, y), standardize=True)
    with pytest.raises(UserError, match="finite mean and a finite, positive deviation"):
        Standardization(((),), ((),), ((1.0, 2.0),), ((1.0, 0.0),))


def test_labels_of_another_number_of_targets_are_refused():
    x, y = noisy(20, 0)
    for labels in (y[:, 0], np.stack([*y.T, y[:, 0]], axis=1)):
        network = (lambda key: jnp.zeros((2, 4)), lambda params, x: x @ params)
        ensemble = de.Ensemble(network, optax.sgd(0.1), losses.gaussian(targets=2), num_members=1)
        with pytest.raises(
            UserError, match=r"has 2 targets. Give labels of the shape \[exam.*, 2\]"
        ):
            de.fit(ensemble, {"inputs": x, "labels": labels}, steps=1, progress=False)
    with pytest.raises(UserError, match="targets is 0"):
        losses.gaussian(targets=0)


def test_members_are_chosen_by_a_score_of_all_targets():
    # RMSEs 9, (0 + 9) / 2 and (1 + 9) / 2; of the mean of the last two members (0.5 + 0) / 2.
    outputs = np.tile(np.array([[9, 9], [0, 9], [1, -9]], np.float32)[:, None], (1, ROWS, 1))
    ensemble, state = tabled(outputs, losses.squared_error(targets=2))
    data = data_of(np.zeros((ROWS, 2)))
    chosen = de.select(ensemble, state, data, size=2, metric="rmse")
    assert chosen.member_ids == (1, 2)
    assert chosen.path == pytest.approx((4.5, 0.25))
    with pytest.raises(UserError, match="Stacking follows the slope of a mean"):
        de.select(ensemble, state, data, metric="rmse", method="stacking")


def test_heads_take_several_targets():
    alone = of_heads(losses.gaussian(), joint="crps")
    both = of_heads(losses.gaussian(targets=2), joint="crps")
    outputs = jax.random.normal(jax.random.key(0), (3, 5, 2, 2))  # [heads, batch, k, targets]
    labels = jax.random.normal(jax.random.key(1), (5, 2))
    expected = sum(alone.losses(outputs[..., t], labels[:, t]) for t in range(2))
    np.testing.assert_allclose(both.losses(outputs.reshape(3, 5, 4), labels), expected, rtol=1e-5)


def test_a_run_from_a_config_takes_several_targets(tmp_path):
    x, y = noisy(300, 0)
    np.savez(tmp_path / "two.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", x[:7])
    workdir = tmp_path / "run"
    config = {
        "steps": 60,
        "num_members": 4,
        "data.source": f"npz:{tmp_path}/two.npz",
        "data.std": 1.0,
        "data.global_batch_size": 32,
        "data.validation": 0.3,
        "data.examples": "kfold",
        "data.num_folds": 2,
        "loss.name": "gaussian",
    }
    flags = [f"--config.{name}={value}" for name, value in config.items()]
    for words in (
        ("train", "--config=configs/digits.py", *flags),
        ("evaluate", "--calibration=variance", "--conformal=cv+", "--out_of_bag"),
        ("evaluate", "--conformal=cqr"),
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
        np.testing.assert_allclose(found["mean"], prediction.mean, rtol=1e-6)
        np.testing.assert_allclose(found["variance"], prediction.total, rtol=1e-5)
        np.testing.assert_allclose(found["lower"], prediction.interval[0], rtol=1e-5)
    summary = json.loads((workdir / "summary.json").read_text())
    scores = run.evaluate({"inputs": x, "labels": y})
    assert [row["target"] for row in summary["by_target"]] == [0, 1]
    assert summary["by_target"][1]["rmse"] > 5 * summary["by_target"][0]["rmse"]  # 20 and 1.
    assert scores.ensemble["rmse"] == pytest.approx(
        np.sqrt(np.square(run.predict(x).mean - y).mean(axis=0)).mean(), rel=1e-5
    )
    # Ensembles of all members are the ensemble, in each target's unit.
    by_size = json.loads((workdir / "curves.json").read_text())["score_against_members"]
    for name in ("nll", "rmse"):
        assert by_size[name]["mean"][-1] == pytest.approx(summary["test"][name], rel=1e-5)
    answers = json.loads((workdir / "answers.json").read_text())["steps"]["60"]["answers"]
    for method in ("cv+", "cqr"):
        of_targets = answers[f"conformal={method} level=0.9"]["scores"]["by_target"]
        assert [0.8 < of["coverage"] <= 1 for of in of_targets] == [True, True]
        assert of_targets[1]["mean_width"] > 5 * of_targets[0]["mean_width"]
    page = (workdir / "report.html").read_text()
    assert "<h2>Targets</h2>" in page
    assert ">target 1<" in page  # the coverage of each target
