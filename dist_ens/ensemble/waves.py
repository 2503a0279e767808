"""Training in waves, for members that do not fit on the devices together.

A wave has the same number of members of every device. The members of one wave are on the devices,
the others wait in the hosts' memory. One compiled program trains all waves, and the results are
those of training without waves.
"""

import dataclasses
from collections.abc import Callable

import jax

from dist_ens.ensemble.batches import CallBatches, MemberBatches
from dist_ens.ensemble.update_steps import Update
from dist_ens.ground.state import State
from dist_ens.ground.types import Inputs, Metrics, PyTree, Specs, Tree
from dist_ens.layout import MEMBER_METRICS, MEMBERS, Waves, copied_off_devices


def update_in_waves(waves: Waves, update: Update) -> Update:
    """Returns the update of members that wait in the hosts' memory, from that of one wave."""

    def update_all(state: State, batches: CallBatches | PyTree) -> tuple[State, Metrics]:
        states, metrics = [], []
        for number in range(waves.count):
            of_wave, metrics_of_wave = update(
                waves.take(state, number), batches_of_wave(waves, batches, number)
            )
            states.append(copied_off_devices(of_wave))
            del of_wave  # The next wave needs its memory.
            metrics.append(metrics_of_wave)
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        return waves.join(states, MEMBERS), waves.join(metrics, MEMBER_METRICS)

    return update_all


def results_in_waves(
    waves: Waves, fn: Callable[[State, Inputs], Tree], spec: Specs
) -> Callable[[State, Inputs], Tree]:
    """Returns a function of members in the hosts' memory, from that of one wave's members."""

    def results_of_all(state: State, inputs: Inputs) -> Tree:
        of_waves = [fn(waves.take(state, number), inputs) for number in range(waves.count)]
        return waves.join(of_waves, spec)

    return results_of_all


def batches_of_wave(
    waves: Waves, batches: CallBatches | PyTree, number: int
) -> CallBatches | PyTree:
    """Returns the batches of one wave's members from the batches of all members."""
    if not isinstance(batches, MemberBatches):
        return batches
    return dataclasses.replace(
        batches,
        examples=waves.take(batches.examples, number),
        index=waves.take(batches.index, number),
    )
