"""The config door: an experiment is described, built from its description, and loaded again."""

from dist_ens.experiment.config_file import OwnParts
from dist_ens.experiment.loaded import load
from dist_ens.experiment.loaded_run import LoadedRun
from dist_ens.experiment.named import (
    comes_in_memory,
    describe_source,
    loss_options,
    make_model,
    make_objective,
    model_options,
    open_source,
)
from dist_ens.experiment.optimizers import make_optimizer, optimizer_options
from dist_ens.experiment.reading import fields_named, leaves
from dist_ens.experiment.record import MAY_CHANGE_ON_RESUME, differences_on_resume
from dist_ens.experiment.schema import (
    POOLINGS,
    CheckpointConfig,
    DataConfig,
    Experiment,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "Experiment",
    "LoadedRun",
    "LossConfig",
    "MAY_CHANGE_ON_RESUME",
    "ModelConfig",
    "OptimizerConfig",
    "OwnParts",
    "POOLINGS",
    "comes_in_memory",
    "describe_source",
    "differences_on_resume",
    "fields_named",
    "leaves",
    "loss_options",
    "make_objective",
    "load",
    "make_model",
    "make_optimizer",
    "model_options",
    "open_source",
    "optimizer_options",
]
