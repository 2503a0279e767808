"""The catalogue of metrics, metrics of a user's, and weights of examples."""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import softmax

from dist_ens.callbacks.json_lines import score_record
from dist_ens.data import ArraySplit, Spec
from dist_ens.evaluation import Evaluator, Scores, scores_of_means
from dist_ens.ground.errors import UserError
from dist_ens.layout import Layout
from dist_ens.losses import Categorical, Gaussian, Point, Quantiles
from dist_ens.metrics import CATALOGUE, Metric, Rows, label_of, scores_of
from dist_ens.metrics.catalogue import headlines, in_table
from dist_ens.report import PAGE, write_report, write_summary
from dist_ens.storage import Disk
from scored import linear_members

pytestmark = pytest.mark.quick

RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(30, 4)).astype(np.float32)
LABELS = RANDOM.integers(0, 3, 30).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class Weighted(ArraySplit):
    """A split with weights."""

    weights: np.ndarray

    def take(self, indices):
        return super().take(indices) | {"weights": self.weights[indices]}


@functools.cache
def network(num_outputs=3):
    layout = Layout.make(4, ensemble_axis=2, devices=jax.devices()[:4])
    ensemble, state, weights = linear_members(layout, num_outputs)
    return ensemble, state, np.einsum("nf,mfc->mnc", INPUTS, weights)


def top_two(prediction, labels):
    order = jnp.argsort(prediction["log_probs"], axis=-1)
    return (order[..., -2:] == labels[..., None]).any(axis=-1).astype(jnp.float32)


TOP_TWO = Metric("top_two", top_two, label="in the first two", direction="higher")


def test_every_metric_of_a_distribution_is_in_the_catalogue():
    for distribution in (Categorical(), Gaussian(), Point(), Quantiles((0.5,))):
        assert {metric.name for metric in distribution.metrics} <= set(CATALOGUE)
    directions = [CATALOGUE[name].direction for name in ("accuracy", "nll", "coverage")]
    assert directions == ["higher", "lower", None]
    unbiased = {name for name, metric in CATALOGUE.items() if metric.interval == "unbiased"}
    assert unbiased == {"ece", "aece", "classwise_ece"}
    labels = [label_of(name) for name in ("rmse", "risk_at_80", "max_probability")]
    assert labels == ["RMSE", "risk at 80 %", "max probability"]
    assert [metric.name for metric in headlines(["mae", "nll", "rmse"])] == ["rmse", "nll", "mae"]
    shown = in_table(["mine", "rmse", "nll", "entropy", "accuracy"])
    assert shown == ["accuracy", "nll", "rmse", "mine"]


def test_a_statistic_becomes_a_score_in_the_targets_own_unit():
    values = {"error": np.float32([1, 2, 6])}
    for unit, expected in {"": 3, "nats": 3, "target": 30, "target^2": 300}.items():
        got = scores_of([Metric("error", unit=unit)], Rows(values, unit=10.0))
        assert got == {"error": pytest.approx(expected)}
    # Weighted by 1, 0.5 and 0: (1 + 1) / 1.5; and the first row drawn twice.
    rows = Rows(values, weights=np.array([1, 0.5, 0]))
    assert rows.mean("error") == pytest.approx(2 / 1.5)
    drawn = Rows(values, weights=np.array([1, 0.5, 0]), draws=np.float32([[2, 1, 0], [0, 2, 1]]))
    np.testing.assert_allclose(drawn.mean("error"), [3 / 2.5, 2])


