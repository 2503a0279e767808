"""Answers that a run keeps: all are on its page, and its predictions are calibrated by them."""

import json
import shutil

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.datasets import load_digits

import dist_ens as de
import test_trust
from commands import dist_ens
from conformal_coverage import coverage_of_intervals, coverage_of_sets
from dist_ens.evaluation.conformal import jackknife_plus
from dist_ens.experiment import open_source
from dist_ens.experiment.assessment import EvaluationRequest, assess, out_of_bag_of
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.loaded_run import keep
from dist_ens.experiment.members import copy_members
from dist_ens.experiment.train import train
from dist_ens.ground.errors import UserError
from dist_ens.report import SCORES, read_answers, read_run
from dist_ens.storage import Disk
from test_load import write_table

STEPS = 30


def experiment(data, **changes):
    fixed = {"num_members": 3, "steps": STEPS, "steps_per_call": STEPS}
    fixed["checkpoint"] = {"every_steps": STEPS, "keep": 5}
    return test_trust.experiment(data, **fixed | changes)


DIGITS = test_trust.DIGITS | {"validation": 0.2}


def ask(workdir, step=None, **questions):
    """Asks a run in this process, and keeps the answers as `dist-ens evaluate` does."""
    run, ensemble, state, at, *_ = open_finished(workdir, step=step)
    source, request = open_source(run.experiment.data), EvaluationRequest(**questions)
    found = assess(run, run.evaluator(ensemble), state, source, request)
    answers = {SCORES: found.scores_to_dict(), **found.answers}
    keep(Disk(workdir), at, answers, is_newest=step is None)
    return found.to_dict()


def predicted_by_command(workdir, x):
    """Arrays that `dist-ens predict` writes, calibrated and at the level 0.8."""
    np.save(workdir / "x.npy", x)
    files = [f"--input={workdir / 'x.npy'}", f"--output={workdir / 'p.npz'}"]
    words = [f"--workdir={workdir}", "--calibrated", "--conformal=0.8", *files]
    ended = dist_ens("predict", *words)
    assert ended.returncode == 0, ended.stderr
    return np.load(workdir / "p.npz")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("answers") / "run"
    train(experiment(DIGITS), workdir)
    return workdir


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_every_question_stays_answered_on_the_page_and_predictions_use_the_answers(run):
    ask(run, calibration="temperature")
    ask(run, conformal="aps")
    ask(run, shift=True)
    ended = dist_ens("evaluate", f"--workdir={run}", "--conformal=lac", "--level=0.7")
    assert ended.returncode == 0, ended.stderr
    assert "Wrote report.html" in ended.stdout
    text = (run / "report.html").read_text()
    for section in ("calibration", "conformal", "shift", "reliability"):
        assert f'<section id="{section}">' in text, section
    assert "after temperature" in text
    assert "Older" not in text
    kept = read_run(run).answers
    conformal = {"conformal=lac level=0.7", "conformal=aps level=0.9"}
    assert {*kept} == {"calibration=temperature", "shift"} | conformal
    assert {answer["step"] for answer in kept.values()} == {STEPS}

    x, labels = load_digits().images, load_digits().target
    written, loaded = predicted_by_command(run, x), de.load(run)
    p, plain = loaded.predict(x, calibrated=True, conformal=0.8), loaded.predict(x)
    temperature = kept["calibration=temperature"]["scores"]["parameters"]["temperature"]
    expected = softmax(np.log(np.float64(plain.mean)) / temperature, -1)
    np.testing.assert_allclose(p.mean, expected, atol=1e-6)
    np.testing.assert_allclose(written["probs"], p.mean, atol=1e-6)
    np.testing.assert_allclose(written["member_probs"], plain.members, atol=1e-6)
    np.testing.assert_array_equal(written["sets"], p.sets)
    # Most of these examples were trained on, so that sets hold more than the requested share.
    assert coverage_of_sets(p.sets, labels) > 0.78


def test_answers_of_an_earlier_step_are_marked_and_calibrate_no_later_one(run):
    ask(run, calibration="temperature", shift=True, ood="digits")
    message = r"has no conformal rule of step 30.*evaluate .*--conformal=lac"
    with pytest.raises(UserError, match=message):
        de.load(run).predict(load_digits().images, conformal=0.9)
    train(experiment(DIGITS, steps=2 * STEPS), run)
    ended = dist_ens("evaluate", f"--workdir={run}", "--conformal=lac", "--level=0.8")
    assert ended.returncode == 0, ended.stderr
    text = (run / "report.html").read_text()
    kept = read_run(run).answers["calibration=temperature"]
    assert f"{kept['before']['test']['nll']:.4f}" in text  # beside the older NLL after it
    older = "Older: of step 30, and the scores above are of step 60."
    assert text.count(older) == 4  # calibration, shift, ood and its detection
    x = load_digits().images[:9]
    with pytest.raises(UserError, match="no calibration of step 60, whose members predict here"):
        de.load(run).predict(x, calibrated=True)
    before = de.load(run, step=STEPS).predict(x, calibrated=True)
    assert np.abs(before.mean - de.load(run, step=STEPS).predict(x).mean).max() > 0.01
    # A question to the earlier step is kept with it, and the page still shows the later one.
    ask(run, step=STEPS, conformal="aps")
    assert [*read_answers(Disk(run))] == ["30", "60"]
    report = read_run(run)
    assert report.step == 60
    assert report.answers["conformal=lac level=0.8"]["step"] == 60
    assert report.answers["conformal=aps level=0.9"]["step"] == 30


