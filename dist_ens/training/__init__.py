"""Training: `fit`, its services, and the forms of data that it takes. It does not use configs."""

from dist_ens.training.arguments import Door, FitArguments
from dist_ens.training.batch_iterable import BatchIterable
from dist_ens.training.ending import FitResult
from dist_ens.training.evaluating import EvalData
from dist_ens.training.fitting import fit, run_fit

__all__ = [
    "BatchIterable",
    "Door",
    "EvalData",
    "FitArguments",
    "FitResult",
    "fit",
    "run_fit",
]
