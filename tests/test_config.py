"""An experiment is read from nested mappings, and compared with a saved one."""

import json
import pathlib
import re
import runpy

import pytest

from dist_ens.experiment import (
    MAY_CHANGE_ON_RESUME,
    Experiment,
    LossConfig,
    differences_on_resume,
    leaves,
    make_objective,
)
from dist_ens.experiment.named import LOSSES
from dist_ens.experiment.reading import nearest_field
from dist_ens.ground.errors import UserError

NAN = float("nan")
CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
pytestmark = pytest.mark.quick


def test_an_experiment_survives_json_and_config_dict():
    values = {
        "steps": 10,
        "data": {"source": "npz:x", "mean": [1, 2.5], "std": (3.0,)},
        "model": {"name": "mlp", "hidden_sizes": [3, 4]},
        "optimizer": {"name": "prodigy", "learning_rate": 1, "betas": [0.9, 0.99]},
        "loss": {"name": "beta_gaussian", "beta": 0.3, "mixup": 0.2},
    }
    experiment = Experiment.from_dict(values)
    assert experiment.data.mean == (1.0, 2.5)
    assert experiment.optimizer.learning_rate == 1.0
    assert experiment.optimizer.options == {"betas": (0.9, 0.99)}
    assert experiment.loss.options == {"beta": 0.3, "mixup": 0.2}
    assert experiment.to_config_dict().model.hidden_sizes == (3, 4)
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
        ("num_epochs", "epochs"),
        ("n_estimators", "num_members"),
        ("checkpoints.every_steps", "checkpoint.every_steps"),
        ("data", "data.source"),
        ("optimizer.b3", None),  # Nothing is near in the section.
    ],
)
def test_the_name_of_a_field_in_another_library_is_understood(name, meant):
    known = [path for path, _ in leaves(Experiment(steps=1).to_dict())]
    assert nearest_field(name, known) == (f" Did you mean {meant!r}?" if meant else "")


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"data": {"shufle": False}}, "no field 'data.shufle'. Did you mean 'shuffle'?"),
        ({"steps": True}, "steps must be int or None: got True, a bool."),
        ({"data": {"mean": ["a"]}}, "data.mean[0] must be float: got 'a'"),
        ({"data": 3}, "data is 3, but it is a section with fields."),
        ({"steps": 1, "optimizer": {"schedule": "cosine"}}, "that decays needs schedule_steps"),
        ({"steps": 1, "data": {"num_folds": 5}}, "Give data.num_folds with data.examples"),
        ({"steps": 1, "num_members": None, "members_per_group": 0}, "members_per_group is 0. "),
        ({"data": {"examples": "kfold", "num_folds": 0}}, "data.num_folds is 0."),
        (
            {"steps": 1, "data": {"shuffle": False}, "loss": {"mixup": 0.2}},
            "mixup=0.2 needs shuffled",
        ),
        ({"data": {"global_batch_size": 0}}, "data.global_batch_size is 0."),
        ({"data": {"context_length": 0}}, "data.context_length is 0."),
        ({"data": {"validation": NAN}}, "data.validation must lie in [0, 1): got nan."),
        ({"data": {"std": (1.0, 0.0)}}, "data.std must be positive and finite: got 0.0."),
        ({"compute": {"dtype": "float16"}}, "compute.dtype='float16' is unknown."),
        ({"optimizer": {"momentum": 1.0}}, "optimizer.momentum must lie in [0, 1): got 1.0."),
        ({"optimizer": {"weight_decay": -1.0}}, "optimizer.weight_decay=-1.0 must be 0 or"),
        ({"optimizer": {"schedule": "cosine", "schedule_steps": 0}}, ".schedule_steps is 0."),
        ({"evaluation": {"every_steps": 1, "every_epoch": True}}, "every_epoch: leave one out."),
        ({"evaluation": {"global_batch_size": 0}}, "evaluation.global_batch_size is 0."),
    ],
)
def test_what_is_wrong_is_told_in_a_sentence(values, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)):
        Experiment.from_dict(values)


def test_every_loss_that_a_config_names_is_built():
    of_targets = {"gaussian": 2, "beta_gaussian": 2, "squared_error": 1, "quantiles": 3}
    assert len(LOSSES) == 8
    for name in LOSSES:
        num_classes, num_targets = (2, 7) if name == "multilabel" else (7, None)
        num_classes = None if name in of_targets else num_classes
        objective = make_objective(LossConfig(name=name), num_classes, num_targets)
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
    for changed, different in (
        ({"steps_per_call": 2}, [("steps_per_call", 1, 2)]),  # no field of `steps`
        ({"evaluation": {"pooling": "vote"}}, [("evaluation.pooling", "probs", "vote")]),
        ({"optimizer": {"b1": 0.8}}, [("optimizer.b1", None, 0.8)]),
        (
            {"seed": 1, "model": {"hidden_sizes": (3,)}},
            [("model.hidden_sizes", None, (3,)), ("seed", 0, 1)],
        ),
    ):
        other = Experiment.from_dict({"steps": 20, **changed})
        assert differences_on_resume(saved, other) == different


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.py")), ids=lambda p: p.stem)
def test_a_shipped_config_has_every_field_and_one_length(path):
    config = runpy.run_path(str(path))["get_config"]()
    experiment = Experiment.from_dict(config.to_dict())
    assert config.to_dict() == experiment.to_config_dict().to_dict()
    assert (config.steps is None) != (config.epochs is None)
    config.steps, config.epochs = 3, None
    config.layout.ensemble_axis = 2
    assert Experiment.from_dict(config.to_dict()).steps == 3
