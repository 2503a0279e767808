"""The order of the examples, and the two ways in which they come: the same members."""

import threading
from functools import partial

import jax
import numpy as np
import optax
import pytest

import networks
from dist_ens.data import ArraySplit, Source, Spec, permuted
from dist_ens.data.feed import Placement, ShardedFeed, TrainingSet, feed
from dist_ens.ensemble import Batches, Drawn, Ensemble, MemberBatches
from dist_ens.evaluation import evaluate
from dist_ens.ground.errors import UserError
from dist_ens.layout import BATCH, BATCHES, Layout, redistribution_program
from dist_ens.losses import batch_mean, categorical
from dist_ens.members import as_member
from dist_ens.methods import bootstrap
from dist_ens.plan import collectives
from dist_ens.sampling import Order
from dist_ens.training import fit
from marked import long

SAME = partial(jax.tree.map, np.testing.assert_array_equal)
NEAR = partial(jax.tree.map, partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6))
COUNT = 40  # examples; not a multiple of the batch of 16, so that batches lie across epochs


class ReadLate(ArraySplit):
    in_memory = False


def source(kind=ArraySplit, count=COUNT):
    _, inputs, label_shape = networks.mlp()
    examples = networks.batches_for(inputs, label_shape, count)
    split = kind(examples["inputs"][:, 0], examples["labels"][:, 0])
    return Source(Spec(inputs.shape[1:], "float32", (), networks.CLASSES), split, split)


def columns_of(count):
    """A mesh of one row, over whose columns a split is divided."""
    return Layout.make(4, ensemble_axis=1, devices=jax.devices()[:count])


def calls_of(kind, layout, *, count=COUNT, per_member=False, **options):
    order = Order(count, networks.BATCH, per_member=per_member)
    options = {"seed": 3, "first_step": 0, "last_step": 7, "steps_per_call": 3} | options
    return feed(source(kind, count).train, order, layout, **options)


def trained(kind, mesh=(4, 2), execution="vmap", *, waves=1, methods=(), **of_calls):
    layout = Layout.make(4, ensemble_axis=mesh[0], devices=jax.devices()[: mesh[0] * mesh[1]])
    member, inputs, _ = networks.mlp()
    how = {"execution": execution, "waves": waves, "methods": methods}
    ensemble = networks.ensemble_of(member, networks.SGD, layout, **how)
    born = networks.born_on(layout, networks.mlp) if waves == 1 else None
    state = born or networks.begin(ensemble, inputs)
    calls = list(calls_of(kind, layout, **of_calls))
    for batches in calls:
        state, _ = ensemble.update_steps(state, batches)
    return jax.device_get(state.params), calls


def examples_of(order, steps, seed=0, member=0):
    """The examples [steps, batch] of a member in some steps."""
    return order.indices(
        order.cursor(seed, steps), np.arange(order.global_batch_size), np.int32([member])
    )


@pytest.mark.quick
@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 23, 1437])
@pytest.mark.parametrize("per_member", [False, True])
def test_an_epoch_is_every_example_once_in_another_order_each_time(count, per_member):
    order = Order(count, 1, per_member=per_member)
    epochs = examples_of(order, range(3 * count), member=7).reshape(3, count)
    assert (np.sort(epochs) == np.arange(count)).all()
    if count > 5:
        assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.quick
def test_a_batch_may_lie_in_two_epochs_and_is_the_same_however_long_the_run():
    one, four = Order(10, 1), Order(10, 4)
    of_one, of_four = examples_of(one, range(20), 5), examples_of(four, range(5), 5)
    np.testing.assert_array_equal(of_four.ravel(), of_one.ravel())
    # Step 10**12 of 10 examples by 4: positions 4 * 10**12 and on, so epoch 4 * 10**11, offset 0.
    assert four.cursor(5, range(10**12, 10**12 + 2))[:, 2].tolist() == [0, 4]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("order", "epochs", "steps"),
    [
        (Order(129, 128), 10, 11),  # 1290 / 128 = 10.08
        (Order(100, 32), 3, 10),  # 300 / 32 = 9.4
        (Order(128, 128), 3, 3),
        (Order(10, 4), 0.5, 2),  # 5 / 4
        (Order(10, 4), 1e-9, 1),
        (Order(100, 4), 2.2, 55),  # 220 / 4, while 2.2 * 25 > 55 in floating point
        # Each member leaves out 25 of 100: 2 * 75 / 16 = 9.4.
        (Order(100, 16, per_member=True, num_folds=4), 2, 10),
        (Order(50, 20, per_member=True, num_groups=3), 2, 5),  # 2 * 50 / 20
    ],
)
def test_the_steps_of_some_epochs_are_those_that_their_examples_fill(order, epochs, steps):
    assert order.num_steps(epochs) == steps


