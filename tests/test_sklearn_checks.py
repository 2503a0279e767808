"""scikit-learn's own checks of the estimators."""

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from commands import python
from dist_ens.sklearn import EnsembleClassifier, EnsembleRegressor

pytestmark = pytest.mark.long


@parametrize_with_checks(
    [
        EnsembleClassifier(2, model=(16,), learning_rate=1e-2, max_epochs=50),
        EnsembleRegressor(2, model=(16,), learning_rate=1e-2, max_epochs=50),
    ]
)
def test_an_estimator_is_one_of_scikit_learn(estimator, check):
    check(estimator)


def test_the_check_that_needs_a_variable_passes_with_it():
    # SciPy reads the variable when it is imported.
    options = ["-m", "long", "-k", "check_array_api_input", "-n", "0", "-q"]
    ended = python("-m", "pytest", __file__, *options, SCIPY_ARRAY_API="1")
    assert "2 passed" in ended.stdout, ended.stdout
