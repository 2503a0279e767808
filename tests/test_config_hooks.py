"""Functions of a config file that make parts of a run."""

import dataclasses
import json
import re

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags

from dist_ens.callbacks import EarlyStopping
from dist_ens.data import OrderRule, Spec, source_of_arrays
from dist_ens.experiment import DataConfig, Experiment, OwnParts
from dist_ens.experiment.config_file import EXPERIMENT, ConfigFile
from dist_ens.experiment.train import train
from dist_ens.ground.errors import UserError
from dist_ens.losses import gaussian
from launch.config_flags import ConfigFlags

pytestmark = pytest.mark.quick

SPEC = Spec((4,), "float32", (), 3)
CONFIG = """
from ml_collections import ConfigDict

def get_config():
    return ConfigDict(dict(steps=3, optimizer=dict(name="lion", b1=0.8)))
"""
PARTS = """
import flax.linen as nn
import numpy as np
import optax
from types import SimpleNamespace
from dist_ens.data import source_of_arrays

def make_member(spec):
    return nn.Dense(spec.num_classes)

def make_loss(spec):
    def squares(params, model_state, batch, key, train):
        return 0.0, (model_state, {})
    return squares

def make_optimizer(spec):
    return optax.lion(0.1)

def make_source(data_config):
    x, y = np.zeros((data_config.global_batch_size, 4), np.float32), np.zeros(7, np.int32)
    return source_of_arrays((x[:7], y), (x[:7], y), num_classes=3)

def make_methods(spec):
    return [lambda loss: loss]

def make_metrics(spec):
    return [SimpleNamespace(name=f"top{spec.num_classes}")]

def make_callbacks(spec):
    return [print, SimpleNamespace()]
"""


def file_with(tmp_path, text):
    (tmp_path / "own.py").write_text(CONFIG + text)
    return ConfigFile(str(tmp_path / "own.py"))


def forget_config_flags():
    for name in [name for name in flags.FLAGS if name.split(".")[0] == "config"]:
        delattr(flags.FLAGS, name)


def flags_with(tmp_path, text, *arguments):
    forget_config_flags()
    (tmp_path / "own.py").write_text(CONFIG + text)
    config = ConfigFlags()
    rest = config.prepare(["dist-ens", f"--config={tmp_path / 'own.py'}", *arguments])
    flags.FLAGS(rest)
    return config


@pytest.fixture(autouse=True)
def config_flags_of_one_test():
    yield
    forget_config_flags()


def test_a_file_makes_every_part_of_a_run(tmp_path):
    file = file_with(tmp_path, PARTS)
    parts = file.own_parts(SPEC)
    assert parts.member.name == "Dense"
    assert parts.loss({}, (), None, None, True) == (0.0, ((), {}))
    updates, _ = parts.optimizer.update(jnp.ones(()), parts.optimizer.init(jnp.ones(())), 1.0)
    assert updates == pytest.approx(-0.1 * (1 + 1e-3))  # the sign, and Lion's decay of 1e-3
    assert [metric.name for metric in parts.metrics] == ["top3"]
    assert parts.names == {
        "network": "Dense",
        "loss": "make_loss.<locals>.squares",
        "optimizer": "GradientTransformationExtraArgs",
        "method 1": "make_methods.<locals>.<lambda>",
    }
    config = flags_with(tmp_path, PARTS)
    assert config.file.open_source(DataConfig(global_batch_size=9)).spec == SPEC
    source = file.source(DataConfig(global_batch_size=9, validation=0.3))
    assert (len(source.train), len(source.valid), source.spec.input_shape) == (5, 2, (4,))


def test_a_file_without_functions_makes_no_part(tmp_path):
    file = file_with(tmp_path, "")
    assert file.own_parts(SPEC) == OwnParts()
    assert OwnParts().names == {}
    assert file.source(DataConfig()) is None
    assert ConfigFlags().file.own_parts(SPEC) == OwnParts()
    assert ConfigFlags().file.open_source(DataConfig()).spec.num_classes == 10  # the digits
    assert file.open_source(DataConfig()).spec.num_classes == 10


