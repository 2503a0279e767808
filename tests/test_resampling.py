"""Resamples and their intervals, against cases worked by hand, NumPy and SciPy."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from dist_ens.metrics import resampling
from dist_ens.metrics.resampling import bootstrap_weights, interval, over_draws

pytestmark = pytest.mark.quick


def test_every_draw_has_as_many_examples_as_the_split_and_comes_again_from_its_seed():
    weights = bootstrap_weights(30, draws=7, seed=0)
    assert (weights.shape, weights.dtype) == ((7, 30), np.float32)
    assert (weights == np.abs(weights.round())).all()
    assert (weights.sum(1) == 30).all()
    assert len({row.tobytes() for row in weights}) == 7
    assert bootstrap_weights(1, draws=2, seed=0).tolist() == [[1], [1]]
    assert (weights != bootstrap_weights(30, draws=7, seed=4)).any()
    # More draws begin with the same ones.
    assert (bootstrap_weights(30, draws=9, seed=0)[:7] == weights).all()


def test_counts_are_those_of_draws_with_replacement():
    # The count of an example is binomial(n, 1/n). Of 4000 draws of 50 examples its share has a
    # standard deviation of at most sqrt(0.25 / 200000) = 0.0011, and the mean count of one example
    # one of sqrt((1 - 1/50) / 4000) = 0.0157: five of each.
    weights = bootstrap_weights(50, draws=4000, seed=1)
    for count in range(5):
        assert (weights == count).mean() == pytest.approx(binom.pmf(count, 50, 1 / 50), abs=0.006)
    np.testing.assert_allclose(weights.mean(0), np.ones(50), atol=0.079)


def test_an_interval_worked_by_hand():
    # Of 0, 10, 20, 30, 40 the places 0.05 * 4 = 0.2 and 0.95 * 4 = 3.8, in any order.
    assert interval(np.array([30, 0, 40, 10, 20]), level=0.9) == pytest.approx((2, 38))
    assert interval(np.array([7.0])) == (7, 7)


@pytest.mark.parametrize("draws", [2, 37, 500])
@pytest.mark.parametrize("level", [0.5, 0.9, 0.95])
def test_intervals_are_numpys_quantiles(draws, level):
    samples = np.random.default_rng(draws).normal(size=draws)
    for values in (samples, samples.astype(np.float16)):
        expected = np.quantile(values.astype(float), [(1 - level) / 2, (1 + level) / 2])
        assert interval(values, level) == pytest.approx(tuple(expected), abs=1e-12)


def test_an_interval_may_be_infinite_and_is_nan_if_a_sample_is():
    # Places 0.25 * 2 = 0.5 and 0.75 * 2 = 1.5: between 1 and 2, and between 2 and infinity.
    assert interval(np.array([1, 2, math.inf]), level=0.5) == (1.5, math.inf)
    # 1.5 between two infinite ones; and 0.25 * 4 = 1 and 0.75 * 4 = 3 exactly, next to one.
    assert interval(np.array([1, math.inf, math.inf]), level=0.5) == (math.inf, math.inf)
    assert interval(np.array([1, 2, 3, 4, math.inf]), level=0.5) == (2, 4)
    assert all(map(math.isnan, interval(np.array([1, 2, math.nan]))))


def test_a_score_in_every_draw_does_not_depend_on_how_many_are_taken_at_a_time(monkeypatch):
    random = np.random.default_rng(0)
    left, right = random.integers(0, 4, (10, 6)), random.integers(0, 4, (10, 3))
    left[:, 0] = right[:, 0] = 1
    expected = np.stack([(left**2).sum(1), right.sum(1)], axis=1)
    sizes = []

    def score(left, right):
        sizes.append(len(left))
        return np.stack([(left**2).sum(1), right.sum(1)], axis=1)

    for size in (resampling.BLOCK_SIZE, 4 * (6 + 3), 1):  # The last is less than a draw.
        monkeypatch.setattr(resampling, "BLOCK_SIZE", size)
        np.testing.assert_array_equal(over_draws(score, (left, 6), (right, 3)), expected)
    assert sizes == [10, 4, 4, 2, *[1] * 10]


def test_without_weights_every_row_counts_once():
    def mean(weights):
        return weights @ np.array([1.0, 2.0, 6.0]) / weights.sum(1)

    got = over_draws(mean, (None, 3))
    assert (got, type(got)) == (3.0, float)
    both = over_draws(lambda *blocks: np.stack([b.sum(1) for b in blocks], 1), (None, 3), (None, 2))
    assert both.tolist() == [3, 2]


def test_a_draw_without_any_row_has_no_score():
    weights = np.array([[1, 1], [0, 0], [0, 2]])
    got = over_draws(lambda block: block @ np.array([1.0, 2.0]), (weights, 2))
    np.testing.assert_array_equal(got, [3, np.nan, 4])
