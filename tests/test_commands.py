"""The commands as a user types them."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from commands import LIMIT_SECS, dist_ens, python, wait_for
from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens.evaluation.out_of_bag import examples_out_of_bag
from dist_ens.experiment import DataConfig, open_source
from dist_ens.ground.errors import ExitCode

SMALL = ["--config=configs/digits.py", "--config.model.hidden_sizes=(32,)"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of the first command of README, in small; compiled as a user's is."""
    workdir = tmp_path_factory.mktemp("command") / "run"
    words = ["train", *SMALL, f"--workdir={workdir}", "--config.steps=100"]
    ended = python(pathlib.Path(sys.executable).parent / "dist-ens", *words)
    assert ended.returncode == 0, ended.stderr
    return workdir, ended.stdout


def test_training_ends_with_what_a_newcomer_wants_to_know(run):
    workdir, output = run
    last = output.splitlines()[-1]
    summary = json.loads((workdir / "summary.json").read_text())
    for figure in (summary["test"]["accuracy"], summary["mean_member"]["nll"]):
        assert f"{figure:.4f}" in last
    assert f"In {workdir}: report.html, summary.json, metrics.jsonl, checkpoints/." in last
    assert f"Next: dist-ens predict --workdir={workdir}" in last
    assert "ensemble of 8" in output


def test_evaluate_scores_a_run_on_the_devices_at_hand_and_another_pooling(run, tmp_path):
    workdir, _ = run
    ended = dist_ens("evaluate", f"--workdir={workdir}", f"--json={tmp_path / 'e.json'}", devices=8)
    assert ended.returncode == 0, ended.stderr
    scores = json.loads((tmp_path / "e.json").read_text())
    summary = json.loads((workdir / "summary.json").read_text())
    assert scores["test"] == pytest.approx(summary["test"], rel=1e-4)
    assert scores["members"][5] == pytest.approx(summary["members"][5], rel=1e-4)
    page = (workdir / "report.html").read_bytes()
    ended = dist_ens("evaluate", f"--workdir={workdir}", "--pooling=vote")
    assert ended.returncode == 0, ended.stderr
    assert "report.html still shows the run's own predictions." in ended.stdout
    assert (workdir / "report.html").read_bytes() == page


def test_predict_writes_probabilities_of_examples_as_the_source_yields_them(run, tmp_path):
    workdir, _ = run
    digits = load_digits()
    np.save(tmp_path / "x.npy", digits.images[:101])  # float64, converted
    output = tmp_path / "p.npz"
    words = [f"--workdir={workdir}", f"--input={tmp_path / 'x.npy'}", f"--output={output}"]
    ended = dist_ens("predict", *words, devices=8)
    assert ended.returncode == 0, ended.stderr
    with np.load(output) as written:
        assert written["probs"].shape == (101, 10)
        assert written["member_probs"].shape == (8, 101, 10)
        assert written["member_id"].tolist() == list(range(8))
        np.testing.assert_allclose(written["probs"], written["member_probs"].mean(0), rtol=1e-5)
        np.testing.assert_allclose(written["member_probs"].sum(-1), 1.0, rtol=1e-5)
        assert (written["probs"].argmax(1) == digits.target[:101]).mean() > 0.8


@pytest.mark.parametrize(
    "command", [["-m", "launch.train"], ["-c", "import launch; launch.main()", "train"]]
)
def test_an_interruption_of_the_imports_leaves_nothing_to_read(tmp_path, command):
    # The first of the libraries that takes long says when it is being imported, and takes longer.
    (tmp_path / "jax.py").write_text(
        "import pathlib, time\npathlib.Path(__file__).with_name('there').touch()\ntime.sleep(600)"
    )
    environment = COMMAND_ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=tmp_path, env=environment, stdout=log, stderr=log
        )
        wait_for((tmp_path / "there").exists, lambda: "no import")
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_SECS) == 130
    assert (tmp_path / "log").read_text() == ""


def test_a_platform_that_is_not_here_is_told(run):
    given = {"JAX_PLATFORMS": "abacus", "JAX_NUM_CPU_DEVICES": "2"}
    ended = python("-m", "launch.evaluate", f"--workdir={run[0]}", **given)
    assert ended.returncode == 2, ended.stderr
    assert "its devices with JAX_PLATFORMS='abacus', JAX_NUM_CPU_DEVICES='2': " in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.long
def test_members_that_diverge_are_named_and_reported(tmp_path):
    # Compiled as a user's is: numbers that are none take other ways through what XLA makes fast.
    diverging = ["--config.steps=10", "--config.optimizer.learning_rate=1e30"]
    ended = dist_ens("train", *SMALL, f"--workdir={tmp_path}", *diverging, xla_flags="")
    assert ended.returncode == ExitCode.DIVERGED, ended.stderr
    assert "Members [0, 1, 2, 3, 4, 5, 6, 7] have diverged" in " ".join(ended.stdout.split())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["test"]["nll"] is None
    assert summary["test_interval"]["ece"] == [None, None]
    assert ended.stdout.endswith("report.html, summary.json, metrics.jsonl, checkpoints/.\n")
    assert (tmp_path / "report.html").exists()


OWN = """
import jax
import own_helper
from ml_collections import ConfigDict
from dist_ens.members import from_functions

def get_config():
    return ConfigDict(dict(num_members=2, steps=20, steps_per_call=5))

def make_member(spec):
    return from_functions(
        lambda key: {"w": 0.01 * jax.random.normal(key, (64, spec.num_classes))},
        lambda params, x: x.reshape(len(x), 64) @ params["w"],
    )
"""


