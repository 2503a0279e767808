"""Batches that hold no rows: graphs, points of several sets, and no data at all."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
import networks
import own_steps
from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import INIT, PREDICT, UPDATE, member_key
from marked import long
from own_steps import MEMBERS, layout_of

SEED, STEPS = 3, 4
NODES = 48


def init(key):
    return {"w": jax.random.normal(key, (3,)), "b": jnp.zeros(())}


def graph(number):
    """A padded graph with 24 real nodes and a number of the whole."""
    sizes = {"padded_nodes": NODES, "edges": 96, "padded_edges": 96}
    return own_steps.graph(number, **sizes) | {"globals": np.float32(number)}


def messages(params, graph):
    values = jnp.tanh(graph["nodes"] @ params["w"])
    return jax.ops.segment_sum(values[graph["senders"]], graph["receivers"], len(values))


def loss_of_graph(params, model_state, graph, key):
    errors = (messages(params, graph) - params["b"] - graph["globals"]) ** 2 * graph["node_is_real"]
    return errors.sum() / graph["node_is_real"].sum(), (model_state, {})


class Points(NamedTuple):
    """Points inside of a domain, and a number of them on its boundary that 2 does not divide."""

    inner: np.ndarray
    boundary: np.ndarray


def points(number):
    random = np.random.default_rng(number)
    return Points(*(random.normal(size=(count, 3)).astype(np.float32) for count in (64, 15)))


def residual(params, points):
    return jnp.sin(points @ params["w"]) + params["b"] - 1


def loss_of_points(params, model_state, points, key):
    inner, boundary = ((residual(params, each) ** 2).mean() for each in points)
    return inner + 10 * boundary, (model_state, {"boundary": boundary})


def loss_of_drawn_points(params, model_state, batch, key, train=True):
    assert batch is None
    drawn = jax.random.uniform(key, (64, 3))
    return (residual(params, drawn) ** 2).mean(), (model_state, {})


LOSSES = {
    "graph": (loss_of_graph, graph, {"globals": "shared"}),
    "points": (loss_of_points, points, {"boundary": "shared"}),
    "nothing": (loss_of_drawn_points, lambda number: None, "batch"),
}


def ensemble_of(kind, mesh, **options):
    loss, _, specs = LOSSES[kind]
    options = {"seed": SEED, "execution": "vmap", "batch_specs": specs} | options
    network, layout = de.as_member(init=init, apply=messages), layout_of(mesh)
    return de.Ensemble(network, optax.sgd(0.1), loss, num_members=MEMBERS, layout=layout, **options)


@functools.cache
def by_hand(kind):
    """Returns losses [steps, members] and parameters of one network trained after another."""
    loss, batch_of, _ = LOSSES[kind]
    losses, trained = np.zeros((STEPS, MEMBERS)), []
    gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for member in range(MEMBERS):
        key = member_key(SEED, member)
        params = init(jax.random.fold_in(key, INIT))
        for step in range(STEPS):
            of_step = jax.random.fold_in(jax.random.fold_in(key, UPDATE), step)
            (losses[step, member], _), grads = gradient(params, (), batch_of(step), of_step)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        trained.append(params)
    return losses, jax.tree.map(lambda *leaves: np.stack(leaves), *trained)


def require_equal(state, kind):
    networks.assert_close(state.params, by_hand(kind)[1])


def fit(kind, ensemble, **options):
    batch_of = LOSSES[kind][1]
    data = None if kind == "nothing" else lambda: map(batch_of, range(STEPS))
    return de.fit(ensemble, data, **{"steps": STEPS, "progress": False} | options)


@pytest.mark.parametrize("mesh", ["2x2", *long("1x1", "4x1")])
@pytest.mark.parametrize("kind", LOSSES)
def test_update_trains_as_by_hand(kind, mesh):
    _, batch_of, _ = LOSSES[kind]
    ensemble = ensemble_of(kind, mesh)
    state = ensemble.init(batch_of(0))
    for step in range(STEPS):
        state, metrics = ensemble.update(state, batch_of(step))
        np.testing.assert_allclose(metrics["loss"], by_hand(kind)[0][step], rtol=1e-5)
    require_equal(state, kind)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("1x1", {"execution": "auto"}),
        ("2x2", {"execution": "loop", "waves": 2}),
        *long(("4x1", {"execution": "loop"})),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["graph", *long("points", "nothing")])
def test_fit_trains_as_by_hand_with_several_steps_in_a_call(kind, mesh, options):
    found = fit(kind, ensemble_of(kind, mesh, **options), steps_per_call=2)
    require_equal(found.state, kind)


@pytest.mark.parametrize("kind", LOSSES)
def test_a_run_resumes_at_its_batch_and_its_key(kind, tmp_path):
    ensemble, saved = ensemble_of(kind, "1x1"), de.Checkpoints(tmp_path, every_secs=None)
    for steps in (2, STEPS):
        found = fit(kind, ensemble, steps=steps, checkpoints=saved)
    require_equal(found.state, kind)
    require_equal(de.load(tmp_path, ensemble=ensemble).state, kind)


@pytest.mark.parametrize("mesh", ["2x2", *long("1x1", "4x1")])
def test_batches_without_rows_are_scored_one_after_another(mesh):
    ensemble = ensemble_of("graph", mesh)
    graphs = [graph(number) for number in range(3)]
    state = ensemble.init(graphs[0])
    expected = [
        np.mean([loss_of_graph(params, (), each, None)[0] for each in graphs])
        for params in de.unstack_members(jax.device_get(state.params))
    ]
    found = de.evaluate(ensemble, state, iter(graphs)).members
    np.testing.assert_allclose([member["loss"] for member in found], expected, rtol=1e-5)
    scores = fit("graph", ensemble, steps=0, eval_data=graphs).scores
    np.testing.assert_allclose([each["loss"] for each in scores.members], expected, rtol=1e-5)


def test_a_loss_without_data_is_scored_on_the_same_draw_every_time():
    ensemble = ensemble_of("nothing", "2x2")
    state = ensemble.init(None)
    losses = [
        loss_of_drawn_points(params, (), None, jax.random.fold_in(member_key(SEED, k), PREDICT))[0]
        for k, params in enumerate(de.unstack_members(jax.device_get(state.params)))
    ]
    found = de.evaluate(ensemble, state, [None]).members
    np.testing.assert_allclose([member["loss"] for member in found], losses, rtol=1e-5)


def test_inputs_without_rows_are_not_padded():
    ensemble = ensemble_of("graph", "2x2")
    # All leaves have 48 rows here. With copies of the last edge, a node would get more messages.
    inputs = {name: leaf[:NODES] for name, leaf in graph(0).items() if name != "globals"}
    state = ensemble.init(graph(0))
    found = ensemble.apply(state, inputs)
    expected = [messages(m, inputs) for m in de.unstack_members(jax.device_get(state.params))]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_a_leaf_that_does_not_divide_is_refused_with_its_name():
    ensemble = ensemble_of("points", "2x2", batch_specs="batch")
    message = r"^Leaf .boundary of the batch has the shape \[15, 3\], and its axis 0 is divided"
    state = ensemble.init(points(0))
    for batch in (points(0), jax.tree.map(jnp.asarray, points(0))):
        with pytest.raises(UserError, match=message):
            ensemble.update(state, batch)
    with pytest.raises(UserError, match=message):
        fit("points", ensemble)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_specs": {"boundary": "members"}}, "batch_specs is {'boundary': 'members'}. Give"),
        ({"microbatches": 2}, "microbatches=2 divides a batch by its rows"),
        ({"batch_specs": {"border": "shared"}}, "batch_specs names 'border', and the batch has"),
    ],
)
def test_what_needs_rows_is_refused(options, message):
    with pytest.raises(UserError, match=f"^{message}"):
        fit("points", ensemble_of("points", "1x1", **options))
