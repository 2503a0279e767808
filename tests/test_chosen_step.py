"""`evaluate` and `predict` use the newest step or the one that is asked for, and say which."""

import json

import numpy as np
import pytest

from commands import dist_ens
from dist_ens.experiment.build import evaluator_of_run
from dist_ens.experiment.workdir import open_finished
from test_replay import trained


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run with the steps 3 and 6, and a page."""
    folder = tmp_path_factory.mktemp("chosen_step") / "run"
    trained(folder, execution="vmap", layout={"ensemble_axis": 1})
    (folder / "report.html").write_text("of the newest step")
    return folder


def probs_at(workdir, step, inputs):
    finished = open_finished(workdir, step=step)
    return evaluator_of_run(finished.run, finished.ensemble).predict(finished.state, inputs)


@pytest.mark.parametrize(("flags", "step"), [(["--step=3"], 3), ([], 6)])
def test_predict_uses_a_step_and_names_it(workdir, tmp_path, flags, step):
    inputs = np.random.default_rng(0).uniform(0, 16, (5, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", inputs)
    ended = dist_ens(
        "predict",
        f"--workdir={workdir}",
        f"--input={tmp_path / 'x.npy'}",
        f"--output={tmp_path / 'p.npz'}",
        *flags,
    )
    assert ended.returncode == 0, ended.stderr
    assert f"The members are those of step {step}." in ended.stdout
    expected = {at: probs_at(workdir, at, inputs)["member_probs"] for at in (3, 6)}
    with np.load(tmp_path / "p.npz") as written:
        np.testing.assert_allclose(written["member_probs"], expected[step], rtol=1e-4)
    assert np.abs(expected[3] - expected[6]).max() > 1e-3


def test_evaluate_uses_a_step_and_names_it_and_leaves_the_page_of_the_newest(workdir, tmp_path):
    (tmp_path / "scores.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / "scores.json")
    ended = dist_ens(
        "evaluate", f"--workdir={workdir}", "--step=3", f"--json={tmp_path / 'link.json'}"
    )
    assert ended.returncode == 0, ended.stderr
    assert "Scores of step 3:" in ended.stdout
    assert (workdir / "report.html").read_text() == "of the newest step"
    at_6 = json.loads((workdir / "summary.json").read_text())
    at_3 = json.loads((tmp_path / "scores.json").read_text())
    assert at_3["test"]["nll"] != pytest.approx(at_6["test"]["nll"], rel=1e-3)
    # A person may name a link for an output. It stays.
    assert (tmp_path / "link.json").is_symlink()


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_a_step_that_is_not_saved_is_refused_with_those_that_are(workdir, tmp_path, verb):
    np.save(tmp_path / "x.npy", np.zeros((1, 8, 8), np.float32))
    files = [f"--input={tmp_path / 'x.npy'}", f"--output={tmp_path / 'p.npz'}"]
    ended = dist_ens(
        verb, f"--workdir={workdir}", "--step=4", *(files if verb == "predict" else [])
    )
    assert ended.returncode == 2
    assert "There is no checkpoint of step 4" in ended.stderr
    assert "the saved steps are 3, 6" in ended.stderr
