"""How many members are worth it: the gain from twice as many, and its interval."""

import numpy as np
import pytest

from dist_ens.data import ArraySplit, TreeSplit
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.more_members import gain_of_more
from dist_ens.metrics import bootstrap_weights
from dist_ens.report.facts import told_of_more
from tabled import drawn, tabled

pytestmark = pytest.mark.quick


def test_the_gain_from_more_members_is_covered_by_its_interval():
    # The target is 0, and member m predicts noise of variance v_m around a bias of the example. The
    # expected squared error of M members is bias^2 + mean(v) / M, and 8 more gain mean(v) / 16.
    sizes, rows, mean_variance, covered = [1, 2, 3, 4, 6, 8], 200, 0.8, 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        variances = mean_variance * random.uniform(0.2, 1.8, size=(8, 1))
        members = random.normal(size=rows) + np.sqrt(variances) * random.normal(size=(8, rows))
        orders = [random.permutation(8) for _ in range(8)]
        squares = np.array([[members[o[:n]].mean(0) ** 2 for n in sizes] for o in orders])
        resampled = squares.mean(0) @ bootstrap_weights(rows, 200, seed).T / rows
        by_order = squares.mean(2)
        found = gain_of_more(sizes, by_order.mean(0), resampled, by_order, "lower")
        assert found["more"] == 8
        covered += found["low"] <= mean_variance / 16 <= found["high"]
    assert covered / 200 >= 0.93


def test_more_members_gain_in_accuracy_and_nothing_is_said_of_few():
    sizes, draws = [1, 2, 4, 8], np.linspace(-0.01, 0.01, 101)
    scores = 0.9 - 0.16 / np.array(sizes)
    in_orders = np.stack([scores] * 8)

    def gain(count=4, drawn=scores[:, None] + draws, direction="higher"):
        each = sizes[:count], scores[:count], drawn[:count], in_orders[:, :count]
        return gain_of_more(*each, direction)

    found = gain()
    assert found["gain"] == pytest.approx(0.01)  # 0.16 / 8 - 0.16 / 16
    assert told_of_more({"accuracy": found}) == [
        "8 more members would gain 0.0100 ± 0.0000 accuracy."
    ]
    some = {"more": 8, "gain": 0.0002, "low": -0.0008, "high": 0.0012}
    assert told_of_more({"nll": some}) == [
        "8 more members would gain nothing that can be measured: 0.0002 ± 0.0010 NLL."
    ]
    assert gain(count=3) is None
    assert gain(drawn=[]) is None
    assert gain(direction=None) is None
    scores[1] = np.nan
    assert gain() is None
    # Orders that differ widen the interval, as a sample of 8 orders of a sample of 8 members.
    scores[1], in_orders[:4] = 0.82, in_orders[0] + np.array([0.02, 0, 0, 0])
    wide = gain()
    slopes = np.polyfit(1 / np.array(sizes), in_orders.T, 1)[0] / -16
    half = 2.36 * slopes.std(ddof=1) * (1 / 8 + 1 / 8) ** 0.5
    assert (wide["high"] - wide["low"]) / 2 == pytest.approx(half)


def scored(members, split=ArraySplit, **options):
    outputs, labels = drawn(0, members, rows=400)
    ensemble, state = tabled(outputs)
    evaluator = Evaluator(ensemble, 150, **options)
    return evaluator.evaluate(state, split(np.eye(400, dtype=np.float32), labels), by_size=True)


def test_scores_hold_the_gain_from_more_members_or_that_nothing_can_be_said():
    scores = scored(8).scores(intervals=True)
    gain = scores.to_dict()["more_members"]["nll"]
    assert gain["more"] == 8
    assert 0 < gain["low"] < gain["gain"] < gain["high"]
    assert scored(8).scores().more_members is None
    assert "more_members" not in scored(8).scores().to_dict()
    assert scored(2).scores(intervals=True).to_dict()["more_members"] == {}
    assert scored(8, weights=np.arange(8)).scores(intervals=True).more_members == {}


def test_scores_of_each_order_are_means_over_the_rows_that_count():
    def weighted(inputs, labels):
        weights = np.arange(len(labels)) % 3 * 0.5
        return TreeSplit({"inputs": inputs, "labels": labels, "weights": weights})

    for evaluation in (scored(8), scored(8, weighted)):
        by_order = evaluation.by_order["nll"]
        assert by_order.shape == (8, 1, len(evaluation.sizes), 1)
        rows = evaluation.by_size["nll"][:, 0]
        expected = np.average(rows, axis=1, weights=evaluation.weights)
        np.testing.assert_allclose(by_order.mean(axis=0)[0, :, 0], expected, rtol=1e-5)
        deviation = by_order.std(axis=0)[0, :, 0]
        assert deviation[0] > 0.01  # Members differ,
        assert deviation[-1] < 1e-6  # and all of them are the same in every order.
