"""Real targets far from zero: no question is answered with fewer digits than another."""

import functools
import math

import jax
import numpy as np
import pytest
from scipy.stats import norm

from commands import dist_ens
from dist_ens.data import ArraySplit, Spec, Standardization
from dist_ens.evaluation import Evaluator, curves_of
from dist_ens.evaluation.fit_calibration import (
    calibrated_scores,
    conformal_scores,
    fit_map,
    fit_rule,
)
from dist_ens.evaluation.out_of_bag import held_out_scores
from dist_ens.experiment import Experiment, open_source
from dist_ens.experiment.assessment import EvaluationRequest, assess
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.train import train
from dist_ens.layout import Layout
from dist_ens.losses import Categorical
from scored import linear_members
from test_load import write_table

OFFSET = 1e8
UNIT = 2.0


@functools.cache
def linear(num_outputs):
    """Three random linear members, their outputs for 40 examples in float64, and the examples."""
    layout = Layout.make(3, ensemble_axis=1, devices=jax.devices()[:2])
    ensemble, state, weights = linear_members(layout, num_outputs)
    inputs = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
    return ensemble, state, np.einsum("nf,mfc->mnc", inputs, weights), inputs


def standardised(inputs, targets):
    """What a table's source yields of targets OFFSET + UNIT * targets."""
    given = Standardization(((0.0,) * 4,), ((1.0,) * 4,), (OFFSET,), (UNIT,))
    return Spec((4,), "float32", (), None, 1, given), ArraySplit(inputs, np.float32(targets))