@pytest.mark.slow
def test_a_metric_of_a_users_is_in_scores_intervals_files_tables_and_lines(tmp_path):
    ensemble, state, logits = network()
    evaluator = Evaluator(ensemble, 8, metrics=[TOP_TWO])
    scores = evaluator.evaluate(state, ArraySplit(INPUTS, LABELS)).scores(intervals=True)
    probs = softmax(logits, -1)

    def share(p):
        return (p.argsort(-1)[:, -2:] == LABELS[:, None]).any(-1).mean()

    assert scores.ensemble["top_two"] == pytest.approx(share(probs.mean(0)))
    assert [m["top_two"] for m in scores.members] == pytest.approx([share(p) for p in probs])
    for of in (scores.intervals["ensemble"], *scores.intervals["members"]):
        low, high = of["top_two"]
        assert 0 < low < high <= 1
    summary = json.loads(json.dumps(scores.to_dict() | {"mean_member": scores.mean_member}))
    described = {"label": "in the first two", "unit": "", "direction": "higher"}
    assert summary["metrics"] == {"top_two": described}
    assert "top_two" in str(scores)
    assert "test/top_two/member_03" in score_record("test", summary["test"], summary["members"])
    write_summary(Disk(tmp_path), summary)
    write_report(Disk(tmp_path), summary, {}, ())
    page = (tmp_path / PAGE).read_text()
    assert re.search(r"in the first two\s*(<[^>]*>\s*)*↑", page)
    # Without it nothing in the file says that there are others.
    plain = Evaluator(ensemble, 8).evaluate(state, ArraySplit(INPUTS, LABELS)).scores()
    assert "metrics" not in plain.to_dict()


@pytest.mark.slow
def test_a_metric_of_real_targets_reads_the_mean_and_the_variance_of_the_mixture():
    ensemble, state, outputs = network(2)
    metric = Metric(
        "bias", lambda prediction, y: prediction["mean"] - y, unit="target", in_table=False
    )
    targets = RANDOM.normal(size=30).astype(np.float32)
    evaluator = Evaluator(ensemble, 8, Spec((4,), "float32", (), None), metrics=[metric])
    scores = evaluator.evaluate(state, ArraySplit(INPUTS, targets)).scores()
    expected = outputs[..., 0].mean() - targets.mean()
    assert scores.ensemble["bias"] == pytest.approx(expected, abs=1e-5)
    assert scores.mean_member["bias"] == pytest.approx(expected, abs=1e-5)
    assert "bias" not in str(scores)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "sentence"),
    [
        # Each of two columns of devices has four of the eight labels.
        (Metric("mine", lambda p, y: p["log_probs"]), "of shape [4, 3] for labels of shape [4]."),
        (Metric("brier"), "Two metrics are called 'brier'."),
        (Metric("confidence", top_two), "'confidence' has the name of a statistic that the pred"),
        (Metric("mine", statistics=("nlll",)), "The metric 'mine' needs the statistics ('nlll',)"),
    ],
)
def test_a_metric_that_does_not_fit_is_told(metric, sentence):
    ensemble, state, _ = network()
    with pytest.raises(UserError, match=re.escape(sentence)):
        Evaluator(ensemble, 8, metrics=[metric]).evaluate(state, ArraySplit(INPUTS, LABELS))


@pytest.mark.slow
def test_scores_of_weighted_examples_are_weighted_means():
    ensemble, state, logits = network()
    weights = RANDOM.uniform(0.5, 2, 30)
    weights[[3, 7]] = 0
    inputs = INPUTS.copy()
    inputs[7] = np.nan  # An example of weight 0 does not count, whatever is predicted for it.
    evaluator = Evaluator(ensemble, 8, metrics=[TOP_TWO])
    evaluation = evaluator.evaluate(state, Weighted(inputs, LABELS, weights.astype(np.float32)))
    scores = evaluation.scores(intervals=True)
    assert evaluation.broken_members == []
    probs = softmax(logits, -1)
    kept = weights > 0
    for scored, p in ((scores.ensemble, probs.mean(0)), (scores.members[1], probs[1])):
        nll, hits = -np.log(p[range(30), LABELS]), p.argmax(-1) == LABELS
        assert scored["nll"] == pytest.approx(np.average(nll, weights=weights), rel=1e-5)
        assert scored["accuracy"] == pytest.approx(np.average(hits, weights=weights), rel=1e-5)
        gaps = (hits - p.max(-1)) * weights
        bins = np.ceil(p.max(-1)[kept] * 15).astype(int)
        ece = sum(abs(gaps[kept][bins == b].sum()) for b in set(bins)) / weights.sum()
        assert scored["ece"] == pytest.approx(ece, abs=1e-5)
        assert 0 < scored["classwise_ece"] < 1
        assert "aurc" not in scored  # Its k most confident rows are counted.
    low, high = scores.intervals["ensemble"]["nll"]
    assert low < scores.ensemble["nll"] < high
    for each, sentence in (
        (-1, "30 of 30 weights are negative or not finite, such as -1.0."),
        (0, "All weights are 0"),
    ):
        with pytest.raises(UserError, match=re.escape(sentence)):
            evaluator.evaluate(state, Weighted(INPUTS, LABELS, np.full(30, each, np.float32)))


