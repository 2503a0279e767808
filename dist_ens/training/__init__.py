"""Training: `fit`, its loop, and the forms of data that it takes. It knows no config."""

from dist_ens.training.data import BatchIterable, OrderedSplit
from dist_ens.training.evaluation_data import EvalData
from dist_ens.training.fitting import FitResult, RunRecord, fit

__all__ = ["BatchIterable", "EvalData", "FitResult", "OrderedSplit", "RunRecord", "fit"]