@pytest.mark.quick
def test_the_order_is_one_of_seed_epoch_and_member_and_stays_what_it_was():
    order, own = Order(10, 10), Order(10, 10, per_member=True)
    first = examples_of(order, range(2)).tolist()
    assert first == [[4, 8, 1, 5, 2, 7, 9, 0, 3, 6], [6, 9, 5, 7, 0, 1, 3, 2, 8, 4]]
    of_seed = examples_of(order, range(1), seed=1).tolist()
    of_members = [examples_of(own, range(1), member=i).tolist() for i in range(3)]
    assert len({str(x) for x in (*of_members, first[:1], of_seed)}) == 5


@pytest.mark.quick
def test_a_split_is_no_longer_than_an_order_can_mix():
    assert examples_of(Order(2**30, 8), range(1)).max() < 2**30
    with pytest.raises(UserError, match="has 1,073,741,825 examples, and a split can have at most"):
        Order(2**30 + 1, 8)


def test_every_order_of_the_examples_is_as_likely_as_any_other():
    # 20,000 epochs of 16 examples. Counts of (position, example), and of the example that follows
    # another, are near chi-squared with as many degrees of freedom as given; 5 sigma.
    count, epochs = 16, 20_000
    stream = examples_of(Order(count, count), range(epochs))
    at = np.array([np.bincount(stream[:, p], minlength=count) for p in range(count)])
    steps = np.bincount(((stream[:, 1:] - stream[:, :-1]) % count).ravel(), minlength=count)[1:]
    for counts, freedom in ((at, (count - 1) ** 2), (steps, count - 2)):
        expected = counts.mean()
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert abs(chi_squared - freedom) < 5 * np.sqrt(2 * freedom)


WAYS = ("vmap", "unroll", "loop", "map+single")


@pytest.mark.parametrize(
    ("execution", "mesh"),
    [
        *zip(WAYS, [(4, 2), (1, 4)] * 2, strict=True),
        *long(*zip(WAYS, [(1, 4), (4, 2)] * 2, strict=True)),
    ],
)
def test_drawn_on_the_device_and_streamed_are_the_same_examples(mesh, execution):
    # A split that is read late is kept on the device only where the run needs as much of it: 2
    # steps of 16 are less than 40.
    drawn, calls = trained(ArraySplit, mesh, execution, last_step=2)
    streamed, other_calls = trained(ReadLate, mesh, execution, last_step=2)
    assert isinstance(calls[0], Drawn)
    assert isinstance(other_calls[0], Batches)
    SAME(drawn, streamed)
    assert isinstance(next(calls_of(ReadLate, columns_of(1), last_step=3)), Drawn)


def test_members_with_orders_of_their_own_are_what_they_are_alone():
    own = {"per_member": True, "last_step": 6}  # Two calls of one length: one program each.
    together, _ = trained(ArraySplit, **own)
    for mesh, execution in (((2, 1), "unroll"), ((1, 2), "loop"), ((1, 1), "chunk:2")):
        other, _ = trained(ArraySplit, mesh, execution, **own)
        NEAR(together, other)
    shared, _ = trained(ArraySplit, last_step=6)
    assert not np.allclose(jax.tree.leaves(shared)[-1], jax.tree.leaves(together)[-1], atol=1e-4)


