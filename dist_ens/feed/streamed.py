"""A training set whose batches the hosts send to the devices."""

from collections.abc import Iterator, Sequence

from dist_ens.data import Split, training_batches
from dist_ens.ensemble import Batches, MemberBatches
from dist_ens.ensemble.batches import CallBatches
from dist_ens.layout import BATCHES, MEMBER_BATCHES, Layout
from dist_ens.sampling import Order


def streamed(
    split: Split,
    order: Order,
    layout: Layout,
    seed: int,
    steps_of_calls: list[range],
    member_ids: Sequence[int],
) -> Iterator[CallBatches]:
    """Yields the batches of each call, which the hosts read and send to the devices.

    Args:
        split: Training examples.
        order: Order of the examples.
        layout: Layout of the mesh.
        seed: Seed of the order, in [0, 2**32).
        steps_of_calls: Steps of each call, in order.
        member_ids: Ids of all members.

    Yields:
        `Batches` of a call, or `MemberBatches` if each member has its own order.
    """
    for examples, index in training_batches(
        split,
        order,
        seed=seed,
        host_rows=layout.host_rows(order.global_batch_size),
        calls=steps_of_calls,
        member_ids=[member_ids[position] for position in layout.host_members],
    ):
        if order.per_member:
            yield MemberBatches(*layout.put((examples, index), MEMBER_BATCHES))
        else:
            yield Batches(*layout.put((examples, index), BATCHES))
