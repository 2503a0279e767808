"""`evaluate` and `predict` use the newest step or the one that is asked for, and say which."""

import json
import shutil

import numpy as np
import pytest
import safetensors

import dist_ens as de
from commands import dist_ens
from dist_ens.checkpoint import newest, read_members
from dist_ens.checkpoint.reading import SavedStep
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.networks import export_members
from dist_ens.experiment.train import train
from dist_ens.ground.errors import ReplacedError, UserError
from test_replay import experiment


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A run with the steps 3 and 6, and a page."""
    folder = tmp_path_factory.mktemp("chosen_step") / "run"
    train(experiment(execution="vmap", layout={"ensemble_axis": 1}), folder)
    (folder / "report.html").write_text("of the newest step")
    return folder


def probs_at(workdir, step, inputs):
    finished = open_finished(workdir, step=step)
    return finished.run.evaluator(finished.ensemble).predict(finished.state, inputs)


@pytest.mark.parametrize(("flags", "step"), [(["--step=3"], 3), ([], 6)])
def test_predict_uses_a_step_and_names_it(workdir, tmp_path, flags, step):
    inputs = np.random.default_rng(0).uniform(0, 16, (5, 8, 8)).astype(np.float32)
    np.save(tmp_path / "x.npy", inputs)
    files = [f"--input={tmp_path / 'x.npy'}", f"--output={tmp_path / 'p.npz'}"]
    ended = dist_ens("predict", f"--workdir={workdir}", *files, *flags)
    assert ended.returncode == 0, ended.stderr
    assert f"The members are those of step {step}." in ended.stdout
    expected = {at: probs_at(workdir, at, inputs)["member_probs"] for at in (3, 6)}
    with np.load(tmp_path / "p.npz") as written:
        np.testing.assert_allclose(written["member_probs"], expected[step], rtol=1e-4)
    assert np.abs(expected[3] - expected[6]).max() > 1e-3


def test_evaluate_uses_a_step_and_names_it_and_leaves_the_page_of_the_newest(workdir, tmp_path):
    (tmp_path / "scores.json").write_text("{}")
    (tmp_path / "link.json").symlink_to(tmp_path / "scores.json")
    flags = [f"--workdir={workdir}", "--step=3", f"--json={tmp_path / 'link.json'}"]
    ended = dist_ens("evaluate", *flags)
    assert ended.returncode == 0, ended.stderr
    assert "Scores of step 3:" in ended.stdout
    assert (workdir / "report.html").read_text() == "of the newest step"
    at_6 = json.loads((workdir / "summary.json").read_text())
    at_3 = json.loads((tmp_path / "scores.json").read_text())
    assert at_3["test"]["nll"] != pytest.approx(at_6["test"]["nll"], rel=1e-3)
    # A person may name a link for an output. It stays.
    assert (tmp_path / "link.json").is_symlink()


@pytest.mark.parametrize("moment", ["before it is read", "before its arrays are read"])
@pytest.mark.parametrize("door", [open_finished, de.load, read_members, export_members])
def test_a_reader_moves_on_once_to_the_step_by_which_a_run_replaces_the_newest(
    workdir, tmp_path, monkeypatch, door, moment
):
    run, ahead = tmp_path / "run", tmp_path / "6"
    shutil.copytree(workdir, run)
    (run / "checkpoints" / "6").rename(ahead)

    def replacing(path):
        saved = SavedStep(path) if moment == "before its arrays are read" else None
        if ahead.exists():  # The run saves step 6, and deletes step 3.
            ahead.rename(run / "checkpoints" / "6")
            shutil.rmtree(run / "checkpoints" / "3")
        return saved or SavedStep(path)

    monkeypatch.setattr(newest, "SavedStep", replacing)
    if door is export_members:
        door(run, tmp_path / "exported")
        metadata = safetensors.safe_open(tmp_path / "exported" / "member_00.safetensors", "np")
        assert metadata.metadata()["step"] == "6"
        return
    assert door(run).step == 6
    with pytest.raises(UserError, match="no checkpoint of step 3"):
        door(run, step=3)


def test_a_step_that_was_asked_for_is_not_exchanged_for_another(workdir, tmp_path, monkeypatch):
    shutil.copytree(workdir, tmp_path / "run")

    def replacing(checkpoint):
        shutil.rmtree(checkpoint.path)
        return SavedStep(checkpoint)

    monkeypatch.setattr(newest, "SavedStep", replacing)
    with pytest.raises(ReplacedError, match="checkpoints/3 does not exist any more"):
        read_members(tmp_path / "run", step=3)
