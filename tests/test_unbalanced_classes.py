"""Metrics of unbalanced classes, beside scikit-learn's functions."""

import json

import numpy as np
import pytest
from scipy.special import softmax
from sklearn import metrics as sklearn_metrics

import dist_ens as de
from commands import dist_ens
from dist_ens.ground.errors import UserError
from dist_ens.metrics import bootstrap_weights
from tabled import data_of, tabled

NAMES = ["balanced_accuracy", "macro_f1", "auroc", "average_precision"]
RANDOM = np.random.default_rng(0)
ROWS, CLASSES = 90, 4
LABELS = np.repeat(np.arange(CLASSES), [60, 20, 7, 3])
OUTPUTS = (
    1.5 * np.eye(CLASSES)[LABELS] + [1, 0, 0, -0.5] + RANDOM.normal(size=(3, ROWS, CLASSES))
).astype(np.float32)


def expected_of(labels, probs, weights=None, classes=None):
    """The four scores of probabilities, by scikit-learn, of the classes that have examples."""
    predicted, present = probs.argmax(-1), np.unique(labels)
    ranked = [
        [
            score(labels == c, probs[:, c], sample_weight=weights)
            for c in (present if classes is None else classes)
        ]
        for score in (sklearn_metrics.roc_auc_score, sklearn_metrics.average_precision_score)
    ]
    recalls = sklearn_metrics.recall_score(
        labels, predicted, labels=present, average="macro", sample_weight=weights
    )
    f1 = sklearn_metrics.f1_score(labels, predicted, average="macro", sample_weight=weights)
    return dict(zip(NAMES, [recalls, f1, *map(np.mean, ranked)], strict=True))


def probs_of(outputs=OUTPUTS):
    return softmax(outputs.astype(np.float64), -1)


def test_scores_are_those_of_scikit_learn():
    ensemble, state = tabled(OUTPUTS)
    scores = de.evaluate(ensemble, state, data_of(LABELS), metrics=NAMES)
    pooled = probs_of().mean(0)
    expected = expected_of(LABELS, pooled)
    assert {name: scores.ensemble[name] for name in NAMES} == pytest.approx(expected, abs=1e-6)
    balanced = sklearn_metrics.balanced_accuracy_score(LABELS, pooled.argmax(-1))
    assert expected["balanced_accuracy"] == pytest.approx(balanced)
    ranked = sklearn_metrics.roc_auc_score(LABELS, pooled, multi_class="ovr")
    assert expected["auroc"] == pytest.approx(ranked)
    for member, probs in zip(scores.members, probs_of(), strict=True):
        found = {name: member[name] for name in NAMES}
        assert found == pytest.approx(expected_of(LABELS, probs), abs=1e-6)


def test_the_scores_of_each_class_are_listed():
    ensemble, state = tabled(OUTPUTS)
    rows = de.evaluate(ensemble, state, data_of(LABELS), metrics=NAMES).by_class
    probs = probs_of().mean(0)
    predicted = probs.argmax(-1)
    assert [row["class"] for row in rows] == [0, 1, 2, 3]
    assert [row["examples"] for row in rows] == [60, 20, 7, 3]
    of_each = {
        "recall": sklearn_metrics.recall_score(LABELS, predicted, average=None),
        "f1": sklearn_metrics.f1_score(LABELS, predicted, average=None),
        "auroc": [sklearn_metrics.roc_auc_score(c == LABELS, probs[:, c]) for c in range(CLASSES)],
    }
    for name, expected in of_each.items():
        assert [row[name] for row in rows] == pytest.approx(expected, abs=1e-6)


def test_a_class_without_examples_does_not_count():
    labels = np.where(LABELS == 2, 1, LABELS)
    outputs = OUTPUTS.copy()
    ensemble, state = tabled(outputs)
    scores = de.evaluate(ensemble, state, data_of(labels), metrics=NAMES)
    # scikit-learn counts class 2 in the F1, because it is predicted, and so does this one.
    probs = probs_of(outputs).mean(0)
    assert 2 in probs.argmax(-1)
    expected = expected_of(labels, probs)
    assert {name: scores.ensemble[name] for name in NAMES} == pytest.approx(expected, abs=1e-6)
    assert scores.by_class[2] == {"class": 2, "examples": 0, "f1": 0}
    outputs[..., 2] -= 20  # It is not predicted either.
    ensemble, state = tabled(outputs)
    scores = de.evaluate(ensemble, state, data_of(labels), metrics=NAMES)
    expected = expected_of(labels, probs_of(outputs).mean(0))
    assert {name: scores.ensemble[name] for name in NAMES} == pytest.approx(expected, abs=1e-6)
    assert scores.by_class[2] == {"class": 2, "examples": 0}