@pytest.mark.parametrize(
    ("text", "flag", "function"),
    [
        ("def make_member(spec): pass", "model.name=mlp", "make_member"),
        ("def make_optimizer(spec): pass", "optimizer.learning_rate=0.5", "make_optimizer"),
        ("def make_objective(spec): pass", "loss.beta=0.5", "make_objective"),
        ("def make_loss(spec): pass", "loss.name=squared_error", "make_loss"),
        ("def make_step(spec): pass", "optimizer.learning_rate=0.5", "make_step"),
        ("def make_source(data_config): pass", "data.source=digits", "make_source"),
    ],
)
def test_a_flag_that_a_function_of_the_file_replaces_is_refused(tmp_path, text, flag, function):
    name = flag.partition("=")[0]
    message = f"^--config.{name} has no effect, because .*own.py defines {function}. Leave the flag"
    with pytest.raises(UserError, match=message):
        flags_with(tmp_path, text, f"--config.{flag}")


def test_flags_set_fields_and_arguments_of_what_is_named(tmp_path):
    def read(*given, text=""):
        return flags_with(tmp_path, text, *(f"--config.{flag}" for flag in given)).experiment()

    # Beside functions of the file that make other parts.
    text = "def make_objective(spec): pass\ndef make_source(data_config): pass"
    changed = read("loss.label_smoothing=0.1", "data.num_classes=3", text=text)
    assert (changed.loss.options["label_smoothing"], changed.data.num_classes) == (0.1, 3)
    optimizer = read("optimizer.b2=0.5", "optimizer.mu_dtype=bfloat16").optimizer
    assert optimizer.name == "lion"
    assert optimizer.options == {"b1": 0.8, "b2": 0.5, "mu_dtype": "bfloat16"}
    # Another name drops the arguments in the file.
    assert read("optimizer.name=adam", "optimizer.b2=0.5").optimizer.options == {"b2": 0.5}
    model = read("model.name=mlp_bn_dropout", "model.dropout_rate=0.3", "model.hidden_sizes=(16,)")
    assert model.model.options == {"dropout_rate": 0.3, "hidden_sizes": (16,)}
    # Steps and epochs replace each other.
    changed = read("epochs=0.5")
    assert (changed.steps, changed.epochs) == (None, 0.5)


def test_the_function_of_the_file_wins_over_the_name_of_the_optimizer(tmp_path):
    text = PARTS + "\nget_config_ = get_config\ndef get_config():\n    config = get_config_()\n"
    text += "    config.optimizer.name = 'mine'\n    return config\n"
    config = flags_with(tmp_path, text)
    assert config.experiment().optimizer.name == "mine"
    assert config.file.own_parts(SPEC).names["optimizer"] == "GradientTransformationExtraArgs"


def test_a_misspelt_function_of_a_config_file_is_refused(tmp_path):
    (tmp_path / "own.py").write_text("def make_memebr(spec): ...\ndef make_blocks(): ...\n")
    with pytest.raises(UserError, match=r"defines make_memebr\. Did you mean 'make_member'\?"):
        ConfigFile(str(tmp_path / "own.py"))
    (tmp_path / "own.py").write_text("def make_blocks(): ...\n")
    assert not ConfigFile(str(tmp_path / "own.py")).defines("make_member")


