"""Predictions of an ensemble: means, uncertainties and their parts, against numbers by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dist_ens.losses import Categorical, Gaussian, Point, Quantiles, predict_leaves

pytestmark = pytest.mark.quick

LN2 = np.log(2)
# softplus(RAW) + 1e-6 is 1.
RAW = np.log(np.expm1(1 - 1e-6))


def check(found, rtol=1e-7, atol=0.0, **expected):
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=rtol, atol=atol)


def test_classes_have_the_entropy_of_the_mean_and_the_mean_entropy_in_nats():
    # Two members, two examples. Of the first they are sure of different classes: the mean is
    # (1/2, 1/2), whose entropy is ln 2, and the members' is 0. Of the second both say (1/2, 1/2).
    logits = jnp.array([[[50.0, 0.0], [0.0, 0.0]], [[0.0, 50.0], [3.0, 3.0]]])
    found = jax.jit(Categorical().predict)(logits)
    members = [[[1, 0], [0.5, 0.5]], [[0, 1], [0.5, 0.5]]]
    check(found, mean=[[0.5, 0.5], [0.5, 0.5]], members=members, atol=1e-6)
    check(found, total=[LN2, LN2], aleatoric=[0, LN2], epistemic=[LN2, 0], atol=1e-6)
    assert found.member_variance is found.std is found.quantiles is None
    # One member, two samples that are sure of different classes: their mean entropy is 0.
    sampled = Categorical().predict(logits[None, :, :1], has_samples=True)
    check(sampled, members=[[[0.5, 0.5]]], aleatoric=[0], epistemic=[LN2], atol=1e-6)


@pytest.mark.slow
def test_members_that_agree_have_no_epistemic_uncertainty_below_zero():
    logits = jnp.broadcast_to(jax.random.normal(jax.random.key(0), (1, 200, 7)), (3, 200, 7))
    found = Categorical().predict(logits)
    assert float(found.epistemic.min()) >= 0
    assert float(found.epistemic.max()) < 1e-5


@pytest.mark.slow
def test_normals_have_the_mean_variance_and_the_variance_of_the_means():
    # Means 1 and 5, variances 1: mean 3, aleatoric 1, epistemic (4 + 4) / 2 = 4, total 5.
    outputs = jnp.array([[[1.0, RAW]], [[5.0, RAW]]])
    found = jax.jit(Gaussian().predict)(outputs)
    assert found.members.tolist() == [[1], [5]]
    check(found, mean=[3], aleatoric=[1], epistemic=[4], total=[5], rtol=1e-6)
    check(found, member_variance=[[1], [1]], std=[np.sqrt(5)], rtol=1e-6)
    # The same two as samples of one member: it is the mixture of both.
    sampled = Gaussian().predict(outputs[None], has_samples=True)
    check(sampled, members=[[3]], member_variance=[[5]], total=[5], rtol=1e-6)


def test_points_have_no_aleatoric_part():
    # Points 0, 3 and 6: mean 3, variance (9 + 0 + 9) / 3 = 6.
    found = Point().predict(jnp.array([[[0.0]], [[3.0]], [[6.0]]]))
    assert found.aleatoric is None
    check(found, mean=[3], epistemic=[6], total=[6])
    check(found, std=[np.sqrt(6)], rtol=1e-6)
    sampled = Point().predict(jnp.array([[[[0.0]], [[3.0]]], [[[3.0]], [[6.0]]]]), has_samples=True)
    check(sampled, members=[[1.5], [4.5]], epistemic=[(9 + 0 + 0 + 9) / 4])


def test_quantiles_are_sorted_averaged_and_have_a_median():
    # The second member's quantiles cross: sorted they are 1, 4, 5.
    found = Quantiles((0.1, 0.5, 0.9)).predict(jnp.array([[[-1.0, 0, 3]], [[4, 1, 5]]]))
    check(found, quantiles=[[0, 2, 4]], mean=[2], members=[[0], [4]], epistemic=[4])
    assert found.total is found.aleatoric is found.std is None


def test_outputs_without_an_objective_are_predicted_leaf_by_leaf():
    outputs = {"energy": jnp.array([[1.0], [3.0]]), "forces": (jnp.array([[[0.0, 2.0]]] * 2),)}
    found = jax.jit(predict_leaves)(outputs)
    assert found.total is found.aleatoric is None
    np.testing.assert_allclose(found.mean["energy"], [2])
    np.testing.assert_allclose(found.epistemic["energy"], [1])  # ((1 - 2)^2 + (3 - 2)^2) / 2
    np.testing.assert_allclose(found.epistemic["forces"][0], [[0, 0]])
    assert found.members["forces"][0].shape == (2, 1, 2)
    assert "['forces'][0] float32[2, 1, 2]" in repr(found)


@pytest.mark.slow
def test_a_prediction_of_standardised_targets_is_scaled_into_their_own_unit():
    found = Gaussian().predict(jnp.array([[[1.0, RAW]], [[5.0, RAW]]]))
    own = found.in_unit(jnp.float32(100), jnp.float32(10))
    # Locations times 10 plus 100, variances times 100, deviations times 10.
    check(own, mean=[130], members=[[110], [150]], std=[np.sqrt(500)], rtol=1e-6)
    check(own, aleatoric=[100], epistemic=[400], total=[500], rtol=1e-6)
    check(own, member_variance=[[100], [100]], rtol=1e-6)
    quantiles = Quantiles((0.5,)).predict(jnp.array([[[2.0]]])).in_unit(1.0, 3.0)
    check(quantiles, quantiles=[[7]])
    assert quantiles.total is None
    classes = Categorical().predict(jnp.zeros((1, 1, 2)))
    assert classes.in_unit(1.0, 3.0) is classes
