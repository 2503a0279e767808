"""Scores, against cases worked by hand and against scikit-learn."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm
from sklearn.metrics import (
    accuracy_score,
    log_loss,
    mean_absolute_error,
    root_mean_squared_error,
)

from dist_ens.metrics import (
    classification_scores,
    classification_sums,
    mixture_log_probs,
    mixture_moments,
    regression_scores,
    regression_sums,
)

pytestmark = pytest.mark.quick


def scores(probs, labels, mask=None):
    labels = np.asarray(labels)
    mask = np.ones(labels.shape[:1], bool) if mask is None else np.asarray(mask)
    sums = classification_sums(jnp.log(jnp.asarray(probs, jnp.float32)), labels, mask)
    return classification_scores(jax.device_get(sums))


def test_a_case_worked_by_hand():
    # Two examples, three classes, labels 0 and 2.
    #   nll:   -(ln 0.7 + ln 0.2) / 2 = (0.356675 + 1.609438) / 2 = 0.983056
    #   brier: (0.09 + 0.04 + 0.01 + 0.25 + 0.09 + 0.64) / 2 = 1.12 / 2 = 0.56
    #   ece:   confidences 0.7 and 0.5 in bins of their own, right and wrong: (0.3 + 0.5) / 2 = 0.4
    got = scores([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]], [0, 2])
    assert got == pytest.approx(
        {"accuracy": 0.5, "nll": 0.983056, "brier": 0.56, "ece": 0.4}, abs=1e-6
    )


def test_masked_rows_do_not_count_whatever_they_hold():
    probs = [[0.7, 0.2, 0.1], [np.nan, np.nan, np.nan], [0.5, 0.3, 0.2]]
    got = scores(probs, [0, 1, 2], [True, False, True])
    assert got == pytest.approx(scores([probs[0], probs[2]], [0, 2]))
    with pytest.raises(ValueError, match="at least one example"):
        scores(probs[:1], [0], [False])


def test_probabilities_of_exactly_0_and_1():
    assert scores([[1.0, 0.0]], [0]) == {"accuracy": 1.0, "nll": 0.0, "brier": 0.0, "ece": 0.0}
    assert scores([[1.0, 0.0]], [1]) == {"accuracy": 0.0, "nll": np.inf, "brier": 2.0, "ece": 1.0}


def test_sums_over_batches_are_the_scores_of_the_whole():
    random = np.random.default_rng(0)
    probs = random.dirichlet(np.ones(7), 500)
    labels = random.integers(0, 7, 500)
    whole = scores(probs, labels)
    assert whole["accuracy"] == pytest.approx(accuracy_score(labels, probs.argmax(1)))
    assert whole["nll"] == pytest.approx(log_loss(labels, probs, labels=range(7)), rel=1e-6)
    total = None
    for part in np.split(np.arange(500), [130, 400]):
        sums = classification_sums(
            jnp.log(jnp.float32(probs[part])), labels[part], np.ones(len(part), bool)
        )
        total = sums if total is None else jax.tree.map(np.add, total, sums)
    assert classification_scores(total) == pytest.approx(whole, rel=1e-6)


def test_the_calibration_error_is_the_textbooks():
    random = np.random.default_rng(1)
    probs = random.dirichlet(np.full(4, 0.5), 1000)
    labels = random.integers(0, 4, 1000)
    confidence, right = probs.max(1), probs.argmax(1) == labels
    edges = np.linspace(0, 1, 16)
    expected = 0.0
    for low, high in itertools.pairwise(edges):
        here = (confidence > low) & (confidence <= high)
        if here.any():
            expected += here.mean() * abs(right[here].mean() - confidence[here].mean())
    assert scores(probs, labels)["ece"] == pytest.approx(expected, abs=1e-6)


def test_a_confidence_on_the_edge_belongs_to_the_bin_below():
    # 9/15 and 0.58 share the bin (8/15, 9/15]: one right of two. 0.62 is alone, and right.
    # (|1 - (0.6 + 0.58)| + |1 - 0.62|) / 3 = 0.56 / 3 = 0.186667
    got = scores([[p, 1 - p] for p in (0.6, 0.58, 0.62)], [0, 1, 0])
    assert got["ece"] == pytest.approx(0.186667, abs=1e-5)


def test_labels_at_every_position_are_all_counted():
    probs = np.full((2, 3, 2), 0.5)
    probs[0, 1] = [0.75, 0.25]
    got = scores(probs, np.zeros((2, 3), int), [True, False])
    assert got["nll"] == pytest.approx(-(2 * np.log(0.5) + np.log(0.75)) / 3, rel=1e-6)


def test_probabilities_are_averaged_not_logits():
    member_probs = np.array([[[0.9, 0.1]], [[0.5, 0.5]]])
    mixture = np.exp(mixture_log_probs(jnp.log(jnp.float32(member_probs))))
    np.testing.assert_allclose(mixture, [[0.7, 0.3]], rtol=1e-6)
    one = jnp.log(jnp.float32(member_probs[:1]))
    np.testing.assert_allclose(mixture_log_probs(one), one[0], rtol=1e-6)


def normal_scores(means, variances, targets, mask=None, unit=1.0):
    means, variances, targets = (jnp.asarray(v, jnp.float32) for v in (means, variances, targets))
    mask = np.ones(targets.shape, bool) if mask is None else np.asarray(mask)
    sums = jax.jit(regression_sums)(means, variances, targets, mask)
    return regression_scores(jax.device_get(sums), unit)


def test_a_mixture_of_normals_worked_by_hand():
    # Members N(0, 1) and N(2, 1), target 1: the mixture's mean is 1, its variance 1 + 1 = 2.
    #   rmse = mae = 0;  nll = ln(2 pi 2) / 2 = 1.265512
    #   mixture_nll = -ln phi(1) = 1.418939, for both densities are the same there
    #   crps: E|X - y| = 2 phi(1) + (2 Phi(1) - 1) = 0.483941 + 0.682689 = 1.166631; of the pairs
    #   two are N(0, 2), E = sqrt(2) * 0.797885 = 1.128379, two N(+-2, 2), z = sqrt(2):
    #   2 * 0.842701 + 2 * sqrt(2) * 0.146763 = 2.100511; minus half their mean: 0.807222
    got = normal_scores([[0.0], [2.0]], [[1.0], [1.0]], [1.0])
    expected = {"rmse": 0, "mae": 0, "nll": 1.265512, "mixture_nll": 1.418939, "crps": 0.359408}
    assert got == pytest.approx(expected, abs=1e-6)


def test_one_normal_is_scored_by_its_textbook_formulas():
    # N(1, 4), target 3: z = 1. nll = ln(2 pi 4) / 2 + 1/2;
    # crps = 2 (1 (2 Phi(1) - 1) + 2 phi(1) - 1/sqrt(pi)) = 2 (0.682689 + 0.483941 - 0.564190)
    got = normal_scores([[1.0]], [[4.0]], [3.0])
    expected = {"rmse": 2, "mae": 2, "nll": 2.112086, "mixture_nll": 2.112086, "crps": 1.204882}
    assert got == pytest.approx(expected, abs=2e-6)
    # The same in a unit ten times as small: lengths times 10, a density a tenth.
    larger = normal_scores([[1.0]], [[4.0]], [3.0], unit=10.0)
    assert larger == pytest.approx(
        {"rmse": 20, "mae": 20, "nll": 4.414671, "mixture_nll": 4.414671, "crps": 12.04882},
        abs=2e-5,
    )


def test_scores_of_random_mixtures_are_those_of_other_libraries():
    random = np.random.default_rng(2)
    means = random.normal(size=(4, 30)).astype(np.float32)
    variances = random.uniform(0.05, 3, (4, 30)).astype(np.float32)
    targets = (2 * random.normal(size=30)).astype(np.float32)
    got = normal_scores(means, variances, targets)
    mean = means.mean(0, dtype=np.float64)
    assert got["rmse"] == pytest.approx(root_mean_squared_error(targets, mean), abs=1e-6)
    assert got["mae"] == pytest.approx(mean_absolute_error(targets, mean), abs=1e-6)
    scale = np.sqrt(variances, dtype=np.float64)
    density = norm.pdf(targets, means, scale).mean(0)
    assert got["mixture_nll"] == pytest.approx(-np.log(density).mean(), abs=1e-6)
    crps = []
    for k, target in enumerate(targets):

        def squared_gap(t, k=k, target=target):
            return (norm.cdf(t, means[:, k], scale[:, k]).mean() - (t >= target)) ** 2

        crps.append(quad(squared_gap, -30, target)[0] + quad(squared_gap, target, 30)[0])
    assert got["crps"] == pytest.approx(np.mean(crps), abs=1e-6)


def test_targets_that_are_masked_do_not_count_whatever_is_predicted():
    means, variances = [[0.0, np.nan], [1.0, 1.0]], [[1.0, -1.0], [1.0, np.inf]]
    got = normal_scores(means, variances, [0.5, 7.0], [True, False])
    assert got == pytest.approx(normal_scores([[0.0], [1.0]], [[1.0], [1.0]], [0.5]))
    with pytest.raises(ValueError, match="at least one example"):
        normal_scores(means, variances, [0.5, 7.0], [False, False])


def test_members_that_agree_far_from_zero_keep_their_variance():
    # float32 has 7 digits: the mean of squares would leave nothing of a variance of 1e-4 at 1000.
    mean, variance = mixture_moments(jnp.full((3, 1), 1000.0), jnp.full((3, 1), 1e-4))
    assert (float(mean[0]), float(variance[0])) == pytest.approx((1000.0, 1e-4), rel=1e-6)
