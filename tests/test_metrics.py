"""Scores, against cases worked by hand and against scikit-learn."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import accuracy_score, log_loss

from dist_ens.metrics import classification_scores, classification_sums, mixture_log_probs

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
