"""Scores of rankings, against cases worked by hand, scikit-learn and slow loops."""

import itertools

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from dist_ens.metrics.ranking import (
    area_under_risk_coverage,
    detection_scores,
    risk_at_coverage,
    risk_coverage_curve,
)
from dist_ens.metrics.resampling import bootstrap_weights

pytestmark = pytest.mark.quick


def rows(seed, count, decimals=None):
    """Random confidences, with ties if they are rounded, and a loss of each."""
    random = np.random.default_rng(seed)
    confidence = random.normal(size=count)
    errors = random.exponential(size=count) * (random.uniform(size=count) > 0.3)
    return (confidence if decimals is None else confidence.round(decimals)), errors


def slow_area(confidence, errors):
    mean = {c: errors[confidence == c].mean() for c in set(confidence)}
    total, area = 0.0, 0.0
    for k, c in enumerate(sorted(confidence, reverse=True), start=1):
        total += mean[c]
        area += total / k
    return area / len(errors)


def slow_risk(confidence, errors, percent):
    """Every row as 100 parts of a row, so that a share of `percent` % is whole."""
    mean = {c: errors[confidence == c].mean() for c in set(confidence)}
    parts = [mean[c] for c in sorted(confidence, reverse=True) for _ in range(100)]
    return np.mean(parts[: percent * len(errors)])


def sklearn_detection(scores_in, scores_out, weights_in=None, weights_out=None):
    # It takes no infinite score; places in the order are as good.
    _, scores = np.unique(np.concatenate([scores_in, scores_out]), return_inverse=True)
    is_out = np.arange(len(scores)) >= len(scores_in)
    weights = None if weights_in is None else np.concatenate([weights_in, weights_out])
    false, found, _ = roc_curve(is_out, scores, sample_weight=weights, drop_intermediate=False)
    return {
        "auroc": roc_auc_score(is_out, scores, sample_weight=weights),
        "aupr": average_precision_score(is_out, scores, sample_weight=weights),
        "fpr95": false[np.argmax(found >= 0.95)],
    }


def test_an_area_under_risk_coverage_worked_by_hand():
    # From the most confident: errors 1, 0, 0, 1. Risks 1, 1/2, 1/3, 2/4: (7/3) / 4 = 0.583333
    confidence, errors = np.array([0.2, 0.9, 0.6, 0.8]), np.array([1, 1, 0, 0])
    got = area_under_risk_coverage(confidence, errors)
    assert (got, type(got)) == (pytest.approx(0.583333, abs=1e-6), float)
    # The row 0.9 twice and 0.2 twice: 1, 1, 2/3, 2/4, 3/5, 4/6: 4.433333 / 6; nothing drawn.
    weights = np.array([[2, 2, 1, 1], [0, 0, 0, 0]], np.float32)
    got = area_under_risk_coverage(confidence, errors, weights)
    np.testing.assert_allclose(got, [4.433333 / 6, np.nan], atol=1e-6)
    assert got.dtype == np.float64


def test_ties_have_the_area_that_their_orders_have_on_average():
    confidence, errors = np.array([2, 1, 1, 1, 0, 0]), np.array([1, 0, 3, 0, 2, 0])
    orders = itertools.product(itertools.permutations([0, 3, 0]), itertools.permutations([2, 0]))
    areas = [(np.cumsum([1, *middle, *last]) / np.arange(1, 7)).mean() for middle, last in orders]
    assert area_under_risk_coverage(confidence, errors) == pytest.approx(np.mean(areas), abs=1e-12)
    assert np.ptp(areas) > 0.4  # the order matters


@pytest.mark.parametrize(
    ("count", "decimals"), [(300, None), (200, 1), (300, 0), (5, None), (1, None)]
)
def test_a_row_of_weight_w_is_w_rows(count, decimals):
    confidence, errors = rows(count, count, decimals)
    expected = slow_area(confidence, errors)
    assert area_under_risk_coverage(confidence, errors) == pytest.approx(expected, abs=1e-9)
    weights = bootstrap_weights(count, draws=20, seed=0)
    weights[0] *= 3  # a draw may be of more rows, or of fewer
    weights[1], weights[1, 0] = 0, 2
    times = weights.astype(int)
    repeated = [(np.repeat(confidence, each), np.repeat(errors, each)) for each in times]
    got = area_under_risk_coverage(confidence, errors, weights)
    np.testing.assert_allclose(got, [slow_area(*r) for r in repeated], atol=1e-9)
    for percent in (1, 37, 80, 100):
        got = risk_at_coverage(confidence, errors, percent / 100, weights)
        np.testing.assert_allclose(got, [slow_risk(*r, percent) for r in repeated], atol=1e-9)


def test_a_risk_at_coverage_worked_by_hand():
    # From the most confident: 1, then 0 and 1 tied, then 0. 1/4: the first. 1/2: the first and half
    # of each of the two, (1 + 0.5) / 2. 0.9: (1 + 1 + 0.6 * 0) / 3.6 = 0.555556
    confidence, errors = np.array([1, 2, 3, 2]), np.array([0, 0, 1, 1])
    # 1e-9: within the first row.
    risks = {1e-9: 1, 0.25: 1, 0.5: 0.75, 0.75: 2 / 3, 0.9: 0.555556, 1: 0.5}
    for coverage, expected in risks.items():
        got = risk_at_coverage(confidence, errors, coverage)
        assert (got, type(got)) == (pytest.approx(expected, abs=1e-6), float)
    # Drawn are the one of the two tied that errs, and the last thrice: 1, 0, 0, 0; then nothing.
    weights = np.array([[3, 0, 0, 1], [0, 0, 0, 0]], np.float32)
    got = risk_at_coverage(confidence, errors, 0.5, weights)
    np.testing.assert_allclose(got, [0.5, np.nan])
    assert got.dtype == np.float64


