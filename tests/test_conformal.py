"""Conformal sets and intervals: their coverage on fresh data, and against brute force."""

import math
import tracemalloc
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import norm

from dist_ens.conformal import (
    aps,
    conformal_quantile,
    coverage_of_intervals,
    coverage_of_sets,
    cv_plus,
    intervals,
    jackknife_plus,
    lac,
    mean_set_size,
    mean_width,
    out_of_bag_means,
    raps,
    split_cqr,
)
from dist_ens.errors import UserError

pytestmark = pytest.mark.quick

LEVEL = 0.9
NUM_DRAWS = 200
NUM_TEST = 200


def mean_coverage(draw):
    """Over draws of calibration and test data, and its standard error."""
    coverages = [draw(np.random.default_rng(seed)) for seed in range(NUM_DRAWS)]
    return np.mean(coverages), np.std(coverages, ddof=1) / math.sqrt(NUM_DRAWS)


def classification(random, num_rows, num_classes=6):
    """Predictions twice as sure as they may be, and labels."""
    logits = 1.5 * random.normal(size=(num_rows, num_classes))
    labels = (logits + random.gumbel(size=logits.shape)).argmax(1)
    probs = np.exp(2 * logits)
    return probs / probs.sum(1, keepdims=True), labels


class Always:
    """A generator whose uniform numbers are all the same."""

    def __init__(self, value):
        self.value = value

    def random(self, shape):
        return np.full(shape, self.value)


def test_a_quantile_worked_by_hand():
    # 19 scores: ceil(20 * 0.9) = 18; 9 scores: ceil(10 * 0.9) = 9, the largest.
    scores = np.random.default_rng(0).permutation(np.arange(1.0, 20.0))
    before = scores.copy()
    assert conformal_quantile(scores, 0.9) == 18.0
    np.testing.assert_array_equal(scores, before)  # which is the caller's
    assert conformal_quantile(scores[scores < 10], 0.9) == 9.0
    assert conformal_quantile(scores, 0.5) == 10.0
    assert conformal_quantile(scores, 1e-15) == 1.0


@pytest.mark.parametrize("level", [0.07, 0.1, 0.29, 0.5, 0.57, 0.7, 0.9, 0.95, 0.99])
def test_the_rank_is_exact_for_every_number_of_scores(level):
    exact = Fraction(str(level))
    needed = math.ceil(exact / (1 - exact))
    for n in range(1, 301):
        if n < needed:
            with pytest.raises(
                UserError, match=rf"{n} calibration .* level {level}, which needs {needed}\."
            ):
                conformal_quantile(np.arange(n), level)
        else:
            assert conformal_quantile(np.arange(1, n + 1), level) == math.ceil((n + 1) * exact)


def test_a_quantile_that_cannot_be_is_refused():
    for level in (0, 1, -0.1, 90, math.nan):
        with pytest.raises(UserError, match=f"level={level} is not a coverage between 0 and 1"):
            conformal_quantile(np.arange(100), level)
    with pytest.raises(UserError, match="1 of them are not finite"):
        conformal_quantile(np.array([0.0, np.nan]), 0.5)
    with pytest.raises(UserError, match=r"shape \[2, 2\]"):
        conformal_quantile(np.zeros((2, 2)), 0.5)
    with pytest.raises(UserError, match="0 calibration examples .* level 0.5, which needs 1"):
        conformal_quantile(np.zeros(0), 0.5)


