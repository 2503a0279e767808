"""What a run is: frozen dataclasses, checked when they are made.

A config file is loose (a `ConfigDict`, overridden by flags); an `Experiment` is what becomes of it
once: every name known, every type right, every value in range. Nothing here imports JAX, so that a
mistake is told before a device is touched.
"""

from dist_ens.config.checks import did_you_mean, whole_number
from dist_ens.config.experiment import MAY_CHANGE_ON_RESUME, Experiment, differences_on_resume
from dist_ens.config.reading import fields_from_record
from dist_ens.config.schema import (
    LOSSES,
    OPTIMIZERS,
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
    "LOSSES",
    "OPTIMIZERS",
    "POOLINGS",
    "SCHEDULES",
    "MAY_CHANGE_ON_RESUME",
    "CheckpointConfig",
    "ComputeConfig",
    "DataConfig",
    "EvaluationConfig",
    "Experiment",
    "LayoutConfig",
    "LoggingConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "did_you_mean",
    "differences_on_resume",
    "fields_from_record",
    "whole_number",
]
