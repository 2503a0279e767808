"""The batches of each call of a run, for every placement of its training set."""

from collections.abc import Callable, Iterator, Sequence

from dist_ens.data import Split, calls, example_bytes_of, training_batches
from dist_ens.data.feed.on_devices import ResidentFeed, ShardedFeed, put_whole
from dist_ens.data.feed.placement import Placement, TrainingSet
from dist_ens.ensemble import Batches, MemberBatches
from dist_ens.ensemble.batches import CallBatches
from dist_ens.layout import BATCHES, MEMBER_BATCHES, Layout
from dist_ens.processes import cluster
from dist_ens.sampling import Order


def feed(
    split: Split,
    order: Order,
    layout: Layout,
    *,
    seed: int,
    first_step: int,
    last_step: int,
    steps_per_call: int,
    member_ids: Sequence[int] | None = None,
    say: Callable[[str], None] = lambda sentence: None,
) -> Iterator[CallBatches]:
    """Returns an iterator over the batches that `Ensemble.update_steps` takes.

    A split that fits is kept on the devices, see `Placement`. Any other split is streamed. So is a
    split that `TrainingSet.is_worth_keeping` finds too large for the run.

    The orders of members depend on their ids, by default their positions. `say` prints a sentence
    if a split is streamed whose members have their own orders: the hosts then send much data.
    """
    steps_of_calls = calls(first_step, last_step, steps_per_call)
    example_bytes = example_bytes_of(split)
    training_set = TrainingSet(order, example_bytes, steps_per_call * order.global_batch_size)
    place = Placement.STREAMED
    if training_set.is_worth_keeping(
        in_memory=split.in_memory, last_step=last_step, batch_size=order.global_batch_size
    ):
        place = training_set.place_on(layout, layout.free_bytes())
    place = Placement(cluster.as_main_sees(place))
    if place is Placement.REPLICATED:
        return map(ResidentFeed(put_whole(split, layout), order, layout, seed), steps_of_calls)
    if place is Placement.SHARDED:
        return map(ShardedFeed(split, order, layout, seed, steps_per_call), steps_of_calls)
    if order.per_member:
        step_bytes = order.global_batch_size * example_bytes * layout.num_members
        say(
            "Each member has its own order, and the training set does not fit on a device. So the "
            f"hosts send {step_bytes / 2**20:.3g} MiB per step, {layout.num_members} times as much "
            "as with one order for all members."
        )
    ids = range(layout.num_members) if member_ids is None else member_ids
    return _streamed(split, order, layout, seed, steps_of_calls, ids)


def _streamed(
    split: Split,
    order: Order,
    layout: Layout,
    seed: int,
    steps_of_calls: list[range],
    member_ids: Sequence[int],
) -> Iterator[CallBatches]:
    """Yields the batches of each call, which the hosts read and send to the devices."""
    for batch in training_batches(
        split,
        order,
        seed=seed,
        host_rows=layout.host_rows(order.global_batch_size),
        calls=steps_of_calls,
        member_ids=[member_ids[position] for position in layout.host_members],
    ):
        if order.per_member:
            yield MemberBatches(*layout.put(batch, MEMBER_BATCHES))
        else:
            yield Batches(*layout.put(batch, BATCHES))
