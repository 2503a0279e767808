"""Generated configs with hostile names and values.

Each is used or refused by a message, in bounded time, and only the folder of the run is touched.
"""

import contextlib
import copy
import dataclasses
import json
import math
import pathlib
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_ens.experiment import Experiment, leaves
from dist_ens.experiment.build import build
from dist_ens.experiment.train import train
from dist_ens.ground.errors import RunError, UserError

NAMES = [
    *("../x", "../../x", "$(touch touched)", "`touch touched`", "a;touch touched", "-", "--", "="),
    *("--x=y", ".", "..", "~", "~no_such_user/x", "\u00e4\u6570", "\u202egnp.x", "\x1b[31m", "'"),
    *('"', "\\", "%s", "{0}", "*", "#", "/dev/null", "/dev/null/x", "1e400", "None", "True", "nan"),
    *("inf", "-1", "0", "0x10", "[]", "[", "(((", "{}", "digits", "digits:x", "npz:", "npz:../x"),
    *("npz:/dev/null", "idx:.", "text:/dev/null", "tfds:../x", "vmap+", "chunk:", "chunk:-1"),
    *("a\0b", "two\nlines", "", " ", "\ud800", "x" * 256, "x" * 10**6, "x/" * 3_000, "uci:a\0b"),
]
VALUES = [
    *(-1, 0, 1, 2, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0, 1e-320, 1e308),
    *(math.nan, math.inf, -math.inf, True, False, None, [], [1], [0], [[1]], ["x"], [None], {}),
    *({"x": 1}, {"name": "mlp"}, [1e308], [2**31], [1] * 1000),
]
RIGHT = [  # Each is right in some fields, and small enough to train.
    *(None, True, False, 1, 2, 7, 0.0, 0.1, [4], [16.0], "vmap", "permuted", "bootstrap", "adam"),
    *("one_vs_rest", "mlp_bn_dropout", "bfloat16", "logits", "vote", "nll"),
]
FIELDS = [path for path, _ in leaves(Experiment(steps=1).to_dict())]
FIELDS += ["loss.beta", "loss.mixup", "model.hidden_sizes", "model.dropout_rate", "optimizer.b1"]
SECTIONS = list(dict.fromkeys(path.partition(".")[0] for path in FIELDS if "." in path))
BEGIN = {"steps": 1, "num_members": 2, "execution": "loop", "model": {"hidden_sizes": [4]}}

names = st.sampled_from(NAMES) | st.text(max_size=20)
wrong = names | st.sampled_from(VALUES) | st.integers() | st.floats()
changes = st.lists(st.tuples(st.sampled_from(FIELDS), st.sampled_from(RIGHT)), max_size=3)
attacks = st.lists(st.tuples(st.sampled_from([*FIELDS, *SECTIONS]) | names, wrong), max_size=2)


def config_of(changed):
    """A config as a dict, with some fields changed by their paths."""
    config = copy.deepcopy(BEGIN)
    for path, value in changed:
        *sections, name = path.split(".") if path in FIELDS else [path]
        place = config
        for section in sections:
            place = place.setdefault(section, {})
        if isinstance(place, dict):
            place[name] = value
    return config


def files_in(folder):
    """Sizes and times of the files below a folder by their paths."""
    found = {path: path.lstat() for path in folder.rglob("*") if not path.is_dir()}
    return {path: (status.st_size, status.st_mtime_ns) for path, status in found.items()}


@pytest.mark.parametrize(
    ("num_configs", "num_trained"), [(60, 1), pytest.param(2_000, 25, marks=pytest.mark.faults)]
)
def test_a_hostile_config_is_built_or_refused(num_configs, num_trained, tmp_path, monkeypatch):
    here = tmp_path / "home" / "here"
    here.mkdir(parents=True)
    for folder in (tmp_path, here.parent, here):  # The files of somebody else.
        for name in ("x", "x.npz", "touch"):
            (folder / name).write_text("not yours")
    monkeypatch.chdir(here)
    before, accepted = files_in(tmp_path), {}

    def check(changed):
        with contextlib.suppress(UserError, RunError):
            experiment = Experiment.from_dict(config_of(changed))
            assert Experiment.from_dict(experiment.to_dict()) == experiment
            assert Experiment.from_dict(experiment.to_config_dict().to_dict()) == experiment
            build(experiment)
            accepted[repr(experiment)] = experiment
        assert files_in(tmp_path) == before

    every = {"derandomize": True, "database": None, "deadline": 60_000, "max_examples": num_configs}
    both = st.tuples(changes, attacks).map(lambda each: each[0] + each[1])
    settings(suppress_health_check=[*HealthCheck], **every)(given(both)(check))()
    different = [*accepted.values()]
    trained = 0
    for experiment in different[:: len(different) // num_trained][:num_trained]:
        workdir = pathlib.Path("run $(touch touched)").absolute()
        with contextlib.suppress(UserError, RunError):
            train(dataclasses.replace(experiment, steps=1, epochs=None), workdir)
            assert json.loads((workdir / "summary.json").read_text())["steps"] == 1
            trained += 1
        shutil.rmtree(workdir, ignore_errors=True)
        assert files_in(tmp_path) == before
    assert 2 * trained > num_trained
