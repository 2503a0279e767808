"""Whole trainings, lifted: each member's script on its device, as in `jit(vmap(train))`."""

import functools

import jax
import numpy as np
import pytest

import dist_ens as de
from whole_trainings import TRAININGS, dqn, ppo

MEMBERS = 8


@pytest.fixture(autouse=True)
def _scripts_promote_ranks():
    with jax.numpy_rank_promotion("allow"):
        yield


def keys():
    return jax.random.split(jax.random.key(0), MEMBERS)


@functools.cache
def by_hand(train):
    return jax.device_get(jax.jit(jax.vmap(train))(keys()))


def assert_as_by_hand(train, rows, columns):
    """Compares each leaf to 1e-6 of its largest value."""
    devices = jax.devices()[: rows * columns]
    layout = de.Layout.make(MEMBERS, ensemble_axis=rows, devices=devices)
    lifted = de.lift(train, layout=layout, in_specs=("members",))
    found = jax.device_get(lifted(keys()))

    def compare(leaf, expected):
        atol = 1e-6 * np.abs(expected).max()
        np.testing.assert_allclose(leaf, expected, rtol=0, atol=atol)

    jax.tree.map(compare, found, by_hand(train))


@pytest.mark.parametrize("train", TRAININGS, ids=lambda train: train.__name__)
def test_a_whole_training_is_that_of_vmap(train):
    assert_as_by_hand(train, rows=8, columns=1)


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("train", [ppo, dqn], ids=lambda train: train.__name__)
def test_a_whole_training_without_a_batch_is_the_same_on_every_mesh(train, mesh):
    assert_as_by_hand(train, *mesh)


def test_members_are_trained_apart():
    for train in TRAININGS:
        leaves = [leaf.reshape(MEMBERS, -1) for leaf in jax.tree.leaves(by_hand(train))]
        assert len(np.unique(np.concatenate(leaves, axis=1), axis=0)) == MEMBERS, train.__name__