@pytest.mark.parametrize(("count", "decimals"), [(90, None), (90, 0), (1, None)])
def test_the_curve_is_the_risk_at_every_coverage(count, decimals):
    confidence, errors = rows(count, count, decimals)
    coverage, risk = risk_coverage_curve(confidence, errors)
    np.testing.assert_allclose(coverage, np.arange(101) / 100, atol=1e-12)
    expected = [slow_risk(confidence, errors, percent) for percent in range(1, 101)]
    np.testing.assert_allclose(risk[1:], expected, atol=1e-9)
    assert risk[0] == pytest.approx(errors[confidence == confidence.max()].mean())


def test_infinite_confidences_are_ranked_and_tied_with_each_other():
    # 1 and 0 tied, then 0, then 1: (1/2 + 1/2 + 1/3 + 2/4) / 4 = 0.458333
    confidence, errors = np.array([-np.inf, np.inf, 3, np.inf]), np.array([1, 1, 0, 0])
    assert area_under_risk_coverage(confidence, errors) == pytest.approx(0.458333, abs=1e-6)
    assert risk_at_coverage(confidence, errors, 0.25) == 0.5
    curve = risk_coverage_curve(confidence, errors, 5)[1]
    assert curve == pytest.approx([1 / 2, 1 / 2, 1 / 2, 1 / 3, 1 / 2])


def test_detection_scores_worked_by_hand():
    # Positives 0 and inf, the others -inf and 0.
    #   auroc: of four pairs three in order and one tied, 3.5 / 4
    #   aupr:  from inf on 1 of 1, half of the positives; from 0 on 2 of 3, the other half:
    #          1/2 + 1/2 * 2/3
    #   fpr95: both are detected from 0 on, where 1 of 2 others is
    got = detection_scores(np.array([-np.inf, 0]), np.array([0, np.inf]))
    assert got == pytest.approx({"auroc": 0.875, "aupr": 5 / 6, "fpr95": 0.5})
    assert {type(value) for value in got.values()} == {float}
    # The tied one thrice, and only the positive tied with it: 1.5 / 3 of the pairs; 1 of 4; all.
    # Then the tied one not at all: the positives are first. Then no positive, and no other.
    weights_in = np.array([[0, 3], [2, 0], [1, 1], [0, 0]], np.float32)
    weights_out = np.array([[1, 0], [1, 1], [0, 0], [1, 1]], np.float32)
    got = detection_scores(np.array([-np.inf, 0]), np.array([0, np.inf]), weights_in, weights_out)
    np.testing.assert_allclose(got["auroc"], [0.5, 1, np.nan, np.nan])
    np.testing.assert_allclose(got["aupr"], [0.25, 1, np.nan, np.nan])
    np.testing.assert_allclose(got["fpr95"], [1, 0, np.nan, np.nan])
    assert {value.dtype for value in got.values()} == {np.dtype(np.float64)}


def test_exactly_95_percent_are_enough():
    # 19 of 20 positives are 2 or more, and so are 2 of 4 others. With 1 it would be 3.
    scores_in, scores_out = np.array([0, 1.5, 2, 2.5]), np.arange(1, 21)
    assert detection_scores(scores_in, scores_out)["fpr95"] == 0.5
    # 18 of 19 are not: from 1 on.
    assert detection_scores(scores_in, scores_out[:-1])["fpr95"] == 0.75
    # However many: of 20 k positives k may be missed.
    for k in range(1, 200):
        low = np.zeros(k)
        assert detection_scores(low, np.append(low, np.ones(19 * k)))["fpr95"] == 0
        assert detection_scores(low, np.append(low, np.ones(19 * k - 1)))["fpr95"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("decimals", [None, 1, 0])
@pytest.mark.parametrize(("count_in", "count_out"), [(300, 200), (1, 50), (50, 1), (1, 1)])
def test_detection_scores_are_scikit_learns(count_in, count_out, decimals):
    random = np.random.default_rng(count_in + count_out)
    scores_in, scores_out = random.normal(size=count_in), random.normal(size=count_out) + 1
    if decimals is not None:
        scores_in, scores_out = scores_in.round(decimals), scores_out.round(decimals)
    scores_in[::7], scores_out[::7] = -np.inf, np.inf
    got = detection_scores(scores_in, scores_out)
    assert got == pytest.approx(sklearn_detection(scores_in, scores_out), abs=1e-9)
    weights_in = bootstrap_weights(count_in, draws=10, seed=1)
    weights_out = 3 * bootstrap_weights(count_out, draws=10, seed=2)
    got = detection_scores(scores_in, scores_out, weights_in, weights_out)
    for draw, weights in enumerate(zip(weights_in, weights_out, strict=True)):
        expected = sklearn_detection(scores_in, scores_out, *weights)
        assert {k: v[draw] for k, v in got.items()} == pytest.approx(expected, abs=1e-9)