def test_members_without_numbers_are_named_and_left_out_of_predictions_if_asked(tmp_path):
    # Members whose first draw is negative begin without numbers.
    own = OWN.replace("0.01 * jax", "jax.numpy.sqrt(jax.random.normal(key)) * 0.01 * jax")
    (tmp_path / "own.py").write_text(own)
    (tmp_path / "own_helper.py").write_text("")
    config, workdir = f"--config={tmp_path / 'own.py'}", f"--workdir={tmp_path / 'run'}"
    changes = ["num_members=6", "execution=vmap", "data.examples=bootstrap"]
    ended = dist_ens("train", config, workdir, *(f"--config.{change}" for change in changes))
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    broken = [m["member_id"] for m in summary["members"] if m["nll"] is None]
    assert 0 < len(broken) < 6
    np.save(tmp_path / "x.npy", np.zeros((3, 8, 8), np.float32))
    files = [f"--input={tmp_path / 'x.npy'}", f"--output={tmp_path / 'p.npz'}"]
    ended = dist_ens("predict", config, workdir, *files)
    assert ended.returncode == 0, ended.stderr
    assert f"Members {broken} predict NaN, so the ensemble does too" in ended.stdout
    assert np.isnan(np.load(tmp_path / "p.npz")["probs"]).all()
    ended = dist_ens("predict", config, workdir, *files, "--leave_out_broken")
    assert f"Members {broken} predict NaN; they were left out" in ended.stdout
    predicted = np.load(tmp_path / "p.npz")
    assert predicted["member_id"].tolist() == list(range(6))
    sound = [i for i in range(6) if i not in broken]
    np.testing.assert_allclose(predicted["probs"], predicted["member_probs"][sound].mean(0), 1e-5)

    # Of the training examples, by the sound members that left them out.
    output = files[1]
    ended = dist_ens("predict", config, workdir, "--out_of_bag", output)
    assert ended.returncode == 2
    assert f"Members {broken} predict NaN, so the ensemble does too. Pass" in ended.stderr
    ended = dist_ens("predict", config, workdir, "--out_of_bag", output, "--leave_out_broken")
    assert ended.returncode == 0, ended.stderr
    held_out = dict(np.load(tmp_path / "p.npz"))
    train_split = open_source(DataConfig(source="digits")).train
    dtypes = {"probs": "float32", "position": "int64", "num_predicting": "int32"}
    assert {name: leaf.dtype.name for name, leaf in held_out.items()} == dtypes
    np.testing.assert_array_equal(held_out["position"], np.arange(len(train_split)))
    left_out = examples_out_of_bag(np.array(sound), len(train_split), seed=0, num_folds=None)
    np.testing.assert_array_equal(held_out["num_predicting"], left_out.sum(0))
    missing = held_out["num_predicting"] == 0
    assert f"No member left out {missing.sum()} of them" in ended.stdout
    np.save(tmp_path / "x.npy", train_split.inputs)
    dist_ens("predict", config, workdir, *files)
    probs = np.load(tmp_path / "p.npz")["member_probs"][sound]
    expected = [probs[left_out[:, at], at].mean(0) for at in np.flatnonzero(~missing)]
    np.testing.assert_allclose(held_out["probs"][~missing], expected, 1e-4)
    assert np.isnan(held_out["probs"][missing]).all()

    as_json = tmp_path / "scores.json"
    ended = dist_ens("evaluate", config, workdir, "--leave_out_broken", f"--json={as_json}")
    assert f"ensemble of {len(sound)} " in ended.stdout
    assert f"member {broken[0]}, left out" in ended.stdout
    assert json.loads(as_json.read_text())["left_out_members"] == broken
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"The ensemble of {len(sound)} is" in page
    assert "left out of the ensemble" in page


def test_a_config_file_may_bring_a_network_of_its_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "own_helper.py").write_text("import jax; ONE = jax.numpy.ones(())")
    config, workdir = f"--config={tmp_path / 'own.py'}", f"--workdir={tmp_path / 'run'}"
    ended = dist_ens("train", config, workdir, "--config.seed=3", "--config.execution=vmap")
    assert ended.returncode == 0, ended.stderr
    assert f"Next: dist-ens predict {workdir} {config} " in ended.stdout
    ended = dist_ens("evaluate", workdir)
    assert ended.returncode == 2
    assert f"Add {config}, in Python" in ended.stderr
    assert dist_ens("evaluate", workdir, config).returncode == 0


def test_wrong_input_is_a_sentence_and_exit_code_2(run, tmp_path):
    workdir, small = f"--workdir={run[0]}", SMALL[0]
    np.save(tmp_path / "wrong.npy", np.zeros((3, 28, 28)))
    predict = ["predict", workdir, "--output=p.npz"]
    cases = [
        (["evaluate", workdir, small, "--config.seed=1"], "--config.seed cannot be changed in a"),
        (
            [*predict, f"--input={tmp_path / 'wrong.npy'}"],
            "has the shape [3, 28, 28], and the members take [examples, 8, 8]",
        ),
        ([*predict, "--out_of_bag"], "No member leaves out an example with data.examples='shared'"),
    ]
    for arguments, sentence in cases:
        ended = dist_ens(*arguments)
        assert ended.returncode == 2, (arguments, ended.stderr)
        assert sentence in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr
