"""An experiment is checked when it is made."""

import json
import pathlib
import re
import runpy

import pytest

from dist_ens.config import (
    LOSSES,
    MAY_CHANGE_ON_RESUME,
    Experiment,
    LossConfig,
    did_you_mean,
    differences_on_resume,
)
from dist_ens.config.reading import leaves
from dist_ens.errors import UserError
from dist_ens.experiment.objectives import make_objective

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
pytestmark = pytest.mark.quick


def test_an_experiment_survives_json_and_config_dict():
    experiment = Experiment.from_dict(
        {
            "steps": 10,
            "data": {"source": "npz:x", "mean": [1, 2.5], "std": (3.0,)},
            "model": {"name": "mlp", "hidden_sizes": [3, 4]},
            "optimizer": {"name": "sgd", "learning_rate": 1},
        }
    )
    assert experiment.data.mean == (1.0, 2.5)
    assert experiment.optimizer.learning_rate == 1.0
    assert experiment.model.options == {"hidden_sizes": (3, 4)}
    assert Experiment.from_dict(json.loads(json.dumps(experiment.to_dict()))) == experiment
    assert Experiment.from_dict(experiment.to_config_dict().to_dict()) == experiment


def test_a_field_that_is_none_remembers_its_type():
    config = Experiment(steps=1).to_config_dict()
    config.epochs = 2.0
    config.layout.ensemble_axis = 4
    with pytest.raises(TypeError):
        config.data.data_dir = 3


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("data.bs", "data.global_batch_size"),
        ("evaluation.batch_size", "evaluation.global_batch_size"),
        ("num_epochs", "epochs"),
        ("wd", "optimizer.weight_decay"),
        ("n_estimators", "num_members"),
        ("checkpoints.every_steps", "checkpoint.every_steps"),
        ("model", "model.name"),
        ("data", "data.source"),
        ("data.name", "data.source"),
        ("optimizer.b3", None),  # Nothing is near in the section.
    ],
)
def test_the_name_of_a_field_in_another_library_is_understood(name, meant):
    known = [path for path, _ in leaves(Experiment(steps=1).to_dict())]
    assert did_you_mean(name, known) == (f" Did you mean {meant!r}?" if meant else "")


def test_a_letter_too_few_in_any_field_is_understood():
    known = [path for path, _ in leaves(Experiment(steps=1).to_dict())]
    for path in known:
        section, dot, field = path.rpartition(".")
        for place in range(len(field)):
            typed = section + dot + field[:place] + field[place + 1 :]
            assert did_you_mean(typed, known) == f" Did you mean {path!r}?"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"stepz": 1}, "The config has no field 'stepz'. Did you mean 'steps'?"),
        (
            {"steps": 1, "data": {"shufle": False}},
            "The config has no field 'data.shufle'. Did you mean 'shuffle'?",
        ),
        ({"steps": "many"}, "steps must be int or None: got 'many', a str."),
        ({"steps": True}, "steps must be int or None: got True, a bool."),
        ({"steps": 1.5}, "steps must be int or None: got 1.5, a float."),
        ({"steps": 1, "data": {"mean": ["a"]}}, "data.mean[0] must be float: got 'a'"),
        ({"steps": 1, "data": 3}, "data is 3, but it is a section with fields."),
        ({"steps": 1, "num_members": 0}, "num_members must be positive: got 0."),
        ({"steps": 0}, "steps must be positive: got 0. Set --config.steps to an integer of 1"),
        (
            {"steps_per_call": 2**31},
            "steps_per_call must be at most 2,147,483,647: got 2147483648.",
        ),
        ({"steps": 1, "epochs": 1.0}, "steps=1 and epochs=1.0, but exactly one of them must be"),
        ({}, "steps=None and epochs=None, but exactly one of them must be set."),
        ({"steps": 1, "seed": -1}, "seed must lie in [0, 2**32): got -1."),
        (
            {"steps": 1, "execution": "vmapp"},
            "The execution 'vmapp' is unknown. Did you mean 'vmap'?",
        ),
        (
            {"steps": 1, "loss": {"name": "msa"}},
            "loss.name='msa' is unknown. Did you mean 'mse'? Choose one of softmax_cross_entropy",
        ),
        (
            {"steps": 1, "optimizer": {"schedule": "cosine"}},
            "optimizer.schedule_steps must be set if and only if the schedule is not constant",
        ),
        (
            {"steps": 1, "optimizer": {"schedule_steps": 5}},
            "got optimizer.schedule='constant', optimizer.schedule_steps=5.",
        ),
        ({"steps": 1, "optimizer": {"momentum": 1.0}}, "momentum must lie in [0, 1): got 1.0."),
        (
            {"steps": 1, "optimizer": {"learning_rate": float("nan")}},
            "optimizer.learning_rate must be positive: got nan. Set --config.optimizer.learning_r",
        ),
        (
            {
                "steps": 1,
                "optimizer": {"learning_rate": None, "schedule": "linear", "schedule_steps": 5},
            },
            "optimizer.schedule='linear' has no learning rate to start from.",
        ),
        ({"steps": 1, "optimizer": {"options": 3}}, "optimizer.options must be Mapping: got 3"),
        ({"steps": 1, "execution": "chunk:0"}, "The execution 'chunk:0' is unknown."),
        ({"steps": 1, "execution": "chunk:0"}, "K is a number of members, such as 4 in chunk:4."),
        (
            {"steps": 1, "execution": "auto+scanned"},
            "The execution 'auto+scanned' adds words to auto,",
        ),
        ({"steps": 1, "execution": "vmap+mask"}, "The execution 'mask' in 'vmap+mask' is unknown."),
        ({"steps": 1, "execution": "vmap+mask"}, "Did you mean 'masks'?"),
        (
            {"steps": 1, "execution": "vmap+patches+apart"},
            "says twice how to run convolutions: patches and apart. Leave one out.",
        ),
        ({"steps": 1, "data": {"std": (0.0,)}}, "data.std must be positive: got 0.0."),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(values, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        Experiment.from_dict(values)


def test_the_arguments_of_an_optimizer_stand_beside_its_fields():
    values = {"name": "prodigy", "learning_rate": 1.0, "betas": [0.9, 0.99]}
    experiment = Experiment.from_dict({"steps": 1, "optimizer": values})
    assert experiment.optimizer.options == {"betas": (0.9, 0.99)}
    assert experiment.to_config_dict().optimizer.betas == (0.9, 0.99)
    assert Experiment.from_dict(json.loads(json.dumps(experiment.to_dict()))) == experiment
    assert Experiment.from_dict(experiment.to_config_dict().to_dict()) == experiment
    nested = {"name": "prodigy", "options": {"betas": [0.9, 0.99], "learning_rate": 1.0}}
    assert Experiment.from_dict({"steps": 1, "optimizer": nested}) == experiment


def test_an_experiment_that_was_stored_without_options_is_read_and_may_be_resumed():
    experiment = Experiment(steps=1)
    stored = experiment.to_dict()
    assert stored["optimizer"].pop("options") == {}
    assert Experiment.from_dict(stored) == experiment
    assert differences_on_resume(Experiment.from_dict(stored), experiment) == []


def test_another_argument_of_an_optimizer_forbids_to_resume():
    saved, asked = (
        Experiment.from_dict({"steps": 1, "optimizer": {"name": "lion", "b1": b1}})
        for b1 in (0.9, 0.8)
    )
    assert differences_on_resume(saved, asked) == [("optimizer.b1", 0.9, 0.8)]


def test_every_loss_that_a_config_names_is_built():
    of_targets = {"gaussian_nll": 2, "beta_nll": 2, "mse": 1, "pinball": 3}
    for name in LOSSES:
        objective = make_objective(
            LossConfig(name=name), num_classes=None if name in of_targets else 7
        )
        assert objective.num_outputs == of_targets.get(name, 7)


def test_only_listed_fields_may_change_on_resume():
    saved = Experiment.from_dict({"steps": 10})
    may = {
        "epochs": 3.0,
        "steps": None,
        "layout": {"ensemble_axis": 2},
        "execution": "unroll",
        "checkpoint": {"every_steps": 3},
        "failures": {"policy": "skip"},
        "evaluation": {"every_steps": 3, "global_batch_size": 7},
        "logging": {"every_steps": 3},
    }
    assert set(may) == {path.split(".")[0] for path in MAY_CHANGE_ON_RESUME}
    assert differences_on_resume(saved, Experiment.from_dict(may)) == []
    calls = Experiment.from_dict({"steps": 10, "steps_per_call": 2})  # no field of `steps`
    assert differences_on_resume(saved, calls) == [("steps_per_call", 1, 2)]
    pooled = Experiment.from_dict({"steps": 10, "evaluation": {"pooling": "vote"}})
    assert differences_on_resume(saved, pooled) == [("evaluation.pooling", "probs", "vote")]
    other = Experiment.from_dict(
        {"steps": 20, "seed": 1, "model": {"name": "mlp", "hidden_sizes": (3,)}}
    )
    assert differences_on_resume(saved, other) == [
        ("model.hidden_sizes", None, (3,)),
        ("seed", 0, 1),
    ]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda p: p.stem)
def test_a_shipped_config_has_every_field_and_one_length(path):
    config = runpy.run_path(str(path))["get_config"]()
    experiment = Experiment.from_dict(config.to_dict())
    assert config.to_dict() == experiment.to_config_dict().to_dict()
    assert (config.steps is None) != (config.epochs is None)
    config.steps, config.epochs = 3, None
    config.layout.ensemble_axis = 2
    assert Experiment.from_dict(config.to_dict()).steps == 3
