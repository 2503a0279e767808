"""Training: `fit`, its loop, and the forms of data that it takes. It does not use configs."""

from dist_ens.training.batch_iterable import BatchIterable
from dist_ens.training.data import OrderedSplit
from dist_ens.training.evaluation_data import EvalData
from dist_ens.training.fitting import FitResult, RunRecord, fit

__all__ = ["BatchIterable", "EvalData", "FitResult", "OrderedSplit", "RunRecord", "fit"]
