"""What README says is there, and what is there stands in README."""

import pathlib
import re

import pytest

import launch
from dist_ens.config.own_parts import OwnParts
from dist_ens.data import Spec
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.checks import check_training
from dist_ens.experiment.config_file import ConfigFile
from dist_ens.experiment.record import Run
from dist_ens.layout import Layout

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()

pytestmark = pytest.mark.quick

SETUP = [
    "python3 -m venv .venv && .venv/bin/pip install -e . && "
    ".venv/bin/dist-ens train --config=configs/digits.py --workdir=runs/digits",
    ".venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest",
]


def test_readme_opens_with_the_two_commands():
    assert re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)[:2] == SETUP


def test_every_verb_every_config_and_every_example_stands_in_readme():
    for verb in launch.VERBS:
        assert f"`dist-ens {verb} --" in README
    for folder in ("configs", "examples"):
        for path in (ROOT / folder).glob("*.py"):
            assert f"{folder}/{path.name}" in README


def test_every_path_in_readme_exists():
    for path in re.findall(r"(?:configs|examples|dist_ens|launch)/[\w/.]+", README):
        assert (ROOT / path).exists(), path


def test_every_config_tells_its_command_its_duration_and_its_result():
    for path in (ROOT / "configs").glob("*.py"):
        docstring = path.read_text().split('"""')[1]
        assert f"dist-ens train --config=configs/{path.name}" in docstring, path
        assert "Duration:" in docstring, path
        assert "Result:" in docstring, path


def blocks_of_python():
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_script_in_readme_reaches_its_score(capsys):
    namespace = {}
    exec(blocks_of_python()[0], namespace)
    scores = namespace["de"].evaluate(
        namespace["ensemble"],
        namespace["result"].state,
        {"inputs": namespace["x"][1400:], "labels": namespace["y"][1400:]},
    )
    assert scores.ensemble["accuracy"] > 0.88
    assert "ensemble of 8" in capsys.readouterr().out
    assert namespace["p"].epistemic.shape == (397,)


def test_the_network_in_readme_fits_its_data(tmp_path):
    block = next(block for block in blocks_of_python() if "get_config" in block)
    (tmp_path / "own.py").write_text(block)
    file = ConfigFile(str(tmp_path / "own.py"))
    spec = Spec((8, 8), "float32", (), 10)
    run = Run(file.experiment(), spec, 1000)
    ensemble = build_ensemble(run, Layout.make(8), OwnParts(member=file.make_member(spec)))
    check_training(run, ensemble)
    assert ensemble.abstract_state(run.batch(1)).params["w"].shape == (8, 64, 10)
