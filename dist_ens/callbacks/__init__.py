"""Callbacks of `fit`, one file each. `callbacks.protocol` defines what a callback is."""

from dist_ens.callbacks.early_stopping import EarlyStopping
from dist_ens.callbacks.json_lines import JsonLines
from dist_ens.callbacks.mlflow import MLflow
from dist_ens.callbacks.progress import ProgressBar
from dist_ens.callbacks.protocol import STOP, RunInfo, StepInfo, stop_members
from dist_ens.callbacks.report import Report
from dist_ens.callbacks.successive_halving import SuccessiveHalving
from dist_ens.callbacks.tensorboard import TensorBoard
from dist_ens.callbacks.wandb import WandB

__all__ = [
    "STOP",
    "EarlyStopping",
    "JsonLines",
    "MLflow",
    "ProgressBar",
    "Report",
    "RunInfo",
    "StepInfo",
    "SuccessiveHalving",
    "TensorBoard",
    "WandB",
    "stop_members",
]
