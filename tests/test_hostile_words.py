"""Generated configs and command lines with hostile names and values.

Each is used or refused by a message: without a trace of Python, in bounded time, and nothing is
touched but the folder of the run.
"""

import contextlib
import copy
import dataclasses
import json
import math
import os
import pathlib
import shutil
import signal
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from commands import start
from dist_ens.errors import RunError, UserError
from dist_ens.exit_codes import ExitCode
from dist_ens.experiment import Experiment
from dist_ens.experiment.build import build
from dist_ens.experiment.train import train

ROOT = pathlib.Path(__file__).parent.parent
LIMIT_SECS = 60
LONGEST_MESSAGE = 5_000
NAMES = [
    *(
        "../x",
        "../../x",
        "$(touch touched)",
        "`touch touched`",
        "a;touch touched",
        "|touch touched",
    ),
    *(
        "a\0b",
        "two\nlines",
        "\r",
        "",
        " ",
        "-",
        "--",
        "=",
        "--x=y",
        ".",
        "..",
        "~",
        "~no_such_user/x",
    ),
    *("\u00e4\u6570", "\u202egnp.x", "\ud800", "\x1b[31m", "'", '"', "\\", "%s", "{0}", "*", "#"),
    *("/dev/null", "/dev/null/x", "x" * 256, "x" * 10**6, "x/" * 3_000, "9" * 5_000, "1e400"),
    *("None", "True", "nan", "inf", "-1", "0", "0x10", "[]", "[", "(((", "{}", "lambda: 0"),
    *("digits", "digits:x", "npz:", "npz:../x", "npz:/dev/null", "idx:.", "text:/dev/null"),
    *("uci:a\0b", "tfds:../x", "tfds:x/y/z:9.9.9", "vmap+", "chunk:", "chunk:-1", "adam\0"),
]
VALUES = [
    *(-1, 0, 1, 2, 2**31 - 1, 2**31, 2**63, 2**64, 10**30, -(2**63), 0.5, -0.0, 1e-320, 1e308),
    *(math.nan, math.inf, -math.inf, True, False, None, [], [1], [0], [[1]], ["x"], [None], {}),
    *({"x": 1}, {"name": "mlp"}, [1e308], [2**31], [1] * 1000),
]
# Values that are right by themselves, and small enough to train.
RIGHT = {
    "num_members": [1, 2, 3],
    "seed": [0, 1, 2**32 - 1],
    "steps_per_call": [1, 2, 3],
    "execution": ["loop", "vmap", "map", "unroll", "chunk:2", "vmap+single"],
    "layout.ensemble_axis": [1, 2],
    "layout.waves": [1, 2],
    "data.num_classes": [10, 11],
    "data.global_batch_size": [1, 2, 16, 17],
    "data.shuffle": [True, False],
    "data.examples": ["shared", "permuted", "bootstrap"],
    "data.validation": [0.0, 0.1],
    "data.mean": [[0.0], [8]],
    "data.std": [[16.0], [1]],
    "model.name": ["mlp", "mlp_bn_dropout"],
    "model.hidden_sizes": [[4], [3, 2], []],
    "loss.name": ["softmax_cross_entropy", "class_mean_cross_entropy", "sigmoid_cross_entropy"],
    "loss.label_smoothing": [0.0, 0.1],
    "loss.mixup": [0.0, 0.2],
    "loss.adversarial": [0.0, 0.01],
    "optimizer.name": ["sgd", "adam", "adamw", "lion"],
    "optimizer.learning_rate": [1e-3, None, 1],
    "optimizer.momentum": [0.0, 0.9],
    "optimizer.weight_decay": [0.0, 1e-4],
    "optimizer.clip_norm": [None, 1.0],
    "compute.dtype": ["float32", "bfloat16"],
    "compute.rematerialize": [True, False],
    "compute.microbatches": [1, 2],
    "checkpoint.every_steps": [None, 1, 7],
    "checkpoint.every_secs": [None, 0.5],
    "checkpoint.keep": [1, 3],
    "checkpoint.keep_every_steps": [None, 1],
    "checkpoint.keep_best": [None, "nll"],
    "evaluation.every_steps": [None, 1],
    "evaluation.global_batch_size": [1000, 7],
    "evaluation.pooling": ["probs", "logits", "vote"],
    "evaluation.dropout_samples": [None, 2],
    "logging.every_steps": [1, 100],
}
OTHER_FIELDS = ["epochs", "members_per_group", "data.source", "data.data_dir", "data.num_folds"]
OTHER_FIELDS += ["data.context_length", "loss.beta", "loss.levels", "optimizer.schedule"]
OTHER_FIELDS += ["optimizer.schedule_steps", "optimizer.nesterov", "model.dropout_rate"]
SECTIONS = ["layout", "data", "model", "loss", "optimizer", "compute", "checkpoint", "evaluation"]
FIELDS = [*RIGHT, *OTHER_FIELDS]
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