@pytest.mark.slow
def test_an_experiment_in_json_is_the_run_that_it_was_stored_by(tmp_path):
    model, optimizer = {"name": "mlp", "hidden_sizes": (5, 4)}, {"name": "lion", "b1": 0.8}
    values = {"steps": 3, "num_members": 3, "data": {"std": (16.0,)}}
    experiment = Experiment.from_dict(values | {"model": model, "optimizer": optimizer})
    train(experiment, tmp_path / "run")
    flag = f"--experiment={tmp_path / 'run' / EXPERIMENT}"
    config = ConfigFlags()
    rest = config.prepare(["train", flag, "--config.steps=7", "--config.model.hidden_sizes=(2,)"])
    flags.FLAGS(rest)
    changed = config.experiment()
    assert (changed.steps, changed.model.options["hidden_sizes"]) == (7, (2,))
    assert dataclasses.replace(changed, steps=3, model=experiment.model) == experiment
    assert config.file.own_parts(SPEC) == OwnParts()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def make_member(spec): return 3", "No network can be made from an object of type int"),
        ("def make_member(spec): return lambda key: 1 / 0", "division by zero"),
        ("def make_objective(spec): return 3", "returned an int, not a dist_ens.losses.Objective"),
        ("def make_source(data): return []", "source is a list, not a dist_ens.data.Source."),
        ("def make_loss(spec):\n    return 1 / 0", "ZeroDivisionError: division by zero (line 7)"),
        ("def make_callbacks(): return []", "given (line 6)."),
        ("make_optimizer = 3", "TypeError: 'int' object is not callable (line ?)."),
        (
            "def make_loss(spec): pass\ndef make_objective(spec): pass",
            "defines make_objective and make_loss. Remove one of them.",
        ),
    ],
)
def test_a_part_that_cannot_be_used_is_told_in_a_sentence(tmp_path, text, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):  # noqa: PT012
        file = file_with(tmp_path, text)
        file.own_parts(SPEC)
        file.source(DataConfig())


X = np.arange(32, dtype=np.float32).reshape(8, 4)
TABLE = source_of_arrays((X, X[:, 0]), (X, X[:, 0]), standardize=True)
CLASSES = source_of_arrays((X, np.arange(8) % 3), (X, np.arange(8) % 3))
PERMUTED = {"examples": "permuted"}
LOSS = OwnParts(member=nn.Dense(3), loss=sum)
STEP = OwnParts(step={"init": dict, "step": dict, "eval_loss": dict})
STANDARDIZED = OwnParts(objective=gaussian(standardize=True))


@pytest.mark.parametrize(
    ("source", "parts", "data", "sentence"),
    [
        (CLASSES, LOSS, {"mean": (1.0,)}, "data.mean=(1.0,) has no effect, because make_loss"),
        (CLASSES, LOSS, {"pooling": "vote"}, "evaluation.pooling='vote' has no effect, because"),
        (TABLE, STANDARDIZED, {}, "make_objective returned gaussian with standardize=True"),
        (TABLE, OwnParts(), {"std": (2.0,)}, "whose inputs are standardised already."),
        (CLASSES, OwnParts(), {"num_folds": 9, "examples": "kfold"}, "data.num_folds=9 does not"),
        (CLASSES, OwnParts(), {"global_batch_size": 12}, "data.global_batch_size=12 is larger"),
        (CLASSES, OwnParts(loss=sum), {}, "needs a network. Define make_member(spec) too."),
        (CLASSES, STEP, {"examples": "bootstrap"}, "data.examples='bootstrap' has no effect"),
        (CLASSES, dataclasses.replace(STEP, methods=[sum]), {}, "make_methods has no effect"),
        (CLASSES, OwnParts(), PERMUTED | {"shuffle": False}, "OrderRule(data.shuffle=False, per_"),
    ],
)
def test_a_part_that_does_not_fit_the_run_is_refused(source, parts, data, sentence, tmp_path):
    loss = {"name": "categorical" if source.spec.num_classes else "gaussian"}
    data = {"global_batch_size": 4} | data
    values = {"num_members": 2, "steps": 1, "loss": loss, "data": data}
    values["evaluation"] = {"pooling": data.pop("pooling", "probs")}
    experiment = Experiment.from_dict(values)
    with pytest.raises(UserError, match=re.escape(sentence)):
        train(experiment, tmp_path / "run", parts=parts, source=source)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fields", [{"shuffle": False, "per_member": True}, {"num_folds": 2}])
