"""Members that do not fit together: a part of them on the devices at a time, the rest beside.

The rest wait in the hosts' memory. A wave is as many members of each device's own, one compiled
program trains them all, and the members are what they are without waves.
"""

from collections.abc import Callable
from typing import Any

import jax

from dist_ens.ensemble.batches import by_member, with_members
from dist_ens.layout import MEMBER_BATCH, MEMBER_METRICS, MEMBERS, Waves

Update = Callable[[Any, Any], tuple[Any, Any]]
Predict = Callable[[Any, Any], jax.Array]


def update_in_waves(waves: Waves, update: Update) -> Update:
    """An update of members that are off the devices; see `Ensemble.update`.

    Args:
        waves: The members' parts.
        update: Of the members of one wave.
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


def predict_in_waves(waves: Waves, predict: Predict) -> Predict:
    """A prediction of members that are off the devices; see `Ensemble.predict`.

    Args:
        waves: The members' parts.
        predict: Of the members of one wave.
    """

    def predict_all(state: Any, inputs: jax.Array) -> jax.Array:
        needed = state._replace(opt_state=())  # the optimizer's need not come along
        outputs = [predict(waves.take(needed, number), inputs) for number in range(waves.count)]
        return waves.join(outputs, MEMBER_BATCH)

    return predict_all


def batches_of_wave(waves: Waves, batches: Any, number: int) -> Any:
    """What the update of one wave is given, of what all members are."""
    own, shared = by_member(batches)
    return with_members(waves.take(own, number), shared)