@pytest.mark.slow
def test_whole_weights_are_examples_that_come_so_often_and_ones_change_no_bit():
    ensemble, state, _ = network()
    evaluator = Evaluator(ensemble, 8)
    weights = RANDOM.integers(0, 4, 30)
    repeated = np.repeat(np.arange(30), weights)
    weighted = evaluator.evaluate(state, Weighted(INPUTS, LABELS, weights.astype(np.float32)))
    plain = evaluator.evaluate(state, ArraySplit(INPUTS[repeated], LABELS[repeated]))
    assert weighted.scores().ensemble == pytest.approx(plain.scores().ensemble, abs=1e-5)
    assert weighted.scores().members[2] == pytest.approx(plain.scores().members[2], abs=1e-5)
    ones = evaluator.evaluate(state, Weighted(INPUTS, LABELS, np.ones(30, np.float32)))
    without = evaluator.evaluate(state, ArraySplit(INPUTS, LABELS))
    assert ones.weights is None
    assert ones.scores(intervals=True) == without.scores(intervals=True)


@pytest.mark.slow
@pytest.mark.parametrize("of_positions", [True, False])
def test_weights_are_of_examples_or_of_their_positions(of_positions):
    # Each example has 2 labels, of inputs 0 and 1, and of inputs 2 and 3.
    layout = Layout.make(2, ensemble_axis=2, devices=jax.devices()[:4])
    ensemble, state, matrices = linear_members(layout, 3, num_inputs=2)
    labels = RANDOM.integers(0, 3, (30, 2)).astype(np.int32)
    weights = RANDOM.integers(0, 3, (30, 2) if of_positions else 30).astype(np.float32)
    x = INPUTS.reshape(30, 2, 2)
    split = Weighted(x, labels, weights)
    evaluation = Evaluator(ensemble, 8, Spec((2, 2), "float32", (2,), 3)).evaluate(state, split)
    scores = evaluation.scores(intervals=True)
    probs = softmax(np.einsum("npf,mfc->mnpc", x, matrices), -1).mean(0)
    nll = -np.log(np.take_along_axis(probs, labels[..., None], -1))[..., 0]
    of_rows = weights if of_positions else np.repeat(weights[:, None], 2, axis=1)
    assert scores.ensemble["nll"] == pytest.approx(np.average(nll, weights=of_rows), rel=1e-5)
    np.testing.assert_array_equal(evaluation.example_of_row, np.nonzero(of_rows)[0])
    # The sums over classes count as many labels as the weights add up to.
    assert evaluation.group_classwise[0, 0].sum() == pytest.approx(3 * of_rows.sum())
    low, high = scores.intervals["ensemble"]["nll"]
    assert low < scores.ensemble["nll"] < high


def test_means_of_a_loss_function_are_those_of_each_member_and_of_the_mean_member():
    means = {"loss": np.array([2.0, 4.0]), "perplexity": np.array([1.0, 3.0])}
    scores = scores_of_means([5, 9], means, {})
    assert scores.members == [
        {"member_id": 5, "loss": 2.0, "perplexity": 1.0},
        {"member_id": 9, "loss": 4.0, "perplexity": 3.0},
    ]
    assert scores.mean_member == {"loss": 3.0, "perplexity": 2.0}
    assert scores.ensemble == {}
    assert scores.intervals is None
    lines = [line.split() for line in str(scores).splitlines()]
    assert ["┃", "┃", "loss", "┃", "perplexity", "┃"] in lines
    assert ["│", "mean", "member", "│", "3.0000", "│", "2.0000", "│"] in lines
    assert not [line for line in lines if "ensemble" in line]


def test_scores_print_as_a_table_of_at_most_20_members():
    members = [{"member_id": k, "accuracy": k / 100, "entropy": 1.0} for k in range(25)]
    text = repr(Scores([{"accuracy": 0.5, "entropy": 1.0}], members))
    for told in ("ensemble of 25", "0.5000", "member 19", "5 more in .members"):
        assert told in text
    assert not [word for word in ("member 20", "entropy") if word in text]