@pytest.mark.parametrize(
    ("mesh", "execution", "waves"),
    [
        *[((2, 2), "loop", 1), ((2, 2), "vmap", 2)],
        *long(((4, 2), "vmap", 1), ((1, 4), "map+single", 1)),
    ],
)
def test_members_are_sent_their_own_if_all_do_not_fit(monkeypatch, mesh, execution, waves):
    asked = {"per_member": True, "waves": waves}
    drawn, calls = trained(ArraySplit, mesh, execution, **asked)
    assert isinstance(calls[0], Drawn)
    # 40 examples of 12 floats and a label, 52 bytes each: 2,080 bytes, a quarter of 8,320.
    monkeypatch.setattr(Layout, "free_bytes", lambda layout: 8_319)
    said = []
    sent, calls = trained(ArraySplit, mesh, execution, **asked, say=said.append)
    assert isinstance(calls[0], MemberBatches)
    SAME(drawn, sent)
    # A batch of 16 for each of four members: 16 * 52 * 4 = 3,328 bytes, 0.00317 MiB.
    [sentence] = said
    assert "hosts send 0.00317 MiB per step, 4 times" in sentence


# Of 42 examples of 12 floats and a label, 52 bytes, a column of four has 11, and of those and a
# call of 48 it is dealt 23 at most, each with its place: 11 * 52 + 23 * 56 bytes.
OF_42_DIVIDED = 1_860


@pytest.mark.parametrize(
    ("free_bytes", "columns", "per_member", "place"),
    [
        (4 * 2_184, 4, False, Placement.REPLICATED),
        (4 * 2_184 - 1, 4, False, Placement.SHARDED),
        (4 * OF_42_DIVIDED, 4, False, Placement.SHARDED),
        (4 * OF_42_DIVIDED - 1, 4, False, Placement.STREAMED),
        (4 * 2_184 - 1, 4, True, Placement.STREAMED),
        (4 * 2_184 - 1, 1, False, Placement.STREAMED),
    ],
)
def test_a_split_goes_where_there_is_room(free_bytes, columns, per_member, place):
    order = Order(42, 16, per_member=per_member)
    assert TrainingSet(order, 52, 48).place_on(columns_of(columns), free_bytes) is place


@pytest.fixture
def deals(monkeypatch):
    """The steps of each deal of a split, which has room only where it is divided over 4 columns."""
    monkeypatch.setattr(Layout, "free_bytes", lambda layout: 4 * OF_42_DIVIDED)
    dealt = []

    class Told(ShardedFeed):
        def __call__(self, steps):
            before = self._steps
            batches = super().__call__(steps)
            if self._steps != before:
                dealt.append(self._steps)
            return batches

    monkeypatch.setattr("dist_ens.data.feed.ShardedFeed", Told)
    return dealt


@pytest.mark.parametrize("is_streamed", [False, *long(True)])
def test_members_with_other_ids_see_their_own_examples(monkeypatch, is_streamed):
    if is_streamed:
        monkeypatch.setattr(Layout, "free_bytes", lambda layout: 0)
    options = {"order": permuted(), "batch_size": networks.BATCH, "steps_per_call": 2}

    def state_of(**members):
        parts = networks.mlp()[0], networks.SGD, categorical(networks.CLASSES)
        ensemble = Ensemble(*parts, execution="loop", seed=3, **members)
        return fit(ensemble, source(), steps=4, progress=False, **options).state

    few = state_of(num_members=2, member_ids=[5, 2])
    whole = state_of(num_members=6).select([5, 2])
    NEAR(few.params, whole.params)