def for_each(strategy, count, check):
    """Checks examples of a strategy, the same ones every time."""

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    @given(strategy)
    def each(example):
        check(example)

    each()


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


def files_in(folder, apart_from=()):
    """Sizes and times of the files below a folder by their paths, without those of some runs."""
    found = {}
    on_the_way = {parent for run in apart_from for parent in run.parents}
    for parent, folders, files in os.walk(folder):
        here = pathlib.Path(parent)
        folders[:] = [name for name in folders if here / name not in apart_from]
        found |= {here / name: None for name in folders if here / name not in on_the_way}
        for path in map(here.joinpath, files):
            status = path.lstat()
            found[path] = status.st_size, status.st_mtime_ns
    return found


def place_in(folder):
    """A folder to run commands in, below others with files of somebody else."""
    here = folder / "home" / "here"
    here.mkdir(parents=True)
    for each in (folder, folder / "home", here):
        for name in ("x", "x.npz", "touch"):
            (each / name).write_text("not yours")
    return here


class Configs:
    """Builds configs, and keeps the experiments of those that are accepted."""

    def __init__(self, around):
        self.around = around
        self.before = files_in(around)
        self.count, self.accepted, self.most_secs = 0, [], 0.0

    def check(self, changed):
        self.count += 1
        since = time.monotonic()
        with limited():
            try:
                experiment = Experiment.from_dict(config_of(changed))
                assert Experiment.from_dict(experiment.to_dict()) == experiment
                assert Experiment.from_dict(experiment.to_config_dict().to_dict()) == experiment
                build(experiment)
            except (UserError, RunError):
                pass
            else:
                self.accepted.append(experiment)
        self.most_secs = max(self.most_secs, time.monotonic() - since)
        assert files_in(self.around) == self.before

    def train_some(self, count):
        """Trains some of the accepted experiments for one step."""
        different = [*{repr(each): each for each in self.accepted}.values()]
        assert len(different) >= count
        for experiment in different[:: len(different) // count][:count]:
            workdir = pathlib.Path("run $(touch touched)").absolute()
            before = files_in(self.around, apart_from={workdir})
            with limited():
                train(dataclasses.replace(experiment, steps=1, epochs=None), workdir)
            assert json.loads((workdir / "summary.json").read_text())["steps"] == 1
            assert files_in(self.around, apart_from={workdir}) == before
            shutil.rmtree(workdir)


def check_configs(num_configs, num_trained, place):
    """Checks configs, and trains some of those that are accepted."""
    configs = Configs(place.parent.parent)
    mixed = st.tuples(changes, attacks).map(lambda both: both[0] + both[1])
    for_each(mixed, num_configs, configs.check)
    configs.train_some(num_trained)
    return configs


class Commands:
    """Runs command lines, each in a new folder, and counts how they end.

    Args:
        folder: Folder for those folders and the output.
    """

    def __init__(self, folder):
        self.folder = folder
        self.count, self.done, self.most_secs = 0, 0, 0.0

    def check(self, example):
        """Runs a command line, and checks how it ends and what it has touched."""
        verb, words, changed = example
        self.count += 1
        around = self.folder / str(self.count)
        here = place_in(around)
        (here / "experiment.json").write_text(json.dumps(config_of(changed)))
        runs = {run for word in words for run in runs_of(word, here)}
        before, since = files_in(around, apart_from=runs), time.monotonic()
        log, environ = f"log_{self.count}", {"HOME": str(here.parent)}
        [code] = start(
            [verb, *words], folder=self.folder, name=log, environ=environ, cwd=here
        ).codes()
        secs = time.monotonic() - since
        told = (self.folder / f"{log}_err_0").read_text()
        assert code in EXPECTED_CODES, told
        assert "Traceback" not in told
        assert len(told) < LONGEST_MESSAGE
        assert "error: " in told or code == ExitCode.DONE
        assert secs < LIMIT_SECS
        assert files_in(around, apart_from=runs) == before
        shutil.rmtree(around)
        self.done += code == ExitCode.DONE
        self.most_secs = max(self.most_secs, secs)


def runs_of(word, here):
    """The folder of a run that a word names, in a list; empty for another word."""
    name = word.removeprefix("--workdir=")
    if name == word or "\0" in name or not name:
        return []
    return [pathlib.Path(os.path.abspath(here.parent if name == "~" else here / name))]


EXPECTED_CODES = (
    ExitCode.DONE,
    ExitCode.USAGE,
    ExitCode.DIVERGED,
    ExitCode.IMPOSSIBLE_LAYOUT,
)
VERBS = ["train", "evaluate", "predict", "members", "report", "replay", "plan"]
FLAGS = ["workdir", "resume", "config", "experiment", "step", "seed", "help", "num_processes"]
FLAGS += ["flagfile", "coordinator_address", "verbosity", "stuck_after_secs", "topology", "input"]
FLAGS += [f"config.{field}" for field in FIELDS]
relative = names.filter(lambda name: not name.startswith(("/", "~")) or name in NAMES)
flags = st.tuples(st.sampled_from(FLAGS), relative).map(lambda pair: f"--{pair[0]}={pair[1]}")
good = st.tuples(st.sampled_from([*RIGHT]), st.integers(0, 9)).map(
    lambda pair: f"--config.{pair[0]}={RIGHT[pair[0]][pair[1] % len(RIGHT[pair[0]])]}"
)
given_files = st.sampled_from(
    [[f"--config={ROOT / 'configs' / 'digits.py'}"], ["--experiment=experiment.json"], []]
)
command_lines = st.tuples(
    st.sampled_from(VERBS) | names,
    st.tuples(
        given_files,
        relative.map(lambda name: [f"--workdir={name}"]),
        st.just(["--config.steps=1"]) | st.just([]),
        st.lists(flags | names | good, max_size=3),
    ).map(lambda parts: [word for part in parts for word in part]),
    changes,
)


def record_row(record_property, kind, count, accepted, trained, most_secs):
    record_property("generated", kind)
    record_property("examples", count)
    record_property("accepted", accepted)
    record_property("trained", trained)
    record_property("longest, s", f"{most_secs:.1f}")
    record_property("traces, hangs, files touched elsewhere", 0)


def test_a_hostile_config_is_built_or_refused(tmp_path, monkeypatch):
    here = place_in(tmp_path)
    monkeypatch.chdir(here)
    check_configs(60, 1, here)


def test_a_hostile_command_line_is_run_or_refused(tmp_path):
    commands = Commands(tmp_path)
    for_each(command_lines, 40, commands.check)


@pytest.mark.faults
def test_four_thousand_hostile_configs_are_built_or_refused(tmp_path, monkeypatch, record_property):
    here = place_in(tmp_path)
    monkeypatch.chdir(here)
    configs = check_configs(4_000, 50, here)
    found = configs.count, len(configs.accepted), 50, configs.most_secs
    record_row(record_property, "configs", *found)


@pytest.mark.faults
def test_a_thousand_hostile_command_lines_are_run_or_refused(tmp_path, record_property):
    commands = Commands(tmp_path)
    for_each(command_lines, 1_000, commands.check)
    found = commands.count, commands.done, commands.done, commands.most_secs
    record_row(record_property, "command lines", *found)