def test_an_order_that_members_would_not_have_is_refused(fields):
    with pytest.raises(UserError, match=r"is no order\. Use permuted\(\) or kfold"):
        OrderRule(**fields)


METHODS_AND_LOSS = """
import jax.numpy as jnp
from dist_ens.losses import Objective, Point

def make_objective(spec):
    def example_loss(outputs, labels):
        return jnp.abs(outputs[..., 0] - labels)
    return Objective("absolute", example_loss, Point(), lambda o, l: {}, num_outputs=1)

def make_methods(spec):
    def twice(value, rest):
        return 2 * value, rest
    return [lambda loss: lambda *args: twice(*loss(*args))]
"""


@pytest.mark.slow
def test_a_method_and_an_objective_of_the_file_are_trained_with(tmp_path):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(32, 4)).astype(np.float32), np.ones(32, np.float32)
    source = source_of_arrays((x, y), (x, y))
    values = {"steps": 1, "num_members": 2, "data": {"global_batch_size": 32}}
    experiment = Experiment.from_dict(values | {"execution": "vmap"})
    parts = file_with(tmp_path, METHODS_AND_LOSS).own_parts(source.spec)
    once, twice = (
        train(experiment, tmp_path / name, parts=own, source=source)
        for name, own in (("once", dataclasses.replace(parts, methods=())), ("twice", parts))
    )
    logs = ((tmp_path / name / "metrics.jsonl").read_text() for name in ("once", "twice"))
    losses = [json.loads(log.splitlines()[0])["train/loss"] for log in logs]
    assert losses[1] == pytest.approx(2 * losses[0])
    assert once.run.record.methods == ()
    assert twice.run.record.methods == ("make_methods",)
    # The experiment does not name these parts, so it is not stored.
    assert not (tmp_path / "once" / EXPERIMENT).exists()


@pytest.mark.slow
def test_a_run_stops_early_by_its_validation_split_and_scores_the_test_split_at_the_end(
    tmp_path, capsys
):
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 4)).astype(np.float32)
    y = x[:, 0] + random.normal(size=200).astype(np.float32)
    values = {"steps": 60, "num_members": 2, "data": {"global_batch_size": 16, "validation": 0.3}}
    values |= {"loss": {"name": "gaussian"}, "evaluation": {"every_steps": 5}}
    values |= {"model": {"hidden_sizes": (64,)}, "optimizer": {"learning_rate": 0.03}}
    experiment, steps = Experiment.from_dict(values), []
    for name, labels in (("right", y), ("other", -3 * y)):
        source = source_of_arrays((x, y), (x, labels)).with_validation(0.3)
        parts = OwnParts(callbacks=(EarlyStopping("nll", patience=3),))
        found = train(experiment, tmp_path / name, parts=parts, source=source)
        lines = [*map(json.loads, (tmp_path / name / "metrics.jsonl").read_text().splitlines())]
        last = lines[-1]["step"]
        valid, test = ([x for x in lines if f"{part}/nll" in x] for part in ("valid", "test"))
        assert [line["step"] for line in valid] == [*range(5, last + 1, 5)]
        assert min(valid, key=lambda line: line["valid/nll"])["step"] == found.step < last < 60
        [at_end] = test
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert at_end["test/nll"] == pytest.approx(summary["test"]["nll"])
        steps.append((found.step, summary["test"]["nll"]))
    assert "Note:" not in capsys.readouterr().out
    source = source_of_arrays((x, y), (x, y))
    train(experiment, tmp_path / "by_test", parts=parts, source=source)
    assert "Note: EarlyStopping chooses by the test split" in capsys.readouterr().out
    # Other test labels change the scores, and not the state.
    assert steps[0][0] == steps[1][0]
    assert steps[1][1] > 2 * steps[0][1]
