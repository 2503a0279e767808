"""Deep ensembles as estimators of scikit-learn.

Fits of the same shapes share one compiled program, so that a grid search over seeds and learning
rates compiles once.
"""

from dist_ens.sklearn.classifier import EnsembleClassifier
from dist_ens.sklearn.regressor import EnsembleRegressor

__all__ = ["EnsembleClassifier", "EnsembleRegressor"]