def test_weighted_scores_and_intervals_are_those_of_weighted_examples():
    ensemble, state = tabled(OUTPUTS)
    probs = probs_of().mean(0)
    weights = 0.25 + np.arange(ROWS) % 4
    data = data_of(LABELS) | {"weights": weights.astype(np.float32)}
    scores = de.evaluate(ensemble, state, data, metrics=NAMES)
    expected = expected_of(LABELS, probs, weights)
    assert {name: scores.ensemble[name] for name in NAMES} == pytest.approx(expected, abs=1e-6)
    drawn = []
    for counts in bootstrap_weights(ROWS, 400, 0)[:]:
        kept = counts > 0
        drawn.append(expected_of(LABELS[kept], probs[kept], counts[kept] * weights[kept]))
    for name in NAMES:
        ends = np.quantile([each[name] for each in drawn], [0.025, 0.975])
        assert scores.intervals["ensemble"][name] == pytest.approx(ends, abs=1e-6)


def test_tied_classes_count_in_part_in_the_recall():
    outputs = np.zeros((1, ROWS, CLASSES), np.float32)  # All classes are equally probable.
    ensemble, state = tabled(outputs)
    scores = de.evaluate(ensemble, state, data_of(LABELS), metrics=["balanced_accuracy", "auroc"])
    assert scores.ensemble["balanced_accuracy"] == pytest.approx(1 / CLASSES)
    assert scores.ensemble["auroc"] == pytest.approx(0.5)


def test_a_broken_member_has_no_score():
    outputs = OUTPUTS.copy()
    outputs[1, 5] = np.nan
    ensemble, state = tabled(outputs)
    scores = de.evaluate(ensemble, state, data_of(LABELS), metrics=NAMES)
    assert all(np.isnan(scores.members[1][name]) for name in NAMES)
    assert all(np.isnan(scores.ensemble[name]) for name in NAMES)
    assert all(np.isfinite(scores.members[0][name]) for name in NAMES)


def test_the_default_scores_and_the_table_do_not_change():
    ensemble, state = tabled(OUTPUTS)
    scores = de.evaluate(ensemble, state, data_of(LABELS))
    assert not {*NAMES} & scores.ensemble.keys()
    assert "class" not in repr(scores)  # Classes without names have no rows in the table.
    assert [row["recall"] for row in scores.by_class] == pytest.approx(
        [row["accuracy"] for row in scores.by_class]
    )
    balanced = de.evaluate(ensemble, state, data_of(np.arange(ROWS) % CLASSES))
    assert balanced.by_class == []
    asked = de.evaluate(ensemble, state, data_of(LABELS), metrics=["macro_f1"])
    assert "macro_f1" in repr(asked)


@pytest.mark.parametrize(
    ("metrics", "told"),
    [
        (["balanced_acuracy"], "'balanced_acuracy'. Did you mean 'balanced_accuracy'?"),
        (["accuracy"], "have the optional metrics balanced_accuracy, macro_f1, auroc"),
        ("auroc", "metrics is a str, not a list"),
        (["auroc", "auroc"], "Two metrics are called 'auroc'"),
    ],
)
def test_other_names_are_refused(metrics, told):
    ensemble, state = tabled(OUTPUTS)
    with pytest.raises(UserError, match=told.replace("?", r"\?")):
        de.evaluate(ensemble, state, data_of(LABELS), metrics=metrics)


def test_a_run_from_a_config_reports_unbalanced_classes(tmp_path):
    x = RANDOM.normal(size=(400, 2)).astype(np.float32)
    y = np.digitize(x[:, 0] + 0.5 * RANDOM.normal(size=400), [1.0, 1.7])
    np.savez(tmp_path / "rare.npz", x=x, y=y)
    workdir = tmp_path / "run"
    config = {
        "steps": 40,
        "num_members": 2,
        "data.source": f"npz:{tmp_path}/rare.npz",
        "data.std": 1.0,
        "evaluation.metrics": "('macro_f1', 'auroc')",
    }
    flags = [f"--config.{name}={value}" for name, value in config.items()]
    ended = dist_ens("train", "--config=configs/digits.py", f"--workdir={workdir}", *flags)
    assert ended.returncode == 0, ended.stderr
    assert "macro_f1" in ended.stdout
    summary = json.loads((workdir / "summary.json").read_text())
    assert [row["class"] for row in summary["by_class"]] == [0, 1, 2]
    assert {"recall", "f1", "auroc"} <= summary["by_class"][2].keys()
    page = (workdir / "report.html").read_text()
    assert "<h2>Classes</h2>" in page
    assert ">recall<" in page
    run = de.load(workdir)
    scores = run.evaluate({"inputs": x, "labels": y}, metrics=["balanced_accuracy"])
    expected = expected_of(y, np.asarray(run.predict(x).mean))
    found = {name: scores.ensemble[name] for name in NAMES[:3]}
    assert found == pytest.approx({name: expected[name] for name in NAMES[:3]}, abs=1e-6)