@pytest.mark.parametrize("first_step", [0, 2])
@pytest.mark.parametrize(
    ("steps_per_call", "steps_of_deal"),
    [(1, 3), (2, 4), (3, 3)],  # of 42 examples by 16, an epoch begins at every third step
)
def test_batches_of_a_divided_split_are_those_that_are_streamed(
    monkeypatch, deals, steps_per_call, steps_of_deal, first_step
):
    asked = {"steps_per_call": steps_per_call, "first_step": first_step, "last_step": 13}
    divided = [*calls_of(ArraySplit, columns_of(4), count=42, **asked)]
    # A deal is an epoch of whole calls; where a run goes on within a call, it ends within one too.
    assert {len(steps) for steps in deals} == {steps_of_deal}
    assert deals[0].start == first_step
    assert len(deals) <= -(-(13 - first_step) // steps_of_deal) + (steps_per_call > 1)
    monkeypatch.setattr(Layout, "free_bytes", lambda layout: 0)
    streamed = [*calls_of(ArraySplit, columns_of(4), count=42, **asked)]
    assert sum(len(batches.index) for batches in divided) == 13 - first_step
    for batches, others in zip(divided, streamed, strict=True):
        assert isinstance(batches, Batches)
        assert batches.examples["inputs"].sharding == others.examples["inputs"].sharding
        SAME(batches, others)


@pytest.mark.parametrize(
    ("execution", "how"),
    [
        ("vmap", {"methods": [bootstrap()]}),  # It weighs examples by their places in the split.
        ("vmap", {"waves": 2}),
        *long(("vmap", {}), ("loop", {}), ("map+single", {})),
    ],
)
def test_members_are_the_same_where_the_split_is_divided(monkeypatch, deals, execution, how):
    dealt, _ = trained(ArraySplit, (2, 4), execution, **how)
    assert deals
    monkeypatch.undo()
    drawn, calls = trained(ArraySplit, (2, 4), execution, **how)
    assert isinstance(calls[0], Drawn)
    SAME(drawn, dealt)


def test_a_divided_split_is_dealt_out_over_the_data_axis_only_and_is_nowhere_whole():
    layout = Layout.make(4, ensemble_axis=2, devices=jax.devices())
    split = source(count=4_096).train.take(np.arange(4_096))
    parts = layout.put(split, BATCH)
    indices = layout.put(np.arange(4_096, dtype=np.int32).reshape(64, 64), BATCHES)
    compiled = redistribution_program(layout).lower(parts, indices).compile()
    crossing = collectives(compiled.as_text(), layout.mesh.device_ids)
    assert {(each.kind, each.axis) for each in crossing} == {("collective-permute", "data")}
    # Its part, its batches and what passes, which comes while the one before is looked through.
    memory, part_bytes, index_bytes = compiled.memory_analysis(), 1_024 * 52, 1_024 * 4
    total = sum(getattr(memory, f"{kind}_size_in_bytes") for kind in ("argument", "output", "temp"))
    assert total < 4.1 * part_bytes + 3 * index_bytes


def test_batches_of_the_next_calls_are_read_while_one_is_trained_on():
    taken = threading.Semaphore(0)

    class Counted(ReadLate):
        def take(self, indices):
            taken.release()
            return super().take(indices)

    calls = calls_of(Counted, columns_of(1), count=200, last_step=12, steps_per_call=1)
    next(calls)
    # Nobody asks for a second call, and yet its batch and a third are read.
    assert all(taken.acquire(timeout=30) for _ in range(3))


KEYS = jax.random.split(jax.random.key(5), 8)


def noise_loss(params, model_state, batch, key):
    noise = jax.vmap(jax.random.normal)(batch["keys"])
    assert batch["keys"].dtype == KEYS.dtype
    return batch_mean(params["w"] * noise * batch["y"]), (model_state, {})


@pytest.mark.parametrize(
    ("door", "waves"),
    [("arrays", 1), ("divided", 1), ("streamed", 1), ("list", 1), ("update", 2), ("evaluate", 1)],
)
def test_typed_keys_in_a_batch_are_typed_keys_in_the_loss(monkeypatch, door, waves):
    member = as_member(init=lambda key, batch: ({"w": jax.numpy.ones(())}, ()))
    how = {"num_members": 4, "layout": columns_of(2), "waves": waves}
    ensemble = Ensemble(member, optax.sgd(0.5), noise_loss, **how)
    data = {"keys": KEYS, "y": np.arange(8, dtype=np.float32)}
    draws = np.array([jax.random.normal(key) for key in KEYS])
    slope = np.mean(draws * data["y"])  # The loss is w * slope, and w is 1 at first.
    if door == "evaluate":
        # Batches of 5 and 3 rows, which weigh as many as they have.
        scores = evaluate(ensemble, ensemble.init(data), data, batch_size=5)
        assert scores.members[3]["loss"] == pytest.approx(slope, rel=1e-5)
        return
    if door in ("divided", "streamed"):
        place = Placement.SHARDED if door == "divided" else Placement.STREAMED
        monkeypatch.setattr(TrainingSet, "place_on", lambda *_: place)
    if door == "update":
        state, _ = ensemble.update(ensemble.init(data), data)
    else:
        given = [data] if door == "list" else data
        state = fit(ensemble, given, steps=1, progress=False).state
    np.testing.assert_allclose(state.params["w"], np.full(4, 1 - 0.5 * slope), rtol=1e-5)
