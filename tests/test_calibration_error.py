"""Calibration errors, against cases worked by hand, scikit-learn and slow loops."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.calibration import calibration_curve

from dist_ens.metrics import classwise_sums
from dist_ens.metrics.calibration_error import (
    adaptive_calibration_error,
    classwise_calibration_error,
    drawn_classwise_errors,
    expected_calibration_error,
    reliability_bins,
)
from dist_ens.metrics.resampling import bootstrap_weights

pytestmark = pytest.mark.quick

ERRORS = [expected_calibration_error, adaptive_calibration_error]


def rows(seed, count, decimals=None):
    """Random confidences, with ties if they are rounded, and whether they are right."""
    random = np.random.default_rng(seed)
    confidence = random.uniform(size=count)
    correct = random.uniform(size=count) < confidence**2
    return (confidence if decimals is None else confidence.round(decimals)), correct


def slow_expected(confidence, correct, num_bins=15):
    edges = np.linspace(0, 1, num_bins + 1)
    edges[0] = -1
    total = 0.0
    for low, high in itertools.pairwise(edges):
        here = (confidence > low) & (confidence <= high)
        if here.any():
            total += here.mean() * abs(correct[here].mean() - confidence[here].mean())
    return total


def slow_adaptive(confidence, correct, num_bins=15):
    """Every row as `num_bins` parts of a row, so that a bin holds exactly `rows` parts."""
    right = {c: correct[confidence == c].mean() for c in set(confidence)}
    parts = [c for c in sorted(confidence) for _ in range(num_bins)]
    total = 0.0
    for b in range(num_bins):
        here = parts[b * len(confidence) : (b + 1) * len(confidence)]
        total += abs(np.mean([right[c] for c in here]) - np.mean(here)) / num_bins
    return total


def test_an_expected_calibration_error_worked_by_hand():
    # Bins of a half: 0.5 with 0.25, none right; 0.75 with 1.0, one right.
    #   (|0 - (0.25 + 0.5)| + |1 - (0.75 + 1)|) / 4 = (0.75 + 0.75) / 4 = 0.375
    confidence, correct = np.array([0.25, 0.75, 0.5, 1.0]), np.array([0, 1, 0, 0])
    assert expected_calibration_error(confidence, correct, num_bins=2) == pytest.approx(0.375)
    # Drawn 0, 1, 0 and 3 times: |1 - (0.75 + 3)| / 4 = 2.75 / 4; once each; nothing.
    weights = np.array([[0, 1, 0, 3], [1, 1, 1, 1], [0, 0, 0, 0]], np.float32)
    got = expected_calibration_error(confidence, correct, weights, num_bins=2)
    np.testing.assert_allclose(got, [0.6875, 0.375, np.nan])
    assert got.dtype == np.float64


def test_an_adaptive_calibration_error_worked_by_hand():
    # Two rows in three bins of 2/3 of a row, from the least confident: 2/3 of the row 0.6, wrong;
    # 1/3 of each; 2/3 of the row 0.9, right.
    #   (|-0.6 * 2/3| + |-0.6 / 3 + 0.1 / 3| + |0.1 * 2/3|) / 2 = (0.4 + 1/6 + 1/15) / 2 = 0.316667
    confidence, correct = np.array([0.9, 0.6]), np.array([1, 0])
    got = adaptive_calibration_error(confidence, correct, num_bins=3)
    assert got == pytest.approx(0.316667, abs=1e-6)
    # Drawn once and twice, a bin is a row: (0.6 + 0.6 + 0.1) / 3; not at all and three times: 0.6.
    weights = np.array([[1, 2], [0, 3], [0, 0]], np.float32)
    got = adaptive_calibration_error(confidence, correct, weights, num_bins=3)
    np.testing.assert_allclose(got, [1.3 / 3, 0.6, np.nan])
    assert got.dtype == np.float64


@pytest.mark.parametrize(
    ("count", "decimals"), [(300, None), (200, 1), (301, 2), (5, None), (1, None)]
)
def test_a_row_of_weight_w_is_w_rows(count, decimals):
    confidence, correct = rows(count, count, decimals)
    weights = bootstrap_weights(count, draws=20, seed=0)
    weights[0] *= 3  # a draw may be of more rows, or of fewer
    weights[1], weights[1, 0] = 0, 2
    for error, slow in zip(ERRORS, (slow_expected, slow_adaptive), strict=True):
        expected = slow(confidence, correct)
        assert error(confidence, correct) == pytest.approx(expected, abs=1e-9)
        times = weights.astype(int)
        expected = [slow(np.repeat(confidence, n), np.repeat(correct, n)) for n in times]
        np.testing.assert_allclose(error(confidence, correct, weights), expected, atol=1e-9)


def test_the_bins_are_scikit_learns():
    # 600 = 15 * 40 rows without ties: its quantiles part them after every 40.
    confidence, correct = rows(5, 600)
    got = reliability_bins(confidence, correct)
    accuracy, mean = calibration_curve(correct, confidence, n_bins=15)
    np.testing.assert_allclose(got["accuracy"], accuracy, atol=1e-9)
    np.testing.assert_allclose(got["confidence"], mean, atol=1e-9)
    expected = (got["count"] * np.abs(accuracy - mean)).sum() / 600
    assert expected_calibration_error(confidence, correct) == pytest.approx(expected, abs=1e-9)
    accuracy, mean = calibration_curve(correct, confidence, n_bins=15, strategy="quantile")
    expected = np.abs(accuracy - mean).mean()
    assert adaptive_calibration_error(confidence, correct) == pytest.approx(expected, abs=1e-9)


@pytest.mark.slow
def test_the_bins_are_those_of_the_sums_over_batches_on_the_edges_too():
    probs = np.float32(np.concatenate([np.arange(1, 16) / 15, rows(6, 300)[0]]))
    log_probs = jnp.log(jnp.stack([probs, 1 - probs], axis=1))
    labels = np.random.default_rng(6).integers(0, 2, len(probs))
    sums = np.asarray(classwise_sums(log_probs, labels, np.ones(len(probs), bool)))
    of_classes = np.asarray(jnp.exp(log_probs)).T
    for c, confidence in enumerate(of_classes):
        got = reliability_bins(confidence, labels == c)
        np.testing.assert_array_equal(got["count"], sums[0, c])
        np.testing.assert_allclose(got["accuracy"], sums[1, c] / sums[0, c], atol=1e-6)
        np.testing.assert_allclose(got["confidence"], sums[2, c] / sums[0, c], atol=1e-6)
    expected = [expected_calibration_error(p, labels == c) for c, p in enumerate(of_classes)]
    got = classwise_calibration_error(*sums[:3])
    assert got == pytest.approx(np.mean(expected), abs=1e-6)
    # 0.6 is 9/15, the upper edge of the ninth bin, in whichever precision it comes.
    for precise in (np.float32, np.float64):
        assert reliability_bins(np.array([0.6], precise), np.ones(1))["count"].argmax() == 8


def test_a_diagram_worked_by_hand():
    # Thirds: 0 and 0.25, one right; none; 0.75 and 1, both right.
    got = reliability_bins(np.array([0.0, 1.0, 0.25, 0.75]), np.array([0, 1, 1, 1]), num_bins=3)
    np.testing.assert_allclose(got["confidence"], [0.125, np.nan, 0.875])
    np.testing.assert_allclose(got["accuracy"], [0.5, np.nan, 1])
    np.testing.assert_array_equal(got["count"], [2, 0, 2])


@pytest.mark.parametrize("error", ERRORS)
def test_awkward_rows(error):
    confidence, _ = rows(7, 100)
    # A single row; all ties, 3 of 4 right; confidences of exactly 0 and 1, right and wrong; all
    # right, where every bin errs to the same side; a probability that rounding left above 1.
    for given, correct, expected in (
        (np.array([0.7]), [1], 0.3),
        (np.full(4, 0.7), [1, 0, 1, 1], 0.05),
        (np.array([0.0, 1.0]), [0, 1], 0),
        (np.array([0.0, 1.0]), [0, 0], 0.5),
        (confidence, np.ones(100), 1 - confidence.mean()),
        (np.float32([1.0000001]), [1], 0),
    ):
        got = error(given, np.array(correct))
        assert (got, type(got)) == (pytest.approx(expected, abs=1e-6), float)


def test_a_classwise_error_worked_by_hand():
    # Class 0: 2 rows with 0.5 together, one of the class; 2 rows with 1.5, both of it.
    #   2/4 |1/2 - 0.5/2| + 2/4 |2/2 - 1.5/2| = 0.25
    # Class 1: 4 rows with 1.0, two of the class, and an empty bin: |2/4 - 1/4| = 0.25; with 1.4:
    # |2/4 - 1.4/4| = 0.15, the mean of the two 0.2.
    count, hits = [[2, 2], [4, 0]], [[1, 2], [2, 0]]
    got = classwise_calibration_error(count, hits, [[0.5, 1.5], [1.4, 0]])
    assert (got, type(got)) == (pytest.approx(0.2), float)
    # Axes in front are kept.
    many = np.array([[[0.5, 1.5], [1.4, 0]], [[0.5, 1.5], [1.0, 0]], [[1, 2], [2, 0]]])
    got = classwise_calibration_error([count] * 3, [hits] * 3, many)
    np.testing.assert_allclose(got, [0.2, 0.25, 0], atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("num_classes", [4, pytest.param(2, marks=pytest.mark.long)])
def test_classwise_errors_are_drawn_as_resamples_of_the_rows_would_have_them(num_classes):
    random = np.random.default_rng(7)
    probs = random.dirichlet(np.full(num_classes, 0.5), 600).astype(np.float32)
    # Of class 0 there is more than they say.
    drawn = [random.choice(num_classes, p=p / p.sum()) for p in probs]
    labels = np.where(random.random(600) < 0.1, 0, drawn)
    everyone = np.ones(600, bool)

    def sums_of(rows):
        return np.asarray(classwise_sums(jnp.log(probs[rows]), labels[rows], everyone))

    rows = random.integers(0, 600, (300, 600))
    resampled = [classwise_calibration_error(*sums_of(drawn)[:3]) for drawn in rows]
    drawn = drawn_classwise_errors(sums_of(np.arange(600)), 4000, seed=0)
    assert drawn.mean() == pytest.approx(np.mean(resampled), rel=0.03)
    assert drawn.std() == pytest.approx(np.std(resampled), rel=0.15)
    other = drawn_classwise_errors(sums_of(np.arange(600)), 4000, seed=1)
    assert abs(np.corrcoef(drawn, other)[0, 1]) < 0.1


def test_a_classwise_error_that_no_resample_changes_is_drawn_as_it_is():
    log_probs = jnp.log(jnp.tile(jnp.array([[0.98, 0.02]]), (50, 1)))  # and always the other
    sums = np.asarray(classwise_sums(log_probs, np.ones(50, int), np.ones(50, bool)))
    np.testing.assert_allclose(drawn_classwise_errors(sums, 20, seed=0), 0.98, atol=1e-3)


@pytest.mark.slow
def test_the_positions_of_an_example_are_resampled_together():
    # Two examples of two positions, two classes, in one bin all: 0.5 + 0.5 and 0.5 - 0.5.
    log_probs = jnp.log(jnp.full((2, 2, 2), 0.5))
    labels = np.array([[1, 1], [0, 1]])
    for mask, expected in (([True, True], 1), ([True, False], 1), ([False, True], 0)):
        squares = classwise_sums(log_probs, labels, np.array(mask))[3]
        np.testing.assert_allclose(squares.sum(axis=1), [expected] * 2, atol=1e-6)
    apart = classwise_sums(log_probs.reshape(4, 2), labels.ravel(), np.ones(4, bool))[3]
    np.testing.assert_allclose(apart.sum(axis=1), [1, 1], atol=1e-6)  # 4 * 0.5^2
