"""`lift`: a function of one member becomes that of all, on every mesh and in every execution."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import dist_ens as de
import networks
from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import INIT, member_key

pytestmark = pytest.mark.quick

MEMBERS, BATCH = 8, 16
_RANDOM = np.random.default_rng(0)
BATCH_OF_ALL = {
    "x": _RANDOM.normal(size=(BATCH, 3)).astype(np.float32),
    "y": _RANDOM.normal(size=BATCH).astype(np.float32),
}
RATE = np.float32(0.1)


def layout_of(rows, columns, num_members=MEMBERS):
    return networks.layout_on((rows, columns), num_members)


def init(key):
    return {"w": jax.random.normal(key, (3,)), "count": jnp.int32(0)}


def loss_of(w, batch):
    return jnp.square(batch["x"] @ w - batch["y"]).mean()


def step(member, batch, rate):
    loss, gradient = jax.value_and_grad(loss_of)(member["w"], batch)
    new = {"w": member["w"] - rate * gradient, "count": member["count"] + 1}
    return new, {"loss": loss}


SPECS = ("members", "batch", "shared")


def members_on(layout):
    return layout.init(init, jax.random.key(0))


@pytest.fixture(scope="module")
def expected():
    """The step of each member, jitted on one device."""
    members = [init(jax.random.fold_in(member_key(0, i), INIT)) for i in range(MEMBERS)]
    one = jax.jit(step)
    results = [one(member, BATCH_OF_ALL, RATE) for member in members]
    return jax.device_get(jax.tree.map(lambda *leaves: np.stack(leaves), *results))


@pytest.mark.parametrize("mesh", [(1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("execution", ["vmap", "unroll", "map", "chunk:2", "loop"])
def test_every_execution_gives_the_same_values(execution, mesh, expected):
    layout = layout_of(*mesh)
    lifted = de.lift(step, layout=layout, in_specs=SPECS, execution=execution)
    networks.assert_close(lifted(members_on(layout), BATCH_OF_ALL, RATE), expected)


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["vmap", "loop"])
def test_a_donated_argument_is_used_up_and_others_are_not(execution):
    layout = layout_of(2, 1)
    lifted = de.lift(step, layout=layout, in_specs=SPECS, execution=execution, donate_argnums=0)
    members, batch = members_on(layout), layout.put(BATCH_OF_ALL)
    lifted(members, batch, RATE)
    assert members["w"].is_deleted()
    assert not batch["x"].is_deleted()
    kept = members_on(layout)
    de.lift(step, layout=layout, in_specs=SPECS, execution=execution)(kept, batch, RATE)
    assert not kept["w"].is_deleted()


@pytest.mark.parametrize(
    "change", [lambda w: w[:2], lambda w: w.astype(jnp.bfloat16)], ids=["shape", "type"]
)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_result_of_another_shape_or_type_does_not_take_the_place_of_the_argument(change):
    w = np.arange(24, dtype=np.float32).reshape(8, 3)
    lifted = de.lift(
        change, layout=layout_of(2, 1), in_specs=("members",), execution="loop", donate_argnums=0
    )
    result, expected = lifted(w), [change(jnp.asarray(row)) for row in w]
    assert result.dtype == expected[0].dtype
    assert result.tolist() == [row.tolist() for row in expected]


def test_a_spec_is_a_name_or_a_tree_of_names():
    layout = layout_of(2, 2, num_members=2)

    def fn(own, batch):
        x = own["w"] * batch["all"].sum() + batch["each"].sum() + own["shift"]
        return {"same": x, "by_row": x + batch["each"], "whole": x + batch["each"]}

    lifted = de.lift(
        fn,
        layout=layout,
        in_specs=({"w": "members", "shift": "shared"}, {"all": "batch", "each": "member_batch"}),
        out_specs={"same": "members", "by_row": "member_batch", "whole": "members"},
    )
    own = {"w": np.array([1.0, 10.0]), "shift": 100.0}
    found = lifted(own, {"all": np.arange(4.0), "each": np.array([[0.0, 1], [2, 3]])})
    # `all` sums to 6; `each` sums to 1 for member 0 and to 5 for member 1.
    assert found["same"].tolist() == [107, 165]
    assert found["by_row"].tolist() == found["whole"].tolist() == [[107, 108], [167, 168]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_specs": ("member", "batch", "shared")}, "'member' is not a spec. Use one of 'memb"),
        ({"out_specs": "batch"}, "of a result has no members axis"),
        ({"in_specs": "members"}, "Give a tuple with one spec for each"),
        ({"execution": "vmap+scanned"}, "says how to run several steps.*Leave 'scanned' out"),
    ],
    ids=str,
)
def test_what_lift_does_not_take_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        de.lift(step, **({"layout": layout_of(1, 1), "in_specs": SPECS} | options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uncommitted", "committed", "NumPy", "float64", "another layout"])
def test_arguments_are_put_where_they_belong(kind, expected):
    layout = layout_of(2, 2)
    members, batch = jax.device_get(members_on(layout)), BATCH_OF_ALL
    if kind == "uncommitted":
        members, batch = jax.tree.map(jnp.asarray, (members, batch))
    elif kind == "committed":
        batch = jax.device_put(batch, jax.devices()[7])
    elif kind == "float64":
        batch = {name: leaf.astype(np.float64) for name, leaf in batch.items()}
        members["count"] = members["count"].astype(np.int64)
    elif kind == "another layout":
        members = members_on(layout_of(4, 1))
    found = de.lift(step, layout=layout, in_specs=SPECS)(members, batch, RATE)
    networks.assert_close(found, expected)
    assert found[0]["w"].sharding.mesh == layout.mesh
    assert found[0]["w"].dtype == np.float32
    assert found[0]["count"].dtype == np.int32


def normalised(hlo):
    """Returns the text of a program without names and places in the source."""
    hlo = re.sub(r", metadata=\{[^}]*\}", "", hlo)
    hlo = re.sub(r"(HloModule|ENTRY) [^ ,]+", r"\1", hlo)
    hlo = re.sub(r"\n(FileNames|FunctionNames|FileLocations|StackFrames)\n(\d.*\n)*", "\n", hlo)
    numbers = {}

    def numbered(match):
        return numbers.setdefault(match.group(), f"%{len(numbers)}")

    return re.sub(r"%[\w.\-]+", numbered, hlo)


def test_the_program_is_that_of_a_hand_written_shard_map():
    layout = layout_of(4, 1)
    lifted = de.lift(step, layout=layout, in_specs=SPECS, donate_argnums=0)
    by_hand = jax.jit(
        jax.shard_map(
            jax.vmap(step, in_axes=(0, None, None)),
            mesh=layout.mesh,
            in_specs=(P("ensemble"), P("data"), P()),
            out_specs=P("ensemble"),
            check_vma=False,
        ),
        donate_argnums=0,
    )
    arguments = (members_on(layout), layout.put(BATCH_OF_ALL), layout.put(RATE, "shared"))
    found, expected = (
        normalised(each.lower(*arguments).compile().as_text()) for each in (lifted, by_hand)
    )
    assert "all-reduce" not in found
    assert "input_output_alias" in found
    assert found == expected


def test_a_member_is_made_from_its_own_key_as_in_an_ensemble():
    network = de.as_member(init=lambda key: init(key)["w"], apply=lambda w, x: x @ w)
    ensemble = de.Ensemble(network, optax.sgd(0.1), lambda *_: None, num_members=MEMBERS)
    of_ensemble = ensemble.init(None).params
    for mesh in ((1, 1), (4, 2)):
        layout = layout_of(*mesh)
        members = members_on(layout)
        for number in range(MEMBERS):
            one = init(jax.random.fold_in(member_key(0, number), INIT))
            np.testing.assert_allclose(members["w"][number], one["w"], rtol=1e-6)
            np.testing.assert_allclose(members["w"][number], of_ensemble[number], rtol=1e-6)
        sharding = layout.sharding(P("ensemble"))
        assert members["w"].sharding.is_equivalent_to(sharding, 2)


@pytest.mark.slow
def test_members_have_different_keys():
    keys = layout_of(4, 2).member_keys(5)
    expected = [jax.random.fold_in(jax.random.key(5), number) for number in range(MEMBERS)]
    found = jax.random.key_data(keys)
    np.testing.assert_array_equal(found, jax.random.key_data(jnp.stack(expected)))
    # A function of one member takes its own key.
    draw = de.lift(jax.random.normal, layout=layout_of(4, 2), in_specs=("members",))
    assert len(set(draw(keys).tolist())) == MEMBERS


def late(w, x):
    """The sum of an array, computed after many products of another, and these products."""
    for _ in range(30):
        w = jnp.tanh(w @ w)
    return w, x.sum() + 0 * w.sum()


SQUARE = np.ones((1, 400, 400), np.float32)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("spec", ["batch", "shared"])
def test_a_buffer_may_be_filled_again_after_a_call(spec, devices):
    layout = layout_of(1, devices, num_members=1)
    lifted = de.lift(late, layout=layout, in_specs=("members", spec))
    w, buffer = layout.put(SQUARE, "members"), np.ones((4096, 8), np.float32)
    lifted(w, buffer)  # It compiles.
    for _ in range(3):
        buffer[:] = 1
        _, total = lifted(w, buffer)
        buffer[:] = 7
        assert total == 4096 * 8


@pytest.mark.parametrize("execution", ["vmap", "loop"])
def test_a_call_on_several_columns_of_a_cpu_waits_for_the_one_before(execution):
    # With many calls under way, the threads of the devices may wait for each other for ever.
    layout = layout_of(1, 2, num_members=1)
    lifted = de.lift(late, layout=layout, in_specs=("members", "batch"), execution=execution)
    x = layout.put(np.ones(2, np.float32), "batch")
    first, _ = lifted(layout.put(SQUARE, "members"), x)
    for _ in range(3):
        last, _ = lifted(first, x)
        assert first.is_ready()
        first = last


def test_arguments_are_checked_at_every_call():
    layout = layout_of(1, 1, num_members=2)
    of_sums = lambda w, batch: w * batch["x"].sum() * batch["y"].sum()  # noqa: E731
    lifted = de.lift(of_sums, layout=layout, in_specs=("members", "batch"))
    w, x = np.ones(2, np.float32), np.ones(4, np.float32)
    assert lifted(w, {"x": x, "y": x}).tolist() == [16, 16]
    with pytest.raises(UserError, match=r"Argument 0 has the shape \[3\]"):
        lifted(np.ones(3, np.float32), {"x": x, "y": x})
    assert lifted(w, {"x": x, "y": x[:3]}).tolist() == [12, 12]  # Rows need not be as many.
    with pytest.raises(UserError, match="1099511627776"):
        lifted(w, {"x": x, "y": np.full(4, 2**40)})
    with pytest.raises(UserError, match="as in_specs has specs, 2: got 1"):
        lifted(w)


def test_a_result_may_have_fewer_axes_than_its_spec_on_a_data_axis():
    specs = {"in_specs": ("members", "batch"), "out_specs": "member_batch"}
    layout = de.Layout.make(4, ensemble_axis=2, devices=jax.devices()[:4])
    sums = de.lift(lambda w, x: (w * x).sum(), layout=layout, **specs)
    found = sums(np.arange(4, dtype=np.float32), np.ones(2, np.float32))
    np.testing.assert_array_equal(found, [0, 2, 4, 6])