def test_questions_about_targets_far_from_zero_have_the_answers_of_float64():
    ensemble, state, outputs, inputs = linear(2)
    targets = np.random.default_rng(1).normal(size=40)
    spec, split = standardised(inputs, targets)
    evaluator = Evaluator(ensemble, 8, spec)
    # float32 has steps of 8 at 1e8, four units of these targets. In float64 and the target's unit:
    mean = outputs[..., 0].mean(0)
    variance = (np.log1p(np.exp(outputs[..., 1])) + 1e-6 + outputs[..., 0] ** 2).mean(0) - mean**2
    own_mean, own_variance = OFFSET + UNIT * mean, UNIT**2 * variance

    predicted = evaluator.predict(state, inputs)
    assert predicted["mean"].dtype == predicted["member_variance"].dtype == np.float64
    np.testing.assert_allclose(predicted["mean"] - OFFSET, UNIT * mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(predicted["variance"], own_variance, rtol=1e-5)

    own_targets = OFFSET + UNIT * targets
    rmse = np.sqrt(np.mean((own_targets - own_mean) ** 2))
    scores = evaluator.evaluate(state, split).scores().ensemble
    assert scores["rmse"] == pytest.approx(rmse, rel=1e-5)
    # All examples were left out by members 0 and 1: scores are those of the mixture of these two.
    of_two = outputs[:2, :, 0].mean(0)
    left_out = np.repeat([[True], [True], [False]], 40, axis=1)
    held_out = held_out_scores(evaluator, state, split, left_out)["scores"]
    rmse_of_two = UNIT * np.sqrt(np.mean((targets - of_two) ** 2))
    assert held_out["rmse"] == pytest.approx(rmse_of_two, rel=1e-5)

    fitted = fit_map("variance", evaluator, state, split)
    calibrated = calibrated_scores(fitted, evaluator, state, split)
    scale = np.mean((targets - mean) ** 2 / variance)
    assert calibrated["parameters"]["scale"] == pytest.approx(scale, rel=1e-5)
    nll = -norm.logpdf(own_targets, own_mean, np.sqrt(scale * own_variance)).mean()
    assert calibrated["test"]["nll"] == pytest.approx(nll, rel=1e-5)

    rule = fit_rule("cqr", 0.8, evaluator, state, split)
    found = conformal_scores(rule, 0.8, evaluator, state, split)
    # The 33rd smallest of 40 scores, ceil(41 * 0.8), moves the ends of mean -+ 1.2816 deviations.
    half = norm.ppf(0.9) * np.sqrt(own_variance)
    margin = np.sort(np.abs(own_targets - own_mean) - half)[32]
    assert found["coverage"] == pytest.approx(33 / 40)
    assert found["mean_width"] == pytest.approx(2 * np.mean(half + margin), rel=1e-5)
    low, high = found["interval"]["mean_width"]
    assert low < found["mean_width"] < high


@pytest.mark.slow
def test_the_hardest_targets_are_shown_in_their_own_unit():
    ensemble, state, outputs, inputs = linear(2)
    spec, split = standardised(inputs, np.linspace(-1, 1, 40))
    evaluation = Evaluator(ensemble, 8, spec).evaluate(state, split, by_size=True)
    hardest = curves_of(evaluation)["hardest"][0]
    at = hardest["index"]
    label, mean = np.linspace(-1, 1, 40)[at], outputs[:, at, 0].mean()
    assert hardest["label"] - OFFSET == pytest.approx(UNIT * label, abs=1e-6)
    assert hardest["prediction"] - OFFSET == pytest.approx(UNIT * mean, abs=1e-5)
    assert hardest["variance"] == pytest.approx(UNIT**2 * evaluation.groups["variance"][0, at])
    assert hardest["nll"] == pytest.approx(evaluation.groups["nll"][0, at] + math.log(UNIT))


def test_a_probability_too_small_for_float32_is_scored_the_same_by_every_question():
    # Of logits so far apart the label's probability is about e^-800: 0 in float32 and in float64.
    ensemble, state, outputs, inputs = linear(3)
    params = {"w": np.float32(2000) * np.asarray(state.params["w"])}
    state = state._replace(params=ensemble.layout.put(params, "members"))
    labels = outputs.mean(0).argmin(-1).astype(np.int32)
    split, spec = ArraySplit(inputs, labels), Spec((4,), "float32", (), 3)
    evaluator = Evaluator(ensemble, 8, spec, Categorical())
    plain = evaluator.evaluate(state, split).scores().ensemble
    assert 745 < plain["nll"] < math.inf
    held_out = held_out_scores(evaluator, state, split, np.ones((3, 40), bool))["scores"]
    for name in ("nll", "accuracy", "brier"):
        assert held_out[name] == pytest.approx(plain[name], rel=1e-5)


def test_a_run_on_targets_far_from_zero_differs_by_the_offset_alone(tmp_path):
    answers, predictions, left_out = [], [], []
    # The mean and the deviation of the training rows have no rounding in float64.
    random = np.random.default_rng(1)
    x = random.normal(size=(96, 2))
    targets = np.round(64 * (3 * x[:, 0] - x[:, 1] + random.normal(size=96))) / 64
    for offset in (0.0, OFFSET):
        folder, path = tmp_path / f"{offset:g}", tmp_path / f"{offset:g}.npz"
        write_table(path, x, targets + offset, *np.split(np.arange(96), [64]))
        source = {"source": f"uci:{path}", "global_batch_size": 16}
        source |= {"validation": 0.25, "examples": "kfold", "num_folds": 2}
        values = {"num_members": 4, "steps": 40, "steps_per_call": 20, "execution": "vmap"}
        values |= {"data": source, "loss": {"name": "gaussian"}}
        values |= {"model": {"name": "mlp", "hidden_sizes": (8,)}}
        values |= {"optimizer": {"learning_rate": 0.05}, "checkpoint": {"every_steps": 1000}}
        config = Experiment.from_dict(values)
        train(config, folder)
        run, ensemble, state, *_ = open_finished(folder)
        evaluator, opened = run.evaluator(ensemble), open_source(config.data)
        asked = {"calibration": "variance", "conformal": "cqr", "out_of_bag": True}
        for questions in (EvaluationRequest(**asked), EvaluationRequest(conformal="cv+")):
            answers.append(assess(run, evaluator, state, opened, questions).to_dict())
        predictions.append(evaluator.predict(state, x[64:]))
        written = folder / "p.npz"
        ended = dist_ens("predict", f"--workdir={folder}", "--out_of_bag", f"--output={written}")
        assert ended.returncode == 0, ended.stderr
        left_out.append(dict(np.load(written)))
    near, _, far, _ = answers
    assert answers[2:] == answers[:2]
    for near_to, far_off in (predictions, left_out):
        assert far_off.keys() == near_to.keys()
        for name, values in far_off.items():
            shift = OFFSET if name.endswith("mean") else 0.0
            np.testing.assert_allclose(values - shift, near_to[name], atol=1e-6, rtol=0)
    # What is predicted is what is scored.
    (here, there), targets = predictions, targets[64:]
    nll = -norm.logpdf(targets + OFFSET, there["mean"], np.sqrt(there["variance"])).mean()
    assert far["test"]["nll"] == pytest.approx(nll, rel=1e-5)
    rmse = np.sqrt(np.mean((targets - here["mean"]) ** 2))
    assert near["test"]["rmse"] == pytest.approx(rmse, rel=1e-5)
