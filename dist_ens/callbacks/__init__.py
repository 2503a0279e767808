"""Callbacks of `fit`, one file each. `callbacks.protocol` defines what a callback is."""

from dist_ens.callbacks.early_stopping import EarlyStopping
from dist_ens.callbacks.json_lines import JsonLines
from dist_ens.callbacks.progress import ProgressBar
from dist_ens.callbacks.protocol import STOP, RunInfo, StepInfo, stop_members
from dist_ens.callbacks.report import Report
from dist_ens.callbacks.successive_halving import SuccessiveHalving

__all__ = [
    "STOP",
    "EarlyStopping",
    "JsonLines",
    "ProgressBar",
    "Report",
    "RunInfo",
    "StepInfo",
    "SuccessiveHalving",
    "stop_members",
]
