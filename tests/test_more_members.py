"""How many members are worth it: the gain from twice as many, and its interval."""

import numpy as np
import pytest

from dist_ens.data import ArraySplit
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.more_members import gain_of_more
from dist_ens.metrics import bootstrap_weights
from dist_ens.report.facts import told_of_more
from tabled import drawn, tabled

pytestmark = pytest.mark.quick


def test_the_gain_from_more_members_is_covered_by_its_interval():
    # Squared errors of an example: bias + b / M and noise that all ensembles of it share in part.
    sizes, rows, b, covered = [1, 2, 3, 4, 6, 8], 300, 0.8, 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        shared = random.exponential(0.5, size=rows)
        slope = b * random.exponential(size=rows)
        own = random.normal(0, 0.05, size=(len(sizes), rows))
        values = shared + slope / np.array(sizes)[:, None] + own
        drawn = values @ bootstrap_weights(rows, 200, seed).T / rows
        found = gain_of_more(sizes, drawn, values.mean(1), "lower")
        assert found["more"] == 8
        covered += found["low"] <= b / 16 <= found["high"]
    assert 0.9 <= covered / 200 <= 0.99


def test_more_members_gain_in_accuracy_and_nothing_is_said_of_few():
    sizes, draws = [1, 2, 4, 8], np.linspace(-0.01, 0.01, 101)
    scores = 0.9 - 0.16 / np.array(sizes)
    found = gain_of_more(sizes, scores[:, None] + draws, scores, "higher")
    assert found["gain"] == pytest.approx(0.01)  # 0.16 / 8 - 0.16 / 16
    assert told_of_more({"accuracy": found}) == [
        "8 more members would gain 0.0100 ± 0.0000 accuracy."
    ]
    some = {"more": 8, "gain": 0.0002, "low": -0.0008, "high": 0.0012}
    assert told_of_more({"nll": some}) == [
        "8 more members would gain nothing that can be measured: 0.0002 ± 0.0010 NLL."
    ]
    assert gain_of_more([1, 2, 3], scores[:3, None] + draws, scores[:3], "lower") is None
    assert gain_of_more(sizes, np.array([]), scores, "lower") is None
    scores[1] = np.nan
    assert gain_of_more(sizes, scores[:, None] + draws, scores, "lower") is None


def scored(members, **options):
    outputs, labels = drawn(0, members, rows=400)
    ensemble, state = tabled(outputs)
    evaluator = Evaluator(ensemble, 200, **options)
    return evaluator.evaluate(
        state, ArraySplit(np.eye(400, dtype=np.float32), labels), by_size=True
    )


def test_scores_hold_the_gain_from_more_members_or_that_nothing_can_be_said():
    scores = scored(8).scores(intervals=True)
    gain = scores.to_dict()["more_members"]["nll"]
    assert gain["more"] == 8
    assert 0 < gain["low"] < gain["gain"] < gain["high"]
    assert scored(8).scores().more_members is None
    assert "more_members" not in scored(8).scores().to_dict()
    assert scored(2).scores(intervals=True).to_dict()["more_members"] == {}
    assert scored(8, weights=np.arange(8)).scores(intervals=True).more_members is None
