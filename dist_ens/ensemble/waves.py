"""Members that do not fit on the devices together: a part of them is there at a time.

The others wait in the hosts' memory. A wave is as many of each device's own members; one compiled
program trains all waves, and the members are what they are without waves.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from dist_ens.ensemble.batches import MemberBatches
from dist_ens.layout import MEMBER_METRICS, MEMBERS, Waves

Update = Callable[[Any, Any], tuple[Any, Any]]


def update_in_waves(waves: Waves, update: Update) -> Update:
    """Returns an update of members that are off the devices; see `Ensemble.update_steps`.

    Args:
        waves: Parts of the members.
        update: Update of the members of one wave.
    """

    def update_all(state: Any, batches: Any) -> tuple[Any, Any]:
        states, metrics = [], []
        for number in range(waves.count):
            of_wave, metrics_of_wave = update(
                waves.take(state, number), batches_of_wave(waves, batches, number)
            )
            states.append(waves.off_devices(of_wave))
            del of_wave  # makes room for the next
            metrics.append(metrics_of_wave)
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        return waves.join(states, MEMBERS), waves.join(metrics, MEMBER_METRICS)

    return update_all


def results_in_waves(
    waves: Waves, fn: Callable[[Any, Any], Any], spec: Any
) -> Callable[[Any, Any], Any]:
    """Returns a function of members that are off the devices, such as `Ensemble.outputs`.

    Args:
        waves: Parts of the members.
        fn: Function of the state of one wave's members, and of inputs that all members share.
        spec: Spec of its results, `MEMBERS` or `MEMBER_BATCH`.
    """

    def results_of_all(state: Any, inputs: Any) -> Any:
        of_waves = [fn(waves.take(state, number), inputs) for number in range(waves.count)]
        return waves.join(of_waves, spec)

    return results_of_all


def batches_of_wave(waves: Waves, batches: Any, number: int) -> Any:
    """Returns the batches of one wave from those of all members."""
    if not isinstance(batches, MemberBatches):
        return batches
    return dataclasses.replace(
        batches,
        examples=waves.take(batches.examples, number),
        index=waves.take(batches.index, number),
    )
