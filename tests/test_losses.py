"""Losses against numbers worked by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

from dist_ens.losses import accuracy, gaussian_nll, squared_error_score

pytestmark = pytest.mark.quick


def test_the_gaussian_loss_is_the_density_of_a_normal_distribution():
    # softplus(raw) + 1e-6 = 4 for raw = log(exp(3.999999) - 1); a target 2 beside the mean is one
    # standard deviation off: log(2 pi 4) / 2 + 1 / 2 = 1.6120857 + 0.5.
    raw = np.log(np.expm1(4 - 1e-6))
    loss = gaussian_nll(jnp.array([[1.0, raw]]), jnp.array([3.0]))
    assert loss.tolist() == pytest.approx([2.1120857], abs=1e-6)
    outputs = jax.random.normal(jax.random.key(0), (50, 2))
    targets = jax.random.normal(jax.random.key(1), (50,))
    scale = np.sqrt(np.log1p(np.exp(outputs[:, 1], dtype=np.float64)) + 1e-6)
    expected = -norm.logpdf(targets, outputs[:, 0], scale)
    np.testing.assert_allclose(gaussian_nll(outputs, targets), expected, rtol=1e-5)


def test_a_variance_that_is_as_good_as_none_leaves_the_loss_finite():
    # variance 1e-6: (log(2 pi) - 6 log(10)) / 2 + 1 / 2e-6.
    loss = gaussian_nll(jnp.array([[0.0, -200.0]]), jnp.array([1.0]))
    assert loss.tolist() == pytest.approx([499_994.0], rel=1e-5)


def test_scores_are_of_each_example():
    logits = jnp.array([[0.1, 0.9], [0.8, 0.2]])
    assert accuracy(logits, jnp.array([1, 1]))["accuracy"].tolist() == [1.0, 0.0]
    errors = squared_error_score(logits, jnp.array([1.1, 0.8]))["squared_error"]
    assert errors.tolist() == pytest.approx([1.0, 0.0])
