"""Scores beside those of torchmetrics and scoringrules, on random predictions and awkward ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dist_ens.losses import gaussian, normal_distribution, of_heads, pinball, squared_error
from dist_ens.metrics import (
    CLASSIFICATION,
    REGRESSION,
    Rows,
    classification_values,
    classwise_sums,
    regression_values,
    scores_of,
)
from dist_ens.metrics.ranking import detection_scores

pytestmark = pytest.mark.torch
ROWS, CLASSES = 700, 7


def probabilities(kind):
    """float32[rows, classes] and labels."""
    random = np.random.default_rng(3)
    probs = random.dirichlet(np.full(CLASSES, 0.4), ROWS)
    labels = np.array([random.choice(CLASSES, p=p) for p in probs])
    if kind == "ties":
        probs = np.round(probs * 8) + 1e-3
        probs /= probs.sum(axis=1, keepdims=True)
    elif kind == "zeros and ones":
        certain = random.random(ROWS) < 0.3
        probs[certain] = np.eye(CLASSES)[labels[certain]]
    elif kind == "a class that never comes":
        labels = np.where(labels == 2, 3, labels)
    elif kind == "float16":
        probs = np.exp(np.log(probs).astype(np.float16).astype(np.float32))
        probs /= probs.sum(axis=1, keepdims=True)
    return probs.astype(np.float32), labels


KINDS = ["random", "ties", "zeros and ones", "a class that never comes", "float16"]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_classes_are_those_of_torchmetrics(kind):
    import torch
    from torchmetrics.functional import classification as others

    probs, labels = probabilities(kind)
    log_probs = jnp.log(probs)
    mask = np.ones(ROWS, bool)
    values = jax.device_get(classification_values(log_probs, labels))
    sums = np.asarray(classwise_sums(log_probs, labels, mask))
    got = scores_of(CLASSIFICATION, Rows(values, sums))
    # The very probabilities that are scored: exp(log p) is p to rounding, and bins have edges.
    predicted = torch.from_numpy(np.array(jnp.exp(log_probs), np.float64))
    targets = torch.from_numpy(labels)
    error = functools.partial(others.binary_calibration_error, n_bins=15, norm="l1")
    by_class = [error(predicted[:, c], (targets == c).long()) for c in range(CLASSES)]
    expected = {"classwise_ece": torch.stack(by_class).mean()}
    if kind != "ties":  # of tied classes torchmetrics takes the first
        accuracy = functools.partial(others.multiclass_accuracy, average="micro")
        expected |= {
            "accuracy": accuracy(predicted, targets, CLASSES),
            "ece": others.multiclass_calibration_error(predicted, targets, CLASSES, n_bins=15),
            "top_5": accuracy(predicted, targets, CLASSES, top_k=5),
        }
    for name, value in expected.items():
        assert got[name] == pytest.approx(value.item(), abs=1e-6), name


@pytest.mark.parametrize("kind", ["random", "ties"])
def test_detection_is_that_of_torchmetrics(kind):
    import torch
    from torchmetrics.functional import classification as others

    random = np.random.default_rng(4)
    scores_in, scores_out = random.normal(size=300), random.normal(0.7, 1.2, size=200)
    if kind == "ties":
        scores_in, scores_out = np.round(scores_in * 2), np.round(scores_out * 2)
    both = np.concatenate([scores_in, scores_out])
    scaled = torch.from_numpy((both - both.min()) / (both.max() - both.min()))
    is_out = torch.arange(500) >= 300
    got = detection_scores(scores_in, scores_out)
    auroc = others.binary_auroc(scaled, is_out.long())
    aupr = others.binary_average_precision(scaled, is_out.long())
    assert got["auroc"] == pytest.approx(auroc.item(), abs=1e-6)
    assert got["aupr"] == pytest.approx(aupr.item(), abs=1e-6)
    false, found, _ = others.binary_roc(scaled, is_out.long())
    assert got["fpr95"] == pytest.approx(false[found >= 0.95 - 1e-9].min().item(), abs=1e-6)


@pytest.mark.parametrize("num_members", [1, 2, 9])
def test_scores_of_mixtures_are_those_of_scoringrules(num_members):
    import scoringrules

    random = np.random.default_rng(5)
    mean = random.normal(size=(num_members, ROWS))
    deviation = random.uniform(0.2, 2, size=(num_members, ROWS))
    targets = random.normal(size=ROWS)
    targets[:3] += 8  # far from what was said
    with jax.enable_x64(True):
        values = regression_values(
            jnp.asarray(mean), jnp.asarray(deviation**2), jnp.asarray(targets), as_one=False
        )
    got = scores_of(REGRESSION, Rows(jax.device_get(values)))
    crps = scoringrules.crps_mixnorm(targets, mean.T, deviation.T)
    nll = scoringrules.logs_mixnorm(targets, mean.T, deviation.T)
    assert got["crps"] == pytest.approx(crps.mean(), abs=1e-6)
    assert got["mixture_nll"] == pytest.approx(nll.mean(), abs=1e-6)
    if num_members == 1:
        alone = scoringrules.crps_normal(targets, mean[0], deviation[0])
        assert got["crps"] == pytest.approx(alone.mean(), abs=1e-6)


def test_the_pinball_score_is_that_of_scoringrules():
    import scoringrules

    random = np.random.default_rng(6)
    levels = (0.05, 0.5, 0.95)
    quantiles, targets = np.sort(random.normal(size=(ROWS, 3))), random.normal(size=ROWS)
    got = np.asarray(pinball(jnp.asarray(quantiles), jnp.asarray(targets), levels=levels))
    each = [
        scoringrules.quantile_score(targets, quantiles[:, i], np.full(ROWS, level))
        for i, level in enumerate(levels)
    ]
    np.testing.assert_allclose(got, np.mean(each, axis=0), atol=1e-6)


def test_losses_of_all_heads_are_those_of_scoringrules():
    import scoringrules

    random = np.random.default_rng(5)
    outputs = random.normal(size=(6, ROWS, 2)).astype(np.float32)
    targets = random.normal(size=ROWS).astype(np.float32)
    points = of_heads(squared_error(), joint="crps").losses(outputs[..., :1], targets)
    expected = scoringrules.crps_ensemble(targets, outputs[..., 0].T, estimator="nrg")
    np.testing.assert_allclose(points, expected, rtol=1e-5, atol=1e-6)
    mean, variance = map(np.asarray, normal_distribution(outputs))
    mixture = of_heads(gaussian(), joint="crps").losses(outputs, targets)
    expected = scoringrules.crps_mixnorm(targets, mean.T, np.sqrt(variance).T)
    np.testing.assert_allclose(mixture, expected, rtol=1e-5, atol=1e-6)
