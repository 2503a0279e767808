"""A member is itself, on any mesh, in any company."""

import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import networks
from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import UPDATE, member_key
from dist_ens.layout import BATCHES, MEMBERS, Layout
from dist_ens.members import Member
from marked import long

MESHES = [(1, 1), (8, 1), (4, 2), (2, 4), (1, 8)]
NETWORKS = [networks.mlp, networks.convolutional, networks.transformer]


def learnt(state):
    return state.params, state.model_state


@cache
def on_one_device(network):
    return networks.train(network, (1, 1))


@pytest.mark.parametrize("network", [*NETWORKS, *long(networks.dropout)])
def test_members_are_born_the_same_on_another_mesh(network):
    member, inputs, _ = network()
    layout = Layout.make(8, ensemble_axis=4, devices=jax.devices())
    state = networks.ensemble_of(member, networks.SGD, layout).init({"inputs": inputs})
    assert all(leaf.sharding == layout.sharding(MEMBERS) for leaf in jax.tree.leaves(state))
    assert state.member_id.tolist() == list(range(8))
    networks.assert_equal(state, networks.born(network, networks.SGD, tuple(range(8))))


@pytest.mark.parametrize(
    ("network", "mesh"),
    [
        *itertools.product(NETWORKS, MESHES[2:4]),
        (networks.dropout, (4, 2)),
        *long(*itertools.product(NETWORKS, MESHES[1::3]), (networks.dropout, (2, 4))),
    ],
)
def test_members_are_the_same_on_every_mesh(network, mesh):
    state, metrics = on_one_device(network)
    other, other_metrics = networks.train(network, mesh)
    networks.assert_close((learnt(other), other_metrics), (learnt(state), metrics))


@pytest.mark.parametrize("network", [networks.convolutional, *long(*NETWORKS[::2])])
def test_losses_under_adam_are_the_same_on_another_mesh(network):
    # Parameters are not compared: where a gradient is zero in truth, Adam's first steps turn the
    # sign of its rounding into a whole step.
    (_, one), (_, other) = (
        networks.train(network, mesh, optimizer=networks.ADAM) for mesh in ((1, 1), (2, 4))
    )
    np.testing.assert_allclose(one["loss"], other["loss"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("columns", [2, *long(1)])
def test_a_step_draws_another_dropout_mask_than_the_last_and_the_same_for_all_columns(columns):
    def record(params, model_state, inputs, key, train):
        mask = jax.random.bernoulli(key, 0.5, (64,)).astype(jnp.float32) if train else jnp.ones(64)
        return inputs[:, :1] * params["w"] + 0 * mask[0], {"mask": model_state["mask"] * 2 + mask}

    member = Member(lambda key, x: ({"w": jnp.ones((1, 2))}, {"mask": jnp.zeros(64)}), record)
    batch = {"inputs": np.ones((1, 4, 3), np.float32), "labels": np.zeros((1, 4), np.int32)}

    def recorded(num_members, columns=1, seed=0):
        """What each member has recorded after one step, and after two."""
        layout = Layout.make(num_members, devices=jax.devices()[:columns])
        ensemble = networks.ensemble_of(member, optax.sgd(0.0), layout)
        state = networks.begin(ensemble, jax.ShapeDtypeStruct((4, 3), jnp.float32), seed=seed)
        for _ in range(2):
            state, _ = ensemble.update_steps(state, layout.put(batch, BATCHES))
            yield np.asarray(state.model_state["mask"])

    (first,), (both,) = recorded(1, columns)
    key = jax.random.fold_in(jax.random.fold_in(member_key(0, 0), UPDATE), 0)
    np.testing.assert_array_equal(first, jax.random.bernoulli(key, 0.5, (64,)))
    assert not np.array_equal(both - 2 * first, first)
    masks = next(recorded(2))
    assert not np.array_equal(masks[0], masks[1])
    assert not np.array_equal(masks, next(recorded(2, seed=1)))


@pytest.mark.parametrize("network", [networks.convolutional, *long(*NETWORKS[::2])])
def test_member_3_is_the_same_among_8_among_64_and_alone(network):
    alone, _ = networks.train(network, (1, 1), 1, member_ids=[3])
    expected = networks.member_of(learnt(alone), 0)
    for num_members in (8, 64):
        company, _ = networks.train(network, (8, 1), num_members)
        networks.assert_close(networks.member_of(learnt(company), 3), expected)


def test_members_trained_elsewhere_predict_what_a_loop_over_them_does():
    member, inputs, label_shape = networks.mlp()
    x = networks.batches_for(inputs, label_shape, 1)["inputs"][0]
    trained = [member.init(jax.random.key(i), x)[0] for i in range(8)]
    one = jax.jit(lambda p: member.apply(p, (), x, None, False)[0])
    by_hand = np.stack([one(params) for params in trained])
    for rows, execution in [(8, "unroll"), (8, "vmap"), (2, "vmap")]:
        layout = Layout.make(8, ensemble_axis=rows, devices=jax.devices()[:rows])
        ensemble = networks.ensemble_of(member, optax.identity(), layout, execution=execution)
        logits = ensemble.outputs(ensemble.state_of(trained), layout.put(x))
        np.testing.assert_allclose(logits, by_hand, rtol=1e-5, atol=1e-6)
        if execution == "unroll":
            np.testing.assert_array_equal(logits, by_hand)


def test_ids_that_do_not_fit_the_layout_are_refused():
    ensemble = networks.ensemble_of(networks.mlp()[0], optax.sgd(0.1), Layout.make(8))
    for params in ({"w": np.ones((8, 3))}, [{"w": np.ones(3)}] * 2):
        with pytest.raises(UserError, match="and the ensemble has 8. .* list from stacked"):
            ensemble.state_of(params)
