"""The description of a run: frozen dataclasses, checked when they are made.

A config file returns a `ConfigDict`, which flags override. It becomes an `Experiment`, whose names,
types and ranges are checked. Nothing here imports JAX, so that a mistake is reported before a
device is touched. Names and arguments of networks and optimizers are checked in `dist_ens.models`
and `dist_ens.optimizers`.
"""

from dist_ens.config.checks import MOST_STEPS, did_you_mean, fields_named, whole_number
from dist_ens.config.experiment import MAY_CHANGE_ON_RESUME, Experiment, differences_on_resume
from dist_ens.config.failure_policy import FailurePolicy
from dist_ens.config.own_parts import OwnParts
from dist_ens.config.reading import checked_type, fields_from_record
from dist_ens.config.schema import (
    LOSSES,
    POOLINGS,
    SCHEDULES,
    CheckpointConfig,
    ComputeConfig,
    DataConfig,
    EvaluationConfig,
    LayoutConfig,
    LoggingConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
)

__all__ = [
    "MOST_STEPS",
    "LOSSES",
    "POOLINGS",
    "SCHEDULES",
    "MAY_CHANGE_ON_RESUME",
    "CheckpointConfig",
    "ComputeConfig",
    "DataConfig",
    "EvaluationConfig",
    "Experiment",
    "FailurePolicy",
    "LayoutConfig",
    "LoggingConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OwnParts",
    "checked_type",
    "did_you_mean",
    "fields_named",
    "differences_on_resume",
    "fields_from_record",
    "whole_number",
]
