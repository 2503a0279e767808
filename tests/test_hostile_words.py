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
import signal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dist_ens.experiment import Experiment
from dist_ens.experiment.build import build
from dist_ens.experiment.train import train
from dist_ens.ground.errors import RunError, UserError

LIMIT_SECS = 60


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
# Values that are right by themselves, and small enough to train.
RIGHT = {
    "num_members": [1, 2, 3],
    "seed": [0, 2**32 - 1],
    "steps_per_call": [1, 2],
    "execution": ["loop", "vmap", "map", "unroll", "chunk:2", "vmap+single"],
    "layout.waves": [1, 2],
    "data.num_classes": [10, 11],
    "data.global_batch_size": [1, 2, 16, 17],
    "data.shuffle": [True, False],
    "data.examples": ["shared", "permuted", "bootstrap"],
    "data.validation": [0.0, 0.1],
    "data.std": [[16.0], [1]],
    "model.name": ["mlp", "mlp_bn_dropout"],
    "model.hidden_sizes": [[4], [3, 2], []],
    "loss.name": ["categorical", "one_vs_rest"],
    "loss.label_smoothing": [0.0, 0.1],
    "loss.mixup": [0.0, 0.2],
    "loss.adversarial": [0.0, 0.01],
    "optimizer.name": ["sgd", "adam", "lion"],
    "optimizer.learning_rate": [1e-3, None, 1],
    "optimizer.weight_decay": [0.0, 1e-4],
    "optimizer.clip_norm": [None, 1.0],
    "compute.dtype": ["float32", "bfloat16"],
    "compute.microbatches": [1, 2],
    "checkpoint.every_steps": [None, 1, 7],
    "checkpoint.keep_best": [None, "nll"],
    "evaluation.every_steps": [None, 1],
    "evaluation.pooling": ["probs", "logits", "vote"],
    "logging.every_steps": [1, 100],
}
SECTIONS = ["layout", "data", "model", "loss", "optimizer", "compute", "checkpoint", "evaluation"]
OTHERS = ["epochs", "members_per_group", "data.source", "data.data_dir", "data.num_folds"]
OTHERS += ["loss.beta", "optimizer.schedule_steps", "model.dropout_rate"]
FIELDS = [*RIGHT, *OTHERS]
BEGIN = {"steps": 1, "num_members": 2, "execution": "loop", "model": {"hidden_sizes": [4]}}

names = st.sampled_from(NAMES) | st.text(max_size=20)
wrong = names | st.sampled_from(VALUES) | st.integers() | st.floats()
changes = st.lists(
    st.sampled_from([*RIGHT]).flatmap(
        lambda field: st.tuples(st.just(field), st.sampled_from(RIGHT[field]))
    ),
    max_size=4,
)
attacks = st.lists(st.tuples(st.sampled_from([*FIELDS, *SECTIONS]) | names, wrong), max_size=2)


def config_of(changed):
    """A config as a dict, with some fields changed by their paths."""
    config = copy.deepcopy(BEGIN)
    for path, value in changed:
        *sections, name = path.split(".") if path in FIELDS else [path]
        place = config
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                break
        else:
            place[name] = value
    return config


@contextlib.contextmanager
def limited():
    """Ends its body by an error after a time."""

    def end(number, frame):
        raise TimeoutError(f"It has taken {LIMIT_SECS} seconds.")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(LIMIT_SECS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def files_in(folder, apart_from=None):
    """Sizes and times of the files below a folder by their paths, without those of a run."""
    paths = (path for path in folder.rglob("*") if apart_from not in (path, *path.parents))
    found = {path: path.lstat() for path in paths if not path.is_dir()}
    return {path: (status.st_size, status.st_mtime_ns) for path, status in found.items()}


@pytest.mark.parametrize(
    ("num_configs", "num_trained"), [(60, 1), pytest.param(4_000, 50, marks=pytest.mark.faults)]
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
        with limited(), contextlib.suppress(UserError, RunError):
            experiment = Experiment.from_dict(config_of(changed))
            assert Experiment.from_dict(experiment.to_dict()) == experiment
            assert Experiment.from_dict(experiment.to_config_dict().to_dict()) == experiment
            build(experiment)
            accepted[repr(experiment)] = experiment
        assert files_in(tmp_path) == before

    every = {"derandomize": True, "database": None, "deadline": None, "max_examples": num_configs}
    both = st.tuples(changes, attacks).map(lambda each: each[0] + each[1])
    settings(suppress_health_check=[*HealthCheck], **every)(given(both)(check))()
    different = [*accepted.values()]
    for experiment in different[:: len(different) // num_trained][:num_trained]:
        workdir = pathlib.Path("run $(touch touched)").absolute()
        with limited():
            train(dataclasses.replace(experiment, steps=1, epochs=None), workdir)
        assert json.loads((workdir / "summary.json").read_text())["steps"] == 1
        assert files_in(tmp_path, apart_from=workdir) == before
        shutil.rmtree(workdir)
