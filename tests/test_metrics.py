"""Scores, against cases worked by hand and against scikit-learn."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.spatial.distance import pdist
from scipy.stats import entropy, norm
from sklearn.metrics import (
    accuracy_score,
    brier_score_loss,
    log_loss,
    mean_absolute_error,
    root_mean_squared_error,
    top_k_accuracy_score,
)

from dist_ens.losses import Categorical, Quantiles
from dist_ens.metrics import (
    CLASSIFICATION,
    REGRESSION,
    Rows,
    bootstrap_weights,
    classification_values,
    classwise_sums,
    credit,
    diversity_values,
    mixture_log_probs,
    mixture_moments,
    mixture_quantile,
    regression_values,
    scores_of,
)

pytestmark = pytest.mark.quick


def in_rows(values):
    return {name: leaf.ravel() for name, leaf in jax.device_get(values).items()}


def classification_scores(values, classwise=None, weights=None):
    return scores_of(CLASSIFICATION, Rows(values, classwise, draws=weights))


def scores(probs, labels, names=("accuracy", "nll", "brier", "ece")):
    log_probs, labels = jnp.log(jnp.asarray(probs, jnp.float32)), np.asarray(labels)
    classwise = classwise_sums(log_probs, labels, np.ones(len(labels), bool))
    values = in_rows(classification_values(log_probs, labels))
    got = classification_scores(values, np.asarray(classwise))
    return {name: got[name] for name in names or got}


LIKELIER = np.array([0.55, 0.9, 0.6, 0.8, 0.7])
CHANCE = np.full((3, 100), 0.01)
BY_HAND = {
    # Labels 0 and 2 of three classes.
    #   nll:   -(ln 0.7 + ln 0.2) / 2 = (0.356675 + 1.609438) / 2 = 0.983056
    #   brier: (0.09 + 0.04 + 0.01 + 0.25 + 0.09 + 0.64) / 2 = 1.12 / 2 = 0.56
    #   ece:   confidences 0.7 and 0.5 in bins of their own, right and wrong: (0.3 + 0.5) / 2 = 0.4
    "three classes": (
        [[0.7, 0.2, 0.1], [0.5, 0.3, 0.2]],
        [0, 2],
        {"accuracy": 0.5, "nll": 0.983056, "brier": 0.56, "ece": 0.4},
    ),
    # The most confident first: right, wrong, right, right, wrong.
    #   aurc:       (0 + 1/2 + 1/3 + 1/4 + 2/5) / 5 = 0.296667
    #   risk_at_80: of the first four of five, 1/4
    "risks": (
        np.stack([LIKELIER, 1 - LIKELIER], axis=1),
        [1, 0, 0, 1, 0],
        {"aurc": 0.296667, "risk_at_80": 0.25},
    ),
    "certain and right": ([[1.0, 0.0]], [0], {"accuracy": 1, "nll": 0, "brier": 0, "ece": 0}),
    "certain and wrong": ([[1.0, 0.0]], [1], {"accuracy": 0, "nll": np.inf, "brier": 2, "ece": 1}),
    # Class 0 is given 0.7, 0.7 and 0.2 and comes once, at a 0.7: bins of two and of one.
    #   (|1 - 1.4| + |0 - 0.2|) / 3 = 0.2;  class 1, 0.3, 0.3, 0.8: (|1 - 0.6| + |1 - 0.8|) / 3
    "each class by itself": (
        [[0.7, 0.3], [0.7, 0.3], [0.2, 0.8]],
        [0, 1, 1],
        {"classwise_ece": 0.2},
    ),
    # 100 classes alike: accuracy 1/100, top-5 accuracy 5/100, and calibrated.
    "chance": (
        CHANCE,
        [0, 42, 99],
        {"accuracy": 0.01, "top_5": 0.05, "ece": 0, "aece": 0, "aurc": 0.99, "risk_at_80": 0.99},
    ),
    # Half the mass on each of two classes, of which one is the label: 1/2, as the confidence.
    "halves": ([[0.5, 0.5], [0.5, 0.5]], [0, 0], {"accuracy": 0.5, "ece": 0}),
    # 9/15 and 0.58 share the bin (8/15, 9/15]: one right of two. 0.62 is alone, and right.
    # (|1 - (0.6 + 0.58)| + |1 - 0.62|) / 3 = 0.56 / 3 = 0.186667
    "on the edge of a bin": ([[p, 1 - p] for p in (0.6, 0.58, 0.62)], [0, 1, 0], {"ece": 0.186667}),
    # Six positions: -(5 ln 0.5 + ln 0.75) / 6
    "positions": (
        [[[0.5, 0.5], [0.75, 0.25], [0.5, 0.5]], [[0.5, 0.5]] * 3],
        [[0, 0, 0], [0, 0, 0]],
        {"nll": 0.625570},
    ),
}


@pytest.mark.parametrize(("probs", "labels", "expected"), BY_HAND.values(), ids=BY_HAND)
def test_scores_of_classes_worked_by_hand(probs, labels, expected):
    assert scores(probs, labels, expected) == pytest.approx(expected, abs=1e-6)


@pytest.mark.slow
def test_scores_of_random_predictions_are_those_of_scikit_learn():
    random = np.random.default_rng(0)
    probs = random.dirichlet(np.ones(7), 500)
    labels = random.integers(0, 7, 500)
    got = scores(probs, labels, names=None)
    assert got["accuracy"] == pytest.approx(accuracy_score(labels, probs.argmax(1)))
    assert got["nll"] == pytest.approx(log_loss(labels, probs, labels=range(7)), rel=1e-6)
    assert got["top_5"] == pytest.approx(top_k_accuracy_score(labels, probs, k=5))
    assert got["entropy"] == pytest.approx(entropy(probs, axis=1).mean(), rel=1e-6)
    one_hot = np.eye(7)[labels]
    brier = [brier_score_loss(one_hot[:, c], probs[:, c]) for c in range(7)]
    assert got["brier"] == pytest.approx(np.sum(brier), rel=1e-6)


def test_rows_that_are_masked_do_not_count_class_by_class():
    log_probs = jnp.log(jnp.array([[0.7, 0.3], [jnp.nan, jnp.nan], [0.2, 0.8]]))
    labels = np.array([0, 1, 1])
    masked = classwise_sums(log_probs, labels, np.array([True, False, True]))
    kept = classwise_sums(log_probs[np.array([0, 2])], labels[[0, 2]], np.ones(2, bool))
    np.testing.assert_allclose(masked, kept)


def test_a_prediction_that_is_no_number_leaves_no_score():
    log_probs = jnp.log(jnp.array([[0.7, 0.3], [jnp.nan, jnp.nan]]))
    values = in_rows(classification_values(log_probs, np.array([0, 1])))
    values["confidence"] = np.float32([0.7, -np.inf])  # as XLA's maximum of NaN may be
    assert all(np.isnan(score) for score in classification_scores(values).values())
    drawn = classification_scores(values, weights=np.ones((3, 2), np.float32))
    assert all(np.isnan(scores).all() and len(scores) == 3 for scores in drawn.values())


def test_a_tied_label_counts_by_its_share_of_the_places_that_are_left():
    # Label 0 ties with 1: k = 1 gives 1/2, k = 2 gives (2 - 0) / 2 = 1. Label 4 has 3 classes above
    # it and ties with 3: k = 3 gives (3 - 3) / 2 = 0, k = 4 gives (4 - 3) / 2 and k = 5 gives 1.
    probs = [0.3, 0.3, 0.2, 0.1, 0.1, 0.0]
    cases = [(0, 1, 0.5), (0, 2, 1), (4, 3, 0), (4, 4, 0.5), (4, 5, 1), (5, 5, 0)]
    for label, k, expected in cases:
        got = credit(jnp.log(jnp.array([probs])), jnp.array([label]), k)
        assert got.tolist() == [expected], (label, k)
    # Of three classes without a vote two places are left: each has 2/3.
    empty = jnp.log(jnp.array([[1.0, 0, 0, 0]]))
    assert credit(empty, jnp.array([3]), 3).tolist() == pytest.approx([2 / 3])
    no_number = jnp.array([[0.0, jnp.nan], [jnp.nan, jnp.nan]])
    assert np.isnan(credit(no_number, jnp.array([0, 0]))).all()
    assert credit(jnp.zeros((2, 2)), jnp.array([2, 7])).tolist() == [0.0, 0.0]  # No classes.


@pytest.mark.slow
def test_votes_that_are_tied_are_counted_in_part():
    # Three members vote for classes 0, 1 and 2 of 7, the label is 1: each has a third of the votes.
    # Four classes have none and share the two places that the top five have left.
    one_each = jnp.log(jnp.eye(7)[jnp.array([0, 1, 2])] * 0.8 + 0.02)[:, None]
    distribution = Categorical(pooling="vote")
    for label, correct, top_5 in [(1, 1 / 3, 1), (5, 0, 2 / 4)]:
        pooled = distribution.pool({"log_probs": one_each})
        values = distribution.row_statistics(pooled, jnp.array([label]))
        assert float(values["correct"][0]) == pytest.approx(correct)
        assert float(values["top_5"][0]) == pytest.approx(top_5)
    # A member that finds two classes most probable gives half a vote to each; with a second member
    # for class 1 the shares are 1/4, 3/4 and 0.
    halves = jnp.log(jnp.array([[[0.5, 0.5, 0.0]], [[0.1, 0.8, 0.1]]]))
    votes = np.exp(distribution.pool({"log_probs": halves})["log_probs"])
    np.testing.assert_allclose(votes, [[0.25, 0.75, 0]])
    # Members that predict the same never disagree, tied or not.
    assert diversity_values(jnp.zeros((3, 1, 4)) - jnp.log(4))["disagreement"].tolist() == [0]


@pytest.mark.slow
def test_a_member_that_is_no_number_has_no_vote_and_no_interval_that_holds_a_target():
    log_probs = jnp.log(jnp.array([[[0.7, 0.3]], [[jnp.nan, jnp.nan]], [[0.2, 0.8]]]))
    assert np.isnan(diversity_values(log_probs)["disagreement"]).all()
    assert np.isnan(Categorical(pooling="vote").pool({"log_probs": log_probs})["log_probs"]).all()
    targets, covered = jnp.zeros(2), [1, np.nan]
    means = jnp.array([[0.0, jnp.nan]])
    of_normals = regression_values(means, jnp.ones((1, 2)), targets, as_one=True)
    quantiles = {"quantiles": jnp.array([[-1.0, 0.0, 1.0], [jnp.nan] * 3])}
    of_quantiles = Quantiles((0.05, 0.5, 0.95)).row_statistics(quantiles, targets)
    for values in (of_normals, of_quantiles):
        for row, expected in enumerate(covered):
            alone = {name: leaf.ravel()[row : row + 1] for name, leaf in values.items()}
            got = scores_of(REGRESSION, Rows(jax.device_get(alone)))["coverage"]
            np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
def test_how_members_differ_worked_by_hand():
    # Two members, sure of different classes, then both undecided.
    #   entropies: 0 and 0, the mixture's ln 2;  ln 2 and ln 2, the mixture's ln 2
    probs = jnp.array([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])
    got = diversity_values(jnp.log(probs))
    np.testing.assert_allclose(got["aleatoric"], [0, np.log(2)], atol=1e-6)
    np.testing.assert_allclose(got["mutual_information"], [np.log(2), 0], atol=1e-6)
    np.testing.assert_array_equal(got["disagreement"], [1, 0])
    np.testing.assert_allclose(got["variance"], [0.5, 0], atol=1e-6)
    # Three votes for 0, one for 1: of 6 pairs 3 differ.
    votes = jnp.log(jnp.array([[[0.9, 0.1]]] * 3 + [[[0.1, 0.9]]]))
    np.testing.assert_allclose(diversity_values(votes)["disagreement"], [0.5], atol=1e-6)
    alone = diversity_values(votes[:1])
    alone.pop("aleatoric")
    expected = {"mutual_information": 0, "disagreement": 0, "variance": 0}
    assert {name: float(value[0]) for name, value in alone.items()} == expected


@pytest.mark.slow
def test_how_random_members_differ_is_what_scipy_says():
    probs = np.random.default_rng(6).dirichlet(np.full(4, 0.3), (5, 60)).astype(np.float32)
    got = diversity_values(jnp.log(jnp.asarray(probs)))
    aleatoric = entropy(probs.astype(np.float64), axis=-1).mean(axis=0)
    whole = entropy(probs.mean(axis=0, dtype=np.float64), axis=-1)
    np.testing.assert_allclose(got["aleatoric"], aleatoric, atol=1e-6)
    np.testing.assert_allclose(got["mutual_information"], whole - aleatoric, atol=1e-6)
    disagreement = pdist(probs.argmax(-1), "hamming").mean()
    np.testing.assert_allclose(got["disagreement"].mean(), disagreement, atol=1e-6)
    np.testing.assert_allclose(got["variance"], probs.var(axis=0).sum(axis=-1), atol=1e-6)


@pytest.mark.slow
def test_scores_in_a_resample_are_those_of_its_rows():
    random = np.random.default_rng(3)
    log_probs = np.log(random.dirichlet(np.ones(6), 40)).astype(np.float32)
    values = in_rows(classification_values(jnp.asarray(log_probs), random.integers(0, 6, 40)))
    weights = bootstrap_weights(40, 3, seed=0)
    drawn = classification_scores(values, weights=weights)
    for draw, counts in enumerate(weights.astype(int)):
        repeated = {name: np.repeat(leaf, counts) for name, leaf in values.items()}
        expected = classification_scores(repeated)
        assert {n: leaf[draw] for n, leaf in drawn.items()} == pytest.approx(expected, abs=1e-6)


def test_probabilities_are_averaged_not_logits():
    member_probs = np.array([[[0.9, 0.1]], [[0.5, 0.5]]])
    mixture = np.exp(mixture_log_probs(jnp.log(jnp.float32(member_probs))))
    np.testing.assert_allclose(mixture, [[0.7, 0.3]], rtol=1e-6)
    one = jnp.log(jnp.float32(member_probs[:1]))
    np.testing.assert_allclose(mixture_log_probs(one), one[0], rtol=1e-6)


PROPER = ("rmse", "mae", "nll", "mixture_nll", "crps")


def normal_scores(means, variances, targets, unit=1.0, names=PROPER, as_one=True):
    means, variances, targets = (jnp.asarray(v, jnp.float32) for v in (means, variances, targets))
    compiled = jax.jit(regression_values, static_argnames="as_one")
    values = compiled(means, variances, targets, as_one=as_one)
    got = scores_of(REGRESSION, Rows(in_rows(values), unit=unit))
    return {name: got[name] for name in names}


NORMALS = {
    # Members N(0, 1) and N(2, 1), target 1: the mixture's mean is 1, its variance 1 + 1 = 2.
    #   rmse = mae = 0;  nll = ln(2 pi 2) / 2 = 1.265512
    #   mixture_nll = -ln phi(1) = 1.418939, for both densities are the same there
    #   crps: E|X - y| = 2 phi(1) + (2 Phi(1) - 1) = 0.483941 + 0.682689 = 1.166631; of the pairs
    #   two are N(0, 2), E = sqrt(2) * 0.797885 = 1.128379, two N(+-2, 2), z = sqrt(2):
    #   2 * 0.842701 + 2 * sqrt(2) * 0.146763 = 2.100511; minus half their mean: 0.807222
    "two members": (
        ([[0.0], [2.0]], [[1.0], [1.0]], [1.0]),
        {"rmse": 0, "mae": 0, "nll": 1.265512, "mixture_nll": 1.418939, "crps": 0.359408},
    ),
    # N(1, 4), target 3: z = 1. nll = ln(2 pi 4) / 2 + 1/2;
    # crps = 2 (1 (2 Phi(1) - 1) + 2 phi(1) - 1/sqrt(pi)) = 2 (0.682689 + 0.483941 - 0.564190)
    "one normal": (
        ([[1.0]], [[4.0]], [3.0]),
        {"rmse": 2, "mae": 2, "nll": 2.112086, "mixture_nll": 2.112086, "crps": 1.204882},
    ),
    # The same in a unit ten times as small: lengths times 10, a density a tenth.
    "another unit": (
        ([[1.0]], [[4.0]], [3.0], 10.0),
        {"rmse": 20, "mae": 20, "nll": 4.414671, "mixture_nll": 4.414671, "crps": 12.04882},
    ),
    "many that agree": ((np.ones((500, 1)), np.full((500, 1), 4.0), [3.0]), {"crps": 1.204882}),
    # Points 0 and 2, target 3: E|X - y| = 2, pairs differ by 0, 2, 2, 0: crps = 2 - 1/2.
    "points": (([[0.0], [2.0]], np.zeros((2, 1)), [3.0]), {"crps": 1.5}),
    "one point": (([[2.0]], np.zeros((1, 1)), [2.0]), {"crps": 0}),
    # N(0, 4) twice, targets 1 and 9: the central 90 % is +-1.644854 * 2 = 3.289707 wide each way,
    # so one of two lies inside. rmse = sqrt((1 + 81) / 2) = 6.403124.
    "intervals": (
        ([[0.0, 0.0]], [[4.0, 4.0]], [1.0, 9.0], 10.0),
        {"coverage": 0.5, "width": 65.79415, "sharpness": 20, "spread_skill": 2 / 6.403124},
    ),
}


@pytest.mark.parametrize(("given", "expected"), NORMALS.values(), ids=NORMALS)
def test_scores_of_normals_worked_by_hand(given, expected):
    got = normal_scores(*given, names=expected)
    assert got == pytest.approx(expected, abs=1e-6, rel=1e-6)


@pytest.mark.slow
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


@pytest.mark.slow
def test_intervals_of_random_normals_are_those_of_scipy():
    random = np.random.default_rng(4)
    mean = random.normal(size=(1, 200)).astype(np.float32)
    variance = random.uniform(0.1, 3, (1, 200)).astype(np.float32)
    targets = (2 * random.normal(size=200)).astype(np.float32)
    names = ("nll", "coverage", "width", "sharpness", "spread_skill")
    got = normal_scores(mean, variance, targets, names=names)
    said = norm(mean[0].astype(np.float64), np.sqrt(variance[0], dtype=np.float64))
    low, high = said.interval(0.9)
    sharpness = np.sqrt(said.var().mean())
    expected = {
        "nll": -said.logpdf(targets).mean(),
        "coverage": ((low <= targets) & (targets <= high)).mean(),
        "width": (high - low).mean(),
        "sharpness": sharpness,
        "spread_skill": sharpness / root_mean_squared_error(targets, said.mean()),
    }
    assert got == pytest.approx(expected, abs=1e-6)
    values = regression_values(jnp.asarray(mean), jnp.asarray(variance), targets, as_one=True)
    np.testing.assert_allclose(np.ravel(values["pit"]), said.cdf(targets), atol=1e-6)


@pytest.mark.slow
def test_a_mixture_as_it_is_has_its_own_quantiles():
    means, variances = jnp.array([[-3.0], [3.0]]), jnp.ones((2, 1))
    for level in (0.05, 0.3, 0.5, 0.95):
        at = float(mixture_quantile(means, variances, level)[0])
        assert norm.cdf(at, [-3, 3]).mean() == pytest.approx(level, abs=1e-5)
    values = regression_values(means, variances, jnp.zeros(1), as_one=False)
    assert float(values["nll"][0]) == pytest.approx(-norm.logpdf(3), abs=1e-5)
    assert float(values["pit"][0]) == pytest.approx(0.5, abs=1e-6)
    # 90 % between -q and q, where a member's own tail beyond q has 10 %: q = 3 + 1.281552
    assert float(values["width"][0]) == pytest.approx(2 * 4.281552, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spread", "deviations"),
    [(1.0, (0.5, 1.5)), (20.0, (0.5, 1.5)), (1.0, (1e-3, 2.0)), (1.0, (0.0, 0.0))],
    ids=["of like widths", "far apart", "of unlike widths", "points"],
)
def test_the_crps_of_many_members_is_that_of_all_their_pairs(spread, deviations):
    random = np.random.default_rng(6)
    means = (spread * random.normal(size=(200, 5))).astype(np.float32)
    variances = np.square(random.uniform(*deviations, (200, 5))).astype(np.float32)
    targets = random.normal(size=5).astype(np.float32)

    def mean_distance(mean, variance):  # E|Z| of a normal Z
        scale = np.sqrt(np.maximum(variance, 1e-30))
        return mean * (2 * norm.cdf(mean / scale) - 1) + 2 * scale * norm.pdf(mean / scale)

    means_64, variances_64 = means.astype(np.float64), variances.astype(np.float64)
    to_target = mean_distance(targets - means_64, variances_64).mean(0)
    between = mean_distance(means_64[:, None] - means_64, variances_64[:, None] + variances_64)
    expected = (to_target - between.mean((0, 1)) / 2).mean()
    got = normal_scores(means, variances, targets, names=["crps"])
    assert got["crps"] == pytest.approx(expected, rel=3e-6)


def test_groups_of_many_members_take_one_way_to_the_crps():
    # Batched, a switch would become a choice between the results of all its branches.
    means, targets = jnp.zeros((2, 40, 3)), jnp.zeros((2, 3))
    of_groups = jax.vmap(partial(regression_values, as_one=True))
    assert "cond[" in str(jax.make_jaxpr(of_groups)(means, means + 1, targets))


def test_members_that_agree_far_from_zero_keep_their_variance():
    # float32 has 7 digits: the mean of squares would leave nothing of a variance of 1e-4 at 1000.
    mean, variance = mixture_moments(jnp.full((3, 1), 1000.0), jnp.full((3, 1), 1e-4))
    assert (float(mean[0]), float(variance[0])) == pytest.approx((1000.0, 1e-4), rel=1e-6)
