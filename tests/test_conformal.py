"""Conformal sets and intervals: their coverage on fresh data, and against brute force."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import norm

from conformal_coverage import coverage_of_intervals, coverage_of_sets
from dist_ens.evaluation import conformal
from dist_ens.evaluation.conformal import (
    adaptive_scores,
    class_scores,
    conformal_quantile,
    cqr_margin,
    jackknife_plus,
    out_of_bag_means,
)
from dist_ens.ground.errors import UserError

pytestmark = pytest.mark.quick

LEVEL = 0.9
NUM_DRAWS = 200
NUM_TEST = 200


def mean_coverage(draw):
    """Over draws of calibration and test data, and its standard error."""
    coverages = [draw(np.random.default_rng(seed)) for seed in range(NUM_DRAWS)]
    return np.mean(coverages), np.std(coverages, ddof=1) / math.sqrt(NUM_DRAWS)


def assert_exact_coverage(draw, num_calibration):
    """Checks the bounds of the theorem, and the mean, which is between them."""
    mean, error = mean_coverage(draw)
    assert LEVEL - 3 * error < mean < LEVEL + 1 / (num_calibration + 1) + 3 * error
    # Of n + 1 scores in random order the new one is among the first k with probability k / (n + 1).
    exact = math.ceil((num_calibration + 1) * LEVEL) / (num_calibration + 1)
    assert abs(mean - exact) < 3 * error < 0.015


def classification(random, num_rows, num_classes=6):
    """Predictions twice as sure as they may be, and labels."""
    logits = 1.5 * random.normal(size=(num_rows, num_classes))
    labels = (logits + random.gumbel(size=logits.shape)).argmax(1)
    probs = np.exp(2 * logits)
    return probs / probs.sum(1, keepdims=True), labels


# Scores of all classes, from probabilities and one uniform number for each row.
SCORES = {
    "lac": lambda probs, u: class_scores("lac", probs, u),
    "aps": lambda probs, u: class_scores("aps", probs, u),
    "raps": lambda probs, u: class_scores("raps", probs, u),
    "raps of a high penalty": lambda probs, u: adaptive_scores(probs, u, penalty=0.3, k_reg=1),
}
every_kind_of_set = pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)


def sets_of(scores, random, probs, labels, level=LEVEL):
    """A function from probabilities to sets, calibrated on probabilities and labels."""
    of_labels = scores(probs, random.random(len(probs)))[np.arange(len(labels)), labels]
    quantile = conformal_quantile(of_labels, level)
    return lambda fresh: scores(fresh, random.random(len(fresh))) <= quantile


@pytest.mark.parametrize("level", [0.07, 0.1, 0.29, 0.5, 0.57, 0.7, 0.9, 0.95, 0.99])
def test_the_rank_is_exact_for_every_number_of_scores(level):
    exact = Fraction(str(level))
    needed = math.ceil(exact / (1 - exact))
    for n in range(1, 301):
        if n < needed:
            message = rf"{n} calibration .* level {level}, which needs {needed}\."
            with pytest.raises(UserError, match=message):
                conformal_quantile(np.arange(n), level)
        else:
            scores = np.random.default_rng(n).permutation(np.arange(1, n + 1))
            assert conformal_quantile(scores, level) == math.ceil((n + 1) * exact)


@pytest.mark.slow
@every_kind_of_set
@pytest.mark.parametrize("num_calibration", [30, 101])
def test_sets_hold_the_label_exactly_as_often_as_promised(scores, num_calibration):
    def draw(random):
        sets = sets_of(scores, random, *classification(random, num_calibration))
        probs, labels = classification(random, NUM_TEST)
        return coverage_of_sets(sets(probs), labels)

    assert_exact_coverage(draw, num_calibration)


@every_kind_of_set
def test_sets_of_predictions_with_ties_and_zeros_hold_the_label_at_least_as_often(scores):
    def tied(random, num_rows):
        # Of the three kinds of row the last is sure, and wrong 3 times of 20.
        kinds = np.array([[0.5, 0.5, 0, 0], [0.25] * 4, [1, 0, 0, 0]])
        true = np.array([[0.5, 0.4, 0.05, 0.05], [0.25] * 4, [0.85, 0.05, 0.05, 0.05]])
        kind = random.integers(3, size=num_rows)
        labels = (random.random((num_rows, 1)) > true.cumsum(1)[kind][:, :-1]).sum(1)
        return kinds[kind], labels

    def draw(random):
        sets = sets_of(scores, random, *tied(random, 40))
        probs, labels = tied(random, NUM_TEST)
        return coverage_of_sets(sets(probs), labels)

    mean, error = mean_coverage(draw)
    assert mean > LEVEL - 3 * error


@pytest.mark.parametrize(("penalty", "k_reg"), [(0.0, 0), (0.01, 5), (0.2, 2)])
def test_adaptive_scores_are_those_of_a_loop_over_rows_and_classes(penalty, k_reg):
    random = np.random.default_rng(3)
    probs, uniforms = classification(random, 60)[0], random.random(60)
    expected = np.zeros(probs.shape)
    for i, (row, u) in enumerate(zip(probs, uniforms, strict=True)):
        for c, p in enumerate(row):
            likelier = row[row > p]
            expected[i, c] = math.fsum(likelier) + u * p
            expected[i, c] += penalty * max(len(likelier) + 1 - k_reg, 0)
    got = adaptive_scores(probs, uniforms, penalty, k_reg)
    np.testing.assert_allclose(got, expected, atol=1e-12)
    # Without a penalty, or with all classes free, these are the scores of aps.
    aps = class_scores("aps", probs, uniforms)
    np.testing.assert_array_equal(adaptive_scores(probs, uniforms, 9.0, 6), aps)
    # raps has a penalty of 0.01 for each class after the fifth.
    raps = class_scores("raps", probs, uniforms)
    np.testing.assert_array_equal(adaptive_scores(probs, uniforms, 0.01, 5), raps)
    np.testing.assert_allclose(class_scores("lac", probs, uniforms), 1 - probs)


def regression(random, num_rows):
    """Normal predictions half as wide as the errors, which grow with the input."""
    inputs = random.uniform(0, 1, num_rows)
    deviation = 0.2 + inputs
    targets = np.sin(6 * inputs) + 2 * deviation * random.normal(size=num_rows)
    half = norm.ppf((1 + LEVEL) / 2) * deviation
    return np.sin(6 * inputs) - half, np.sin(6 * inputs) + half, targets


@pytest.mark.parametrize("num_calibration", [30, 101])
def test_calibrated_intervals_hold_the_target_exactly_as_often_as_promised(num_calibration):
    def draw(random):
        margin = cqr_margin(*regression(random, num_calibration), LEVEL)
        lower, upper, targets = regression(random, NUM_TEST)
        assert coverage_of_intervals(lower, upper, targets) < 0.8
        return coverage_of_intervals(lower - margin, upper + margin, targets)

    assert_exact_coverage(draw, num_calibration)


def test_a_margin_worked_by_hand():
    # [0, 10] misses 12 by 2 and -3 by 3, holds 4 with 4 to spare (-4) and 9 with 1 (-1).
    # ceil(5 * 0.8) = 4: margin 3. ceil(5 * 0.4) = 2: margin -1, which narrows.
    lower, upper, targets = np.zeros(4), np.full(4, 10.0), np.array([12.0, -3.0, 4.0, 9.0])
    assert cqr_margin(lower, upper, targets, 0.8) == 3.0
    assert cqr_margin(lower, upper, targets, 0.4) == -1.0


def linear_data(random, num_rows):
    inputs = np.column_stack([np.ones(num_rows), random.normal(size=(num_rows, 4))])
    noise = random.standard_t(4, size=num_rows)
    return inputs, inputs @ np.arange(5) + noise


def fitted(inputs, targets):
    return np.linalg.lstsq(inputs, targets, rcond=None)[0]


@pytest.mark.slow
@pytest.mark.parametrize("num_folds", [5, 30, None], ids=["cv+", "jackknife+", "after bootstrap"])
def test_intervals_of_refitted_models_hold_the_target_about_as_often_as_asked(num_folds):
    def draw(random):
        inputs, targets = linear_data(random, 30)
        fresh, fresh_targets = linear_data(random, NUM_TEST)
        if num_folds is None:
            bags = random.integers(30, size=(25, 30))
            left_out = np.array([~np.isin(np.arange(30), bag) for bag in bags])
        else:
            folds = random.permutation(np.arange(30) % num_folds)
            left_out = folds == np.arange(num_folds)[:, None]
            bags = [np.flatnonzero(~out) for out in left_out]
        models = np.array([fitted(inputs[bag], targets[bag]) for bag in bags])
        residuals = np.abs(targets - out_of_bag_means(left_out, models @ inputs.T))
        found = jackknife_plus(residuals, left_out, models @ fresh.T, LEVEL)
        return coverage_of_intervals(*found, fresh_targets)

    mean, error = mean_coverage(draw)
    assert LEVEL - 3 * error < mean < LEVEL + 0.05


def brute_force(residuals, held_out, level):
    """By Barber et al.: `held_out` [n, rows]; floor(alpha (n + 1))-th and ceil(...)-th smallest."""
    n, alpha = len(residuals), 1 - Fraction(str(level))
    low, high = math.floor(alpha * (n + 1)), math.ceil((1 - alpha) * (n + 1))
    lower, upper = [], []
    for column in held_out.T:
        lower.append(sorted(m - r for m, r in zip(column, residuals, strict=True))[low - 1])
        upper.append(sorted(m + r for m, r in zip(column, residuals, strict=True))[high - 1])
    return lower, upper


@pytest.mark.parametrize("level", [0.5, 0.77, 0.9])
@pytest.mark.parametrize("chunk_bytes", [1, 700, 2**23])
def test_intervals_are_those_of_brute_force_whatever_the_chunk(monkeypatch, level, chunk_bytes):
    monkeypatch.setattr(conformal, "_CHUNK_BYTES", chunk_bytes)
    random = np.random.default_rng(0)
    residuals = random.exponential(size=23)
    fold, of_folds = random.integers(5, size=23), random.normal(size=(5, 11))
    got = jackknife_plus(residuals, fold == np.arange(5)[:, None], of_folds, level)
    np.testing.assert_allclose(got, brute_force(residuals, of_folds[fold], level), atol=1e-12)
    out_of_bag, of_members = random.random((12, 23)) < 0.4, random.normal(size=(12, 11))
    assert out_of_bag.any(axis=0).all()
    held_out = np.array([of_members[lacks].mean(axis=0) for lacks in out_of_bag.T])
    got = jackknife_plus(residuals, out_of_bag, of_members, level)
    np.testing.assert_allclose(got, brute_force(residuals, held_out, level), atol=1e-12)


def test_many_rows_are_predicted_in_little_memory_and_in_double():
    # All at once would be 1,000 examples * 20,000 rows * 8 bytes = 160 MB, more than once.
    random = np.random.default_rng(0)
    residuals, mask = random.random(1000), np.arange(1000) % 5 == np.arange(5)[:, None]
    predictions = random.random((5, 20_000), dtype=np.float32)
    tracemalloc.start()
    try:
        lower, upper = jackknife_plus(residuals, mask, predictions, LEVEL)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lower.shape == (20_000,)
    assert lower.dtype == upper.dtype == np.float64
    assert peak_bytes < 64e6
