"""The best few members of an ensemble: which are chosen, and the choice that a run keeps."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
from scipy.optimize import minimize
from sklearn.datasets import load_digits

import dist_ens as de
import test_trust
from commands import dist_ens
from dist_ens.evaluation.evaluator import Evaluator
from dist_ens.evaluation.examples import Examples
from dist_ens.evaluation.selection import METHODS
from dist_ens.experiment import open_source
from dist_ens.experiment.members import copy_members
from dist_ens.experiment.train import train
from dist_ens.ground.errors import UserError
from dist_ens.ground.state import select_members
from dist_ens.report.facts import listed_weights
from tabled import CLASSES, ROWS, data_of, drawn, members_of, score_of, tabled

AUTOGLUON = json.loads((pathlib.Path(__file__).parent / "selected_by_autogluon.json").read_text())


def caruana(predictions, labels, metric, size):
    """Ensemble selection with replacement, from the paper: members in order, and scores."""
    chosen, path = [], []
    for _ in range(size):
        pools = [predictions[[*chosen, member]].mean(0) for member in range(len(predictions))]
        scores = [round(score_of(metric, pool, labels), 8) for pool in pools]
        chosen.append(scores.index(min(scores)))  # The first of those that are tied.
        path.append(min(scores))
    return chosen, path


def selected(outputs, labels, **options):
    objective = None if outputs.shape[-1] > 1 else de.losses.squared_error()
    ensemble, state = tabled(outputs, objective)
    return de.select(ensemble, state, data_of(labels), **options)


@pytest.mark.parametrize(("members", "size"), [(8, 5), (3, 11), (1, 4), (12, 1)])
@pytest.mark.parametrize("metric", ["nll", "accuracy", "rmse"])
def test_greedy_makes_the_choices_of_the_paper_also_with_ties_and_more_choices_than_members(
    metric, members, size
):
    outputs, labels = drawn(members + size, members, 1 if metric == "rmse" else CLASSES)
    order, path = caruana(members_of(outputs), labels, metric, size)
    if metric == "accuracy" and members > 3:  # It has many ties, since it counts examples.
        scores = [score_of(metric, each, labels) for each in members_of(outputs)]
        assert len({*np.round(scores, 8)}) < members
    found = selected(outputs, labels, size=size, metric=metric)
    assert list(found.choices) == order
    np.testing.assert_allclose(found.path, np.abs(path), rtol=1e-5, atol=1e-6)
    counts = np.bincount(order, minlength=members) / size
    assert list(found.member_ids) == np.flatnonzero(counts).tolist()
    np.testing.assert_allclose(found.weights, counts[counts > 0], rtol=1e-12)


@pytest.mark.parametrize("case", AUTOGLUON["cases"], ids=lambda case: f"seed_{case['seed']}")
def test_greedy_makes_the_choices_of_autogluon(case):
    # The file was written by autogluon.core 1.6.3 for the predictions that `drawn` makes.
    outputs, labels = drawn(case["seed"], case["members"], case["width"])
    assert np.float64(outputs).sum() == pytest.approx(case["sum"], abs=1e-9)
    found = selected(outputs, labels, size=case["size"], metric=case["metric"])
    assert list(found.choices) == case["order"]
    weights = np.zeros(case["members"])
    weights[list(found.member_ids)] = found.weights
    np.testing.assert_allclose(weights, case["weights"], atol=1e-9)
    np.testing.assert_allclose(found.path, case["trajectory"], atol=2e-6)


def test_of_equal_members_the_first_is_chosen_and_chosen_again():
    outputs, labels = drawn(0, 4)
    best = selected(outputs, labels, size=1).choices[0]
    others = np.delete(outputs, best, axis=0)
    outputs = np.stack([others[0], outputs[best], outputs[best], others[1], outputs[best]])
    for method in ("greedy", "top"):
        assert selected(outputs, labels, size=1, method=method).member_ids == (1,)
    assert not {2, 4} & {*selected(outputs, labels, size=9).choices}


def test_top_takes_the_best_members_with_equal_weights():
    outputs, labels = drawn(3, 6)
    own = [score_of("nll", each, labels) for each in members_of(outputs)]
    found = selected(outputs, labels, size=3, method="top")
    assert list(found.choices) == np.argsort(own)[:3].tolist()
    assert found.member_ids == tuple(sorted(found.choices))
    assert found.weights == pytest.approx([1 / 3] * 3)
    pool = members_of(outputs)[list(found.choices)].mean(0)
    assert found.path[-1] == pytest.approx(score_of("nll", pool, labels), rel=1e-5)
    assert len(selected(outputs, labels, size=10, method="top").member_ids) == 6


@pytest.mark.parametrize("metric", ["nll", "rmse"])
def test_stacking_finds_the_weights_of_the_lowest_score(metric):
    outputs, labels = drawn(5, 6, 1 if metric == "rmse" else CLASSES)
    found = selected(outputs, labels, metric=metric, method="stacking")
    predictions = members_of(outputs)

    def score(weights):
        return score_of(metric, np.tensordot(weights, predictions, 1), labels)

    best = minimize(
        score,
        np.full(6, 1 / 6),
        bounds=[(1e-12, 1)] * 6,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    assert found.path[-1] == pytest.approx(best.fun, rel=1e-5)
    weights = np.zeros(6)
    weights[list(found.member_ids)] = found.weights
    np.testing.assert_allclose(weights, best.x, atol=5e-3)
    assert {*found.member_ids} == {*np.flatnonzero(best.x > 1e-4)}
    assert len(found.member_ids) < 6 or metric == "rmse"
    greedy = selected(outputs, labels, size=20, metric=metric)
    assert found.path[-1] <= min(greedy.path) + 1e-6


def test_members_that_diverged_or_are_frozen_are_never_chosen():
    outputs, labels = drawn(1, 5)
    outputs[0, 7] = np.nan
    ensemble, state = tabled(outputs, failure_policy="freeze")
    frozen = np.arange(5) == 1
    state = ensemble.with_record(state)
    state = state._replace(failures=state.failures._replace(is_frozen=jax.numpy.array(frozen)))
    for method in METHODS:
        found = de.select(ensemble, state, data_of(labels), size=9, method=method)
        assert {*found.member_ids} <= {2, 3, 4}, method
        assert np.isfinite(found.path).all()
    outputs, labels = drawn(1, 4, 1)
    outputs[2] = 1e30  # Its squared error is infinite in float32.
    for method in METHODS:
        found = selected(outputs, labels, size=9, method=method, metric="rmse")
        assert {*found.member_ids} <= {0, 1, 3}, method
    outputs, labels = drawn(1, 4)
    ensemble, state = tabled(np.full_like(outputs, np.nan))
    with pytest.raises(UserError, match=r"None of the 4 members can be chosen: each one predicts"):
        de.select(ensemble, state, data_of(labels))


def test_members_predict_once_and_examples_have_their_weights(monkeypatch):
    outputs, labels = drawn(2, 6)
    calls = []
    batches = Evaluator._batches
    monkeypatch.setattr(Evaluator, "_batches", lambda *a: calls.append(1) or batches(*a))
    ensemble, state = tabled(outputs)
    data = data_of(labels) | {"weights": np.arange(ROWS) % 3 * 1.0}
    found = de.select(ensemble, state, data, size=4, batch_size=25)
    assert len(calls) == 1
    counted = data["weights"] > 0
    twice = np.flatnonzero(counted).repeat(data["weights"][counted].astype(int))
    again = {"inputs": data["inputs"][twice], "labels": labels[twice]}
    assert found.choices == de.select(ensemble, state, again, size=4).choices


def test_the_chosen_members_are_trained_on():
    outputs, labels = drawn(4, 8)
    ensemble, state = tabled(outputs)
    chosen = de.select(ensemble, state, data_of(labels), size=3)
    assert chosen.state.member_id.tolist() == list(chosen.member_ids)
    result = de.fit(
        chosen.ensemble, data_of(labels), state=chosen.state, steps=2, batch_size=20, progress=False
    )
    assert result.state.member_id.tolist() == list(chosen.member_ids)
    assert result.state.step.tolist() == [2] * len(chosen.member_ids)
    scores = de.evaluate(ensemble, chosen.state, data_of(labels), weights=chosen.weights)
    assert scores.ensemble["nll"] == pytest.approx(chosen.path[-1], rel=1e-5)


@pytest.mark.parametrize("is_numpy", [False, True])
@pytest.mark.parametrize("ids", [[2, 0], range(8)])
def test_members_of_a_state_are_chosen_from_an_ensemble_of_others(ids, is_numpy):
    outputs, labels = drawn(4, 8)
    ensemble, state = tabled(outputs)
    given = select_members(state, [1, 3])
    given = jax.device_get(given) if is_numpy else given
    chosen = de.select(ensemble.with_members(ids), given, data_of(labels), size=3)
    assert {*chosen.member_ids} <= {1, 3}
    assert chosen.ensemble.ids.tolist() == chosen.state.member_id.tolist()


def test_a_selection_that_cannot_be_made_is_refused_in_a_sentence():
    outputs, labels = drawn(0, 4)
    ensemble, state = tabled(outputs)
    data = data_of(labels)
    for options, sentence in [
        ({"size": 0}, "size is 0. Give a whole number from 1"),
        ({"metric": "nl"}, "metric='nl' is unknown. Did you mean 'nll'"),
        ({"metric": "entropy"}, "metric='entropy' is unknown. Choose one of accuracy, nll"),
        ({"method": "best"}, "method='best' is unknown"),
        ({"metric": "accuracy", "method": "stacking"}, "Stacking follows the slope of a mean"),
        ({"metric": "ece", "method": "stacking"}, "Stacking follows the slope of a mean"),
    ]:
        with pytest.raises(UserError, match=sentence):
            de.select(ensemble, state, data, **options)
    grouped = tabled(outputs, num_groups=2)
    both = {"inputs": np.stack([data["inputs"]] * 2), "labels": np.stack([labels] * 2)}
    both = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in both.items()}
    with pytest.raises(UserError, match="this ensemble has 2 groups"):
        de.select(*grouped, both)


# The choice that a run keeps.


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("chosen") / "run"
    data = test_trust.DIGITS | {"validation": 0.2}
    checkpoint = {"every_steps": 10, "keep": 5}
    options = {"num_members": 5, "steps": 20, "steps_per_call": 10, "checkpoint": checkpoint}
    train(test_trust.experiment(data, **options), workdir)
    return workdir


def command(*words):
    ended = dist_ens(*map(str, words))
    assert ended.returncode == 0, ended.stderr
    return " ".join(ended.stdout.split())


def test_a_choice_is_kept_in_the_run_and_used_until_all_members_are(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    x = load_digits().images[:9]
    np.save(tmp_path / "x.npy", x)
    predict = ["predict", f"--workdir={run}", f"--input={tmp_path / 'x.npy'}"]
    predict.append(f"--output={tmp_path / 'p.npz'}")
    opened = de.load(run)
    plain = opened.predict(x).mean
    of_all = opened.evaluate().ensemble["nll"]
    command("evaluate", f"--workdir={run}")
    told = command("members", run, "choose", "--size=3")
    source = open_source(opened.run.experiment.data)
    valid = Examples(source.valid, source.spec)
    chosen = de.select(opened.ensemble, opened.state, valid, size=3)
    assert 1 < len(chosen.member_ids) < 5
    listed = listed_weights(chosen.member_ids, chosen.weights)
    assert f"Chose {len(chosen.member_ids)} of 5 members of step 20, with weights: {listed}" in told
    # The page says that its scores were made before.
    command("report", run, f"--output={tmp_path / 'report.html'}")
    page = (tmp_path / "report.html").read_text()
    assert "5 more members would gain" in page
    assert "by greedy selection on the validation NLL; these scores were made before" in page
    opened = de.load(run)
    found = opened.predict(x)
    expected = opened.ensemble.predict(chosen.state, x, weights=chosen.weights)
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-6)
    assert np.abs(np.asarray(found.mean) - plain).max() > 1e-3
    note = f"The ensemble is the chosen members, with weights: {listed}."
    assert note in command(*predict)
    np.testing.assert_allclose(np.load(tmp_path / "p.npz")["probs"], expected.mean, atol=1e-6)
    file = tmp_path / "scores.json"
    words = [f"--workdir={run}", f"--json={file}", "--calibration=temperature", "--conformal=lac"]
    told = command("evaluate", *words)
    assert note in told
    scores = json.loads(file.read_text())
    by_python = opened.evaluate()
    assert scores["test"]["nll"] == pytest.approx(by_python.ensemble["nll"], rel=1e-5)
    assert scores["test"]["nll"] != pytest.approx(of_all, rel=1e-4)
    assert scores["member_weights"] == pytest.approx(by_python.member_weights)
    assert {*scores["left_out_members"]} == {*range(5)} - {*chosen.member_ids}
    page = (run / "report.html").read_text()
    assert f"<dd>{listed}</dd>" in page
    assert "made before" not in page
    assert "Nothing can be said about more members: it takes 4 or more of equal weight" in page
    # A calibration of the chosen members is used with them, and refused with others.
    found = opened.predict(x, calibrated=True, conformal=0.9)
    command(*predict, "--calibrated", "--conformal=0.9")
    np.testing.assert_allclose(np.load(tmp_path / "p.npz")["probs"], found.mean, atol=1e-6)
    np.testing.assert_array_equal(np.load(tmp_path / "p.npz")["sets"], found.sets)
    assert "All members of step 20 predict again" in command("members", run, "choose", "--size=all")
    np.testing.assert_array_equal(de.load(run).predict(x).mean, plain)
    command("report", run, f"--output={tmp_path / 'report.html'}")
    page = (tmp_path / "report.html").read_text()
    assert "all members; these scores were made before" in page
    with pytest.raises(UserError, match="The calibration was fitted for another prediction"):
        de.load(run).predict(x, calibrated=True)
    assert json.loads((run / "answers.json").read_text())["steps"]["20"]["answers"]["choice"] == {}
    assert command("members", run, "verify").endswith("Step 20: sound.")


def test_a_choice_is_of_one_step_and_its_members(finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    x = load_digits().images[:9]
    command("members", run, "choose", "--step=10", "--size=2", "--method=top", "--metric=accuracy")
    at_10 = de.load(run, step=10)
    assert len(at_10.choice.member_ids) == 2
    assert at_10.choice.weights == pytest.approx([0.5, 0.5])
    newest = de.load(run)
    assert newest.choice.member_ids == ()
    note = "All members of step 20 are used, because the choice of members is one of step 10."
    assert newest.choice.note.startswith(note)
    assert note in command("evaluate", f"--workdir={run}")
    np.testing.assert_array_equal(newest.predict(x).mean, de.load(finished).predict(x).mean)
    # Members that are asked for by their ids count equally.
    two = de.load(run, step=10, members=[0, 4])
    assert two.choice.member_ids == ()
    # The same step of other members has no choice.
    other = tmp_path / "other"
    copy_members([finished], other, member_ids=[0, 1, 2], step=10)
    shutil.copy(run / "answers.json", other / "answers.json")
    assert de.load(other).choice.member_ids == ()


def test_a_choice_needs_validation_data_and_a_number(finished, tmp_path):
    workdir = tmp_path / "run"
    train(test_trust.experiment(test_trust.DIGITS, num_members=2, steps=2), workdir)
    ended = dist_ens("members", str(workdir), "choose")
    assert ended.returncode == 2
    assert "Members are chosen on validation data, and the run held none out" in ended.stderr
    ended = dist_ens("members", str(finished), "choose", "--size=few")
    assert "--size='few' is no number of choices. Try 5, or all." in ended.stderr