SETS = {
    "lac": lambda probs, labels, level, _: lac(probs, labels, level),
    "aps": aps,
    "raps": raps,
    "raps of a high penalty": lambda *given: raps(*given, penalty=0.3, k_reg=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", SETS.values(), ids=SETS)
@pytest.mark.parametrize("num_calibration", [30, 101])
def test_sets_hold_the_label_exactly_as_often_as_promised(make, num_calibration):
    def draw(random):
        sets = make(*classification(random, num_calibration), LEVEL, random)
        probs, labels = classification(random, NUM_TEST)
        return coverage_of_sets(sets(probs), labels)

    mean, error = mean_coverage(draw)
    assert LEVEL - 3 * error < mean < LEVEL + 1 / (num_calibration + 1) + 3 * error
    # Of n + 1 scores in random order the new one is among the first k with probability k / (n + 1).
    exact = math.ceil((num_calibration + 1) * LEVEL) / (num_calibration + 1)
    assert abs(mean - exact) < 3 * error < 0.015


@pytest.mark.parametrize("make", SETS.values(), ids=SETS)
def test_sets_of_predictions_with_ties_and_zeros_hold_the_label_at_least_as_often(make):
    def tied(random, num_rows):
        # Of the three kinds of row the last is sure, and wrong 3 times of 20.
        kinds = np.array([[0.5, 0.5, 0, 0], [0.25] * 4, [1, 0, 0, 0]])
        true = np.array([[0.5, 0.4, 0.05, 0.05], [0.25] * 4, [0.85, 0.05, 0.05, 0.05]])
        kind = random.integers(3, size=num_rows)
        labels = (random.random((num_rows, 1)) > true.cumsum(1)[kind][:, :-1]).sum(1)
        return kinds[kind], labels

    def draw(random):
        sets = make(*tied(random, 40), LEVEL, random)
        probs, labels = tied(random, NUM_TEST)
        return coverage_of_sets(sets(probs), labels)

    mean, error = mean_coverage(draw)
    assert mean > LEVEL - 3 * error


def test_lac_worked_by_hand():
    # Labels score 0.1, 0.7, 0.4 and 0.2: the ceil(5 * 0.6) = 3rd is 0.4. In are classes from 0.6.
    probs = np.array([[0.9, 0.1], [0.7, 0.3], [0.4, 0.6], [0.2, 0.8]])
    sets = lac(probs, np.array([0, 1, 1, 1]), 0.6)
    assert sets.quantile == pytest.approx(0.4)
    got = sets(np.array([[0.7, 0.3], [0.5, 0.5], [0.35, 0.65]]))
    assert got.tolist() == [[True, False], [False, False], [False, True]]


def test_aps_and_raps_worked_by_hand():
    # u = 0.25. By falling probability: 0.25 * 0.5, 0.5 + 0.25 * 0.3, 0.8 + 0.25 * 0.2;
    # of raps with k_reg 1 the second costs 0.1 more and the third 0.2.
    probs = np.array([[0.2, 0.5, 0.3]])
    sets = aps(probs, np.array([2]), 0.5, Always(0.25))
    np.testing.assert_allclose(sets.class_scores(probs), [[0.85, 0.125, 0.575]], atol=1e-12)
    assert sets.quantile == pytest.approx(0.575)
    assert sets(probs).tolist() == [[False, True, True]]
    sets = raps(probs, np.array([2]), 0.5, Always(0.25), penalty=0.1, k_reg=1)
    np.testing.assert_allclose(sets.class_scores(probs), [[1.05, 0.125, 0.675]], atol=1e-12)
    # u = 0, and 0.01 for each class after the fifth: 7/28 before the second, 13/28, 18/28, …
    probs = np.arange(7, 0, -1)[None] / 28
    expected = np.array([0, 7, 13, 18, 22, 25 + 0.28, 27 + 0.56]) / 28
    sets = raps(probs, np.array([2]), 0.5, Always(0.0))
    np.testing.assert_allclose(sets.class_scores(probs), [expected], atol=1e-12)


def test_aps_and_raps_are_those_of_a_loop_over_rows_and_classes():
    random = np.random.default_rng(3)
    probs, labels = classification(random, 60)
    fresh, _ = classification(random, 40)

    def loop(probs, uniforms, penalty, k_reg):
        scores = np.zeros(probs.shape)
        for i, (row, u) in enumerate(zip(probs, uniforms, strict=True)):
            for c, p in enumerate(row):
                likelier = row[row > p]
                scores[i, c] = math.fsum(likelier) + u * p
                scores[i, c] += penalty * max(len(likelier) + 1 - k_reg, 0)
        return scores

    cases = [(aps, {}, 0.0, 0), (raps, {}, 0.01, 5), (raps, {"penalty": 0.2, "k_reg": 2}, 0.2, 2)]
    for make, keywords, penalty, k_reg in cases:
        sets = make(probs, labels, LEVEL, np.random.default_rng(7), **keywords)
        uniforms = np.random.default_rng(7).random(100)
        of_labels = loop(probs, uniforms[:60], penalty, k_reg)[np.arange(60), labels]
        assert sets.quantile == pytest.approx(np.sort(of_labels)[55 - 1], abs=1e-12)  # 61 * 0.9
        expected = loop(fresh, uniforms[60:], penalty, k_reg) <= sets.quantile
        np.testing.assert_array_equal(sets(fresh), expected)


def test_raps_without_a_penalty_or_with_all_classes_free_is_aps():
    random = np.random.default_rng(4)
    probs, labels = classification(random, 50)
    same = [
        make(probs, labels, LEVEL, np.random.default_rng(5), **keywords)(probs)
        for make, keywords in [
            (aps, {}),
            (raps, {"penalty": 0.0, "k_reg": 0}),
            (raps, {"penalty": 9.0, "k_reg": 6}),
            (raps, {"penalty": 9.0, "k_reg": 100}),
        ]
    ]
    for sets in same[1:]:
        np.testing.assert_array_equal(sets, same[0])


def test_a_penalty_makes_no_set_of_many_classes():
    random = np.random.default_rng(6)
    probs, labels = classification(random, 500)
    sets = [
        raps(probs, labels, LEVEL, np.random.default_rng(0), penalty=penalty, k_reg=2)(probs)
        for penalty in (0.0, 1.0)
    ]
    assert sets[0].sum(1).max() > sets[1].sum(1).max()


def test_predictions_draw_on_and_the_same_seed_makes_the_same_sets():
    probs, labels = classification(np.random.default_rng(8), 200)

    def twice():
        sets = aps(probs, labels, LEVEL, np.random.default_rng(1))
        return sets(probs), sets(probs)

    (first, second), again = twice(), twice()
    assert (first != second).any()
    np.testing.assert_array_equal([first, second], again)


@pytest.mark.parametrize("make", SETS.values(), ids=SETS)
def test_sets_of_one_row_one_class_and_half_precision(make):
    random = np.random.default_rng(9)
    probs, labels = classification(random, 50)
    assert make(probs, labels, LEVEL, random)(probs[:1]).shape == (1, 6)
    half = probs.astype(np.float16)
    quantiles = [
        make(given, labels, LEVEL, np.random.default_rng(0)).quantile
        for given in (half, half.astype(np.float64))
    ]
    assert quantiles[0] == quantiles[1]  # as computed in double precision
    one = make(np.ones((1, 1)), np.zeros(1, int), 0.5, Always(0.5))
    assert one(np.ones((2, 1))).tolist() == [[True], [True]]


@pytest.mark.parametrize("make", SETS.values(), ids=SETS)
def test_sets_that_cannot_be_are_refused(make):
    random = np.random.default_rng(0)
    probs, labels = classification(random, 50)
    with pytest.raises(UserError, match=r"in \[0, 1\], and not logits or logarithms"):
        make(np.log(probs), labels, LEVEL, random)
    with pytest.raises(UserError, match=r"in \[0, 1\]"):
        make(np.where(probs == probs.max(), np.nan, probs), labels, LEVEL, random)
    with pytest.raises(UserError, match=r"Label 6 is not in \[0, 6\)"):
        make(probs, np.where(labels == 5, 6, labels), LEVEL, random)
    with pytest.raises(UserError, match=r"int64\[49\] for 50 rows"):
        make(probs, labels[1:], LEVEL, random)
    with pytest.raises(UserError, match="50 calibration .* level 0.99, which needs 99"):
        make(probs, labels, 0.99, random)
    with pytest.raises(UserError, match="at least one row"):
        make(probs[:0], labels[:0], LEVEL, random)
    with pytest.raises(UserError, match="5 classes, and the sets were calibrated on 6"):
        make(probs, labels, LEVEL, random)(probs[:, :5])


def test_a_penalty_below_0_is_refused():
    probs, labels = classification(np.random.default_rng(0), 50)
    for keywords in ({"penalty": -0.1}, {"k_reg": -1}, {"penalty": math.nan}):
        with pytest.raises(UserError, match="penalty=.* are not both finite and at least 0"):
            raps(probs, labels, LEVEL, np.random.default_rng(0), **keywords)


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
        calibrated = split_cqr(*regression(random, num_calibration), LEVEL)
        lower, upper, targets = regression(random, NUM_TEST)
        assert coverage_of_intervals(lower, upper, targets) < 0.8
        return coverage_of_intervals(*calibrated(lower, upper), targets)

    mean, error = mean_coverage(draw)
    assert LEVEL - 3 * error < mean < LEVEL + 1 / (num_calibration + 1) + 3 * error
    exact = math.ceil((num_calibration + 1) * LEVEL) / (num_calibration + 1)
    assert abs(mean - exact) < 3 * error < 0.015


def test_a_margin_worked_by_hand():
    # [0, 10] misses 12 by 2 and -3 by 3, holds 4 with 4 to spare (-4) and 9 with 1 (-1).
    # ceil(5 * 0.8) = 4: margin 3. ceil(5 * 0.4) = 2: margin -1, which narrows.
    lower, upper, targets = np.zeros(4), np.full(4, 10.0), np.array([12.0, -3.0, 4.0, 9.0])
    assert split_cqr(lower, upper, targets, 0.8).margin == 3.0
    narrower = split_cqr(lower, upper, targets, 0.4)
    assert narrower.margin == -1.0
    got_lower, got_upper = narrower(np.array([0.0, 5.0]), np.array([4.0, 6.0]))
    assert (got_lower.tolist(), got_upper.tolist()) == ([1.0, 6.0], [3.0, 5.0])
    assert mean_width(got_lower, got_upper) == 1.0  # 2, and 0 of the empty one


def test_intervals_that_cannot_be_are_refused():
    four = np.arange(4.0)
    with pytest.raises(UserError, match=r"lower\[4\], upper\[4\], targets\[3\]"):
        split_cqr(four, four, four[:3], 0.5)
    with pytest.raises(UserError, match="1 of 4 numbers in upper are NaN"):
        split_cqr(four, np.array([0, 1, np.nan, 3]), four, 0.5)
    with pytest.raises(UserError, match="at least one row"):
        split_cqr(four[:0], four[:0], four[:0], 0.5)
    with pytest.raises(UserError, match="4 calibration .* level 0.9, which needs 9"):
        split_cqr(four, four, four, 0.9)
    with pytest.raises(UserError, match=r"lower\[4\], upper\[2\]"):
        split_cqr(four, four, four, 0.5)(four, four[:2])


def linear_data(random, num_rows):
    inputs = np.column_stack([np.ones(num_rows), random.normal(size=(num_rows, 4))])
    noise = random.standard_t(4, size=num_rows)
    return inputs, inputs @ np.arange(5) + noise


def fitted(inputs, targets):
    return np.linalg.lstsq(inputs, targets, rcond=None)[0]


def by_folds(num_folds):
    def make(random, inputs, targets, fresh):
        n = len(inputs)
        fold = random.permutation(np.arange(n) % num_folds)
        models = [fitted(inputs[fold != k], targets[fold != k]) for k in range(num_folds)]
        own = np.einsum("ij,ij->i", inputs, np.array(models)[fold])
        return cv_plus(np.abs(targets - own), fold, np.array(models) @ fresh.T, LEVEL)

    return make


def by_bootstrap(random, inputs, targets, fresh):
    n = len(inputs)
    bags = random.integers(n, size=(25, n))
    models = np.array([fitted(inputs[bag], targets[bag]) for bag in bags])
    out_of_bag = np.array([~np.isin(np.arange(n), bag) for bag in bags])
    residuals = np.abs(targets - out_of_bag_means(out_of_bag, models @ inputs.T))
    return jackknife_plus(residuals, out_of_bag, models @ fresh.T, LEVEL)


REFITS = {"cv+": by_folds(5), "jackknife+": by_folds(30), "after bootstrap": by_bootstrap}


@pytest.mark.slow
@pytest.mark.parametrize("make", REFITS.values(), ids=REFITS)
def test_intervals_of_refitted_models_hold_the_target_about_as_often_as_asked(make):
    def draw(random):
        inputs, targets = linear_data(random, 30)
        fresh, fresh_targets = linear_data(random, NUM_TEST)
        return coverage_of_intervals(*make(random, inputs, targets, fresh), fresh_targets)

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
    monkeypatch.setattr(intervals, "_CHUNK_BYTES", chunk_bytes)
    random = np.random.default_rng(0)
    residuals = random.exponential(size=23)
    fold, of_folds = random.integers(5, size=23), random.normal(size=(5, 11))
    got = cv_plus(residuals, fold, of_folds, level)
    np.testing.assert_allclose(got, brute_force(residuals, of_folds[fold], level), atol=1e-12)
    out_of_bag, of_members = random.random((12, 23)) < 0.4, random.normal(size=(12, 11))
    assert out_of_bag.any(axis=0).all()
    held_out = np.array([of_members[lacks].mean(axis=0) for lacks in out_of_bag.T])
    got = jackknife_plus(residuals, out_of_bag, of_members, level)
    np.testing.assert_allclose(got, brute_force(residuals, held_out, level), atol=1e-12)


def test_intervals_worked_by_hand():
    # k = ceil(4 * 0.5) = 2. mu - residual: 9, 8, 17, whose 2nd largest is 9;
    # mu + residual: 11, 12, 23, whose 2nd smallest is 12.
    residuals, predictions = np.array([1.0, 2.0, 3.0]), np.array([[10.0], [20.0]])
    assert cv_plus(residuals, np.array([0, 0, 1]), predictions, 0.5) == (9.0, 12.0)
    # The second example was out of both bags: mu = 10, 15, 20. 9, 13, 17 and 11, 17, 23.
    out_of_bag = np.array([[True, True, False], [False, True, True]])
    assert jackknife_plus(residuals, out_of_bag, predictions, 0.5) == (13.0, 17.0)
    means = out_of_bag_means(out_of_bag, np.array([[1.0, 2.0, 9.0], [9.0, 6.0, 7.0]]))
    assert means.tolist() == [1.0, 4.0, 7.0]


def test_members_that_each_left_out_one_example_are_the_jackknife_plus():
    random = np.random.default_rng(1)
    residuals, predictions = random.exponential(size=20), random.normal(size=(20, 7))
    np.testing.assert_allclose(
        jackknife_plus(residuals, np.eye(20, dtype=bool), predictions, LEVEL),
        cv_plus(residuals, np.arange(20), predictions, LEVEL),
        atol=1e-12,
    )


def test_many_rows_are_predicted_in_little_memory():
    # All at once would be 1,000 examples * 20,000 rows * 8 bytes = 160 MB, more than once.
    random = np.random.default_rng(0)
    residuals, fold = random.random(1000), np.arange(1000) % 5
    predictions = random.random((5, 20_000), dtype=np.float32)
    for make, which in [(cv_plus, fold), (jackknife_plus, fold == np.arange(5)[:, None])]:
        tracemalloc.start()
        try:
            lower, _ = make(residuals, which, predictions, LEVEL)
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert lower.shape == (20_000,)
        assert peak_bytes < 64e6


def test_half_precision_and_one_row_are_predicted_in_double():
    residuals, predictions = np.arange(9, dtype=np.float16), np.ones((3, 1), np.float16)
    lower, upper = cv_plus(residuals, np.arange(9) % 3, predictions, LEVEL)
    assert (lower.tolist(), upper.tolist()) == ([-7.0], [9.0])
    assert lower.dtype == upper.dtype == np.float64


def test_held_out_predictions_that_cannot_be_are_refused():
    residuals, folds, predictions = np.ones(9), np.arange(9) % 3, np.ones((3, 4))
    with pytest.raises(UserError, match=r"int64\[8\], .* 9 residuals one of 3 models"):
        cv_plus(residuals, folds[:8], predictions, LEVEL)
    for wrong in (folds + 1, folds - 1, folds.astype(float)):
        with pytest.raises(UserError, match="9 residuals one of 3 models"):
            cv_plus(residuals, wrong, predictions, LEVEL)
    with pytest.raises(UserError, match="9 calibration .* level 0.95, which needs 19"):
        cv_plus(residuals, folds, predictions, 0.95)
    with pytest.raises(UserError, match="negative, the smallest is -1.0"):
        cv_plus(-residuals, folds, predictions, LEVEL)
    with pytest.raises(UserError, match="12 of them are not finite"):
        cv_plus(residuals, folds, predictions * np.inf, LEVEL)
    with pytest.raises(UserError, match="at least one row"):
        cv_plus(residuals[:0], folds[:0], predictions, LEVEL)


def test_examples_that_every_member_saw_are_counted_and_refused():
    out_of_bag = np.ones((3, 9), bool)
    out_of_bag[:, [2, 5]] = False
    with pytest.raises(UserError, match="2 of 9 examples .* all 3 members.*Train more members"):
        jackknife_plus(np.ones(9), out_of_bag, np.ones((3, 4)), LEVEL)
    with pytest.raises(UserError, match="2 of 9 examples .* all 3 members"):
        out_of_bag_means(out_of_bag, np.ones((3, 9)))
    with pytest.raises(UserError, match=r"bool\[3, 9\], .* need bool\[2, 9\]"):
        jackknife_plus(np.ones(9), out_of_bag, np.ones((2, 4)), LEVEL)
    with pytest.raises(UserError, match="out_of_bag is int64"):
        jackknife_plus(np.ones(9), out_of_bag.astype(int), np.ones((3, 4)), LEVEL)


def test_scores_of_sets_and_intervals_worked_by_hand():
    sets = np.array([[True, False, False], [True, True, False], [False, False, False]])
    assert coverage_of_sets(sets, np.array([0, 2, 1])) == pytest.approx(1 / 3)
    assert mean_set_size(sets) == 1.0
    lower, upper = np.array([0, 0, 1, -np.inf, 3]), np.array([1, 1, 3, 0, 2])
    # On an end, on the other, outside, without a lower end, and within an empty interval.
    assert coverage_of_intervals(lower, upper, np.array([0, 1, 0.5, -9, 2.5])) == 0.6
    assert mean_width(lower[[0, 2, 4]], upper[[0, 2, 4]]) == 1.0


def test_scores_of_nothing_and_of_what_is_no_set_are_refused():
    with pytest.raises(UserError, match=r"float64\[2, 2\].*bool\[rows, classes\]"):
        coverage_of_sets(np.ones((2, 2)), np.zeros(2, int))
    with pytest.raises(UserError, match=r"int64\[3\] for 2 rows"):
        coverage_of_sets(np.ones((2, 2), bool), np.zeros(3, int))
    with pytest.raises(UserError, match="at least one row"):
        mean_set_size(np.ones((0, 2), bool))
    with pytest.raises(UserError, match="at least one row"):
        coverage_of_intervals(*np.zeros((3, 0)))
    with pytest.raises(UserError, match="1 of 1 numbers in targets are NaN"):
        coverage_of_intervals(np.zeros(1), np.ones(1), np.array([np.nan]))
    with pytest.raises(UserError, match=r"lower\[1, 2\]"):
        mean_width(np.zeros((1, 2)), np.ones((1, 2)))
