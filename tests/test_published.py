"""Published figures, from shortened forms of the shipped configs on the data in DIST_ENS_DATA.

The full figures stand in the configs' docstrings.
"""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from conftest import COMMAND_ENVIRONMENT

ROOT = pathlib.Path(__file__).parent.parent
pytestmark = pytest.mark.published


@pytest.fixture(scope="module")
def data():
    folder = pathlib.Path(os.environ.get("DIST_ENS_DATA", "")).absolute()
    if "DIST_ENS_DATA" not in os.environ or not folder.is_dir():
        pytest.fail(f"The published figures need data: DIST_ENS_DATA={folder} is no folder.")
    return folder


def train(config, source, workdir, *changes):
    """The summary of a finished run, in which the ensemble is better than its mean member."""
    flags = [f"--config=configs/{config}.py", f"--config.data.source={source}"]
    flags += [f"--workdir={workdir}", *(f"--config.{change}" for change in changes)]
    ended = subprocess.run(
        [sys.executable, "-m", "launch.train", *flags],
        cwd=ROOT,
        env=COMMAND_ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    summary = json.loads((workdir / "summary.json").read_text())
    assert summary["test"]["nll"] < summary["mean_member"]["nll"]
    return summary


def test_the_plain_jax_recipe_reaches_its_published_accuracy(data, tmp_path):
    # Published, after 3 epochs: 0.9468. https://docs.jax.dev/en/latest/notebooks/
    summary = train("mnist_mlp", f"idx:{data / 'mnist'}", tmp_path, "num_members=2")
    for member in summary["members"]:
        assert member["accuracy"] == pytest.approx(0.947, abs=0.005)


def test_batchnorm_and_dropout_reach_95_percent_in_400_steps(data, tmp_path):
    summary = train("mnist_bn_dropout", f"idx:{data / 'mnist'}", tmp_path)
    assert summary["steps"] == 400
    assert min(m["accuracy"] for m in summary["members"]) >= 0.95


@pytest.mark.parametrize(
    ("config", "source", "num_members", "steps", "score", "worst"),
    [
        ("mnist_lenet", "idx:{}/mnist", 3, 600, "accuracy", 0.97),
        ("cifar_resnet", "npz:{}/cifar10_jpeg/cifar10_jpeg_12k.npz", 2, 150, "accuracy", 0.35),
        # Letter frequencies alone have 3.3 nats.
        ("charlm", "text:{}/tinyshakespeare/input.txt.gz", 2, 200, "nll", 2.5),
    ],
)
def test_a_short_training_learns(data, tmp_path, config, source, num_members, steps, score, worst):
    changes = [f"num_members={num_members}", f"steps={steps}", f"optimizer.schedule_steps={steps}"]
    found = train(config, source.format(data), tmp_path, *changes)["test"][score]
    assert found <= worst if score == "nll" else found >= worst


@pytest.mark.parametrize(
    ("name", "rmse", "nll"), [("bostonHousing", 3.28, 2.41), ("kin8nm", 0.09, -1.20)]
)
def test_uci_tables_are_predicted_as_published(data, tmp_path, name, rmse, nll):
    # Lakshminarayanan et al. (2017), Table 1, whose figures are means over the splits, M = 5.
    summary = train("uci", f"uci:{data / 'uci' / name}.npz", tmp_path)
    assert (summary["groups"], summary["num_members"]) == (20, 100)
    assert summary["test"]["rmse"] <= rmse
    assert nll - 0.3 <= summary["test"]["nll"] <= nll + 0.1
