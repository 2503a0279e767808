"""A step is written for one member and the whole batch: on every mesh it is that of one device."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import batch_programs
import dist_ens as de
import networks
from batch_programs import BATCH, FEATURES, FEW, NAMES, PROGRAMS, RATE, SEED, STEPS, Trained
from dist_ens.ground.randomness import INIT, key_of_step
from marked import long
from networks import assert_close_to_scale, layout_on, member_of
from test_cluster import finish, free_port, start
from two_divided import ARRANGEMENTS

BATCHES = batch_programs.batches()
# Rows, columns, members and the execution of a device's members.
MESHES = [
    (1, 1, 2, "vmap"),
    (2, 2, 4, "vmap"),
    (1, 4, 2, "map"),
    (1, 8, 1, "loop"),
    (4, 2, 4, "vmap"),
]


def ensemble_of(rows, columns, num_members, execution, names=NAMES):
    init, loss = batch_programs.network_and_loss(names)
    layout, options = layout_on((rows, columns), num_members), {"execution": execution}
    return networks.ensemble_of(
        de.as_member(init=init), optax.sgd(RATE), layout, loss, seed=SEED, **options
    )


@functools.cache
def trained(mesh, names=NAMES):
    """Returns what came of all programs, leaves [members, ...] and metrics [steps, members]."""
    return trained_by(ensemble_of(*mesh, names))


def trained_by(ensemble):
    state, metrics = ensemble.init(BATCHES[0]), []
    for batch in BATCHES:
        state, of_step = ensemble.update(state, batch)
        metrics.append(jax.device_get(of_step))
    stacked = jax.tree.map(lambda *values: np.stack(values), *metrics)
    return jax.device_get(Trained(state.params, state.model_state, stacked))


@functools.cache
def step_by_hand(names):
    """Returns the jitted step of SGD of one member of each program, each on its own."""

    def of_program(name, params, model_state, batch, key):
        def loss(params):
            value, *others = PROGRAMS[name].loss(params, model_state, batch, key)
            return value, others

        (value, (model_state, drawn)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        metrics = {name: value} | batch_programs.drawn_metric(name, drawn)
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads), model_state, metrics

    def step(params, model_state, batch, key):
        stepped = {n: of_program(n, params[n], model_state[n], batch, key) for n in names}
        metrics = {key: value for *_, found in stepped.values() for key, value in found.items()}
        return (
            {name: params for name, (params, _, _) in stepped.items()},
            {name: model_state for name, (_, model_state, _) in stepped.items()},
            metrics,
        )

    return jax.jit(step)


@functools.cache
def train_by_hand(member_id, names=NAMES):
    """Trains one member of each program on one device, by plain `jit` of the whole batch."""
    key = jax.random.fold_in(jax.random.key(SEED), member_id)
    init, _ = batch_programs.network_and_loss(names)
    zeros = jnp.zeros((BATCH, FEATURES))
    params, model_state = jax.jit(init)(jax.random.fold_in(key, INIT), zeros)
    metrics = []
    for number, batch in enumerate(BATCHES):
        of_step = step_by_hand(names)
        params, model_state, found = of_step(params, model_state, batch, key_of_step(key, number))
        metrics.append(found)
    stacked = jax.tree.map(lambda *values: jnp.stack(values), *metrics)
    return jax.device_get(Trained(params, model_state, stacked))


def assert_as_by_hand(found, member_id, names):
    """Compares a member with the one trained by hand, each leaf to 1e-5 of its largest value."""
    expected = train_by_hand(member_id)
    for name in names:
        losses = found.metrics[name][:, member_id]
        np.testing.assert_allclose(losses, expected.metrics[name], rtol=1e-6)
        if f"{name}: drawn" in expected.metrics:
            drawn = found.metrics[f"{name}: drawn"][:, member_id]
            np.testing.assert_array_equal(drawn, expected.metrics[f"{name}: drawn"])
        for tree, by_hand in zip((found.params, found.model_state), expected[:2], strict=True):
            assert_close_to_scale(member_of(tree[name], member_id), by_hand[name])


# Compiling all programs takes long.
@pytest.mark.parametrize(
    "mesh", [MESHES[1], *long(*((mesh,) for mesh in MESHES if mesh != MESHES[1]))], ids=str
)
@pytest.mark.parametrize("name", NAMES)
def test_a_loss_of_the_whole_batch_is_trained_as_by_hand_on_one_device(name, mesh):
    _, _, num_members, _ = mesh
    for member_id in range(num_members):
        assert_as_by_hand(trained(mesh), member_id, [name])


@pytest.mark.parametrize("execution", ["map", "chunk:2", *long("unroll", "loop")])
def test_every_execution_sees_the_whole_batch(execution):
    found = trained((2, 2, 4, execution), FEW)
    for member_id in range(4):
        assert_as_by_hand(found, member_id, FEW)


@pytest.mark.parametrize("model_axis", [2, *long(4)])
def test_members_that_share_devices_see_the_whole_batch(model_axis):
    layout = de.Layout.make(4, ensemble_axis=2, model_axis=model_axis)
    ensemble = ensemble_of(1, 1, 4, "loop", FEW).replace(layout=layout)
    found = trained_by(ensemble)
    for member_id in range(4):
        assert_as_by_hand(found, member_id, FEW)


@pytest.mark.parametrize("execution", ["map", *long("vmap+scanned")])
def test_fit_trains_steps_of_one_call_on_the_whole_batch(execution):
    ensemble, options = ensemble_of(2, 2, 4, execution, FEW), {"steps_per_call": STEPS}
    fitted = de.fit(ensemble, lambda: iter(BATCHES), steps=STEPS, progress=False, **options)
    for member_id in range(4):
        own, expected = member_of(fitted.state, member_id), train_by_hand(member_id)
        for name in FEW:
            assert_close_to_scale(own.params[name], expected.params[name])
            assert_close_to_scale(own.model_state[name], expected.model_state[name])


@pytest.fixture(scope="module")
def trained_by_two(tmp_path_factory):
    """Returns the folder into which two processes of two devices wrote what they trained."""
    folder = tmp_path_factory.mktemp("two_divided")
    logs = [folder / f"host_{i}.log" for i in range(2)]
    script = [sys.executable, "tests/two_divided.py", f"127.0.0.1:{free_port()}"]
    codes = finish([start([*script, str(i), str(folder)], logs[i]) for i in range(2)], logs)
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)
    return folder


@pytest.mark.parametrize("process_id", [0, 1])
@pytest.mark.parametrize("rows", ARRANGEMENTS)
def test_two_processes_train_on_the_whole_batch_as_by_hand(trained_by_two, rows, process_id):
    with np.load(trained_by_two / f"{rows} {process_id}.npz") as file:
        leaves = [file[f"arr_{i}"] for i in range(len(file.files))]
    found = jax.tree.unflatten(jax.tree.structure(train_by_hand(0, FEW)), leaves)
    for member_id in range(2):
        assert_as_by_hand(found, member_id, FEW)