def test_a_calibration_belongs_to_its_members_and_not_to_others_of_the_same_step(run, tmp_path):
    ask(run, calibration="temperature")
    x = load_digits().images[:9]
    copy_members([run], tmp_path / "two", member_ids=[0, 2])
    with pytest.raises(UserError, match="has no calibration of step 30, whose members predict"):
        de.load(tmp_path / "two").predict(x, calibrated=True)
    with pytest.raises(UserError, match=r"member_ids \(0, 1, 2\) in place of \(0, 2\)"):
        de.load(run, members=[0, 2]).predict(x, calibrated=True)
    # Another run in the same folder has other members at the same step.
    shutil.rmtree(run / "checkpoints")
    train(experiment(DIGITS, optimizer={"learning_rate": 0.001}), run)
    with pytest.raises(UserError, match="has no calibration of step 30"):
        de.load(run).predict(x, calibrated=True)
    ask(run, shift=True)
    assert [*read_answers(Disk(run))["30"]["answers"]] == [SCORES, "shift"]


def test_a_number_that_was_changed_in_the_answers_calibrates_nothing(run):
    ask(run, calibration="temperature")
    file = run / "answers.json"
    content = json.loads(file.read_text())
    fitted = content["steps"]["30"]["answers"]["calibration=temperature"]["calibration"]
    fitted["parameters"]["temperature"] *= 2
    file.write_text(json.dumps(content))
    message = "answers.json cannot be read for the report: its content does not match its hash"
    with pytest.raises(UserError, match=message):
        de.load(run).predict(load_digits().images[:9], calibrated=True)
    ended = dist_ens("evaluate", f"--workdir={run}", "--shift")
    assert ended.returncode == 2
    assert message in ended.stderr


def test_intervals_of_a_table_are_in_its_own_unit_on_the_command_line_and_in_python(tmp_path):
    # float32 has steps of 0.06 at a million, and of 8 at 1e8: the noise of these targets is 1.
    offset, random = 1e8, np.random.default_rng(1)
    x = random.normal(size=(400, 2))
    targets = offset + 3 * x[:, 0] - x[:, 1] + random.normal(size=400)
    write_table(tmp_path / "table.npz", x, targets, *np.split(np.arange(400), [300]))
    x, targets = x[300:], targets[300:]
    data = {"source": f"uci:{tmp_path / 'table.npz'}", "global_batch_size": 32}
    data |= {"validation": 0.25, "examples": "kfold", "num_folds": 2}
    workdir = tmp_path / "run"
    train(experiment(data, loss={"name": "gaussian"}, num_members=4, steps=120), workdir)
    for method in ("cqr", "cv+"):
        told = ask(workdir, calibration="variance", conformal=method, level=0.8)
        written = predicted_by_command(workdir, x)
        p = de.load(workdir).predict(x, calibrated=True, conformal=0.8)
        low, high = p.interval
        np.testing.assert_allclose(written["lower"] - offset, low - offset, atol=1e-4)
        np.testing.assert_allclose(written["upper"] - offset, high - offset, atol=1e-4)
        np.testing.assert_allclose(written["variance"], p.total, rtol=1e-4)
        # The intervals are those that were scored on this split.
        found = told["conformal"]
        assert coverage_of_intervals(low, high, targets) == found["coverage"] > 0.65
        assert np.mean(high - low) == pytest.approx(found["mean_width"], rel=1e-4)
        scale = told["calibrated"]["parameters"]["scale"]
        np.testing.assert_allclose(p.total, scale * de.load(workdir).predict(x).total, rtol=1e-6)
    # The last intervals by hand: members predict a training example if they left it out.
    run, ensemble, state, *_ = open_finished(workdir)
    evaluator, source = run.evaluator(ensemble), open_source(run.experiment.data)
    mask = out_of_bag_of(run, evaluator, state)
    of_table = np.load(tmp_path / "table.npz")["data"][source.train_positions]
    left_out = evaluator.predict(state, of_table[:, :2].astype(np.float32))["member_mean"]
    residuals = np.abs(of_table[:, 2] - (mask * left_out).sum(0) / mask.sum(0))
    members = evaluator.predict(state, x)["member_mean"]
    by_hand = jackknife_plus(residuals, mask, members, 0.8)
    np.testing.assert_allclose(low - offset, by_hand[0] - offset, atol=1e-4)
    np.testing.assert_allclose(high - offset, by_hand[1] - offset, atol=1e-4)
