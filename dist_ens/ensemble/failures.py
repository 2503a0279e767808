"""Failed updates of a member: their detection on the device, and their record."""

from collections.abc import Callable
from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ensemble.conditional_update import Updated, apply_update
from dist_ens.ensemble.failure_policy import FailurePolicy
from dist_ens.ground.state import State
from dist_ens.ground.types import Gradients, Metrics, PyTree
from dist_ens.layout import to_host

# Names of the metrics of an ensemble whose updates are checked.
FAILED_UPDATES, IS_FROZEN = "failed_updates", "is_frozen"
# Causes of a failed update, by the number that a `FailureRecord` holds.
CAUSES = (
    "none",
    "the loss is not finite",
    "the gradient is not finite",
    "the loss is far above its running mean",
    "the new state is not finite",
)
_LOSS, GRADIENT, _THRESHOLD, NEW_STATE = range(1, 5)
# Failed updates in a row after which the policy `skip` freezes a member.
MOST_SKIPPED_IN_A_ROW = 100
# Losses before which the threshold is not used, and after which older losses count less.
HISTORY = 100
# Smallest standard deviation of losses, relative to their mean: some roundings of float32.
_LEAST_DEVIATION = 1e-6
# Largest deviation of a loss that enters the variance. Its square is below the largest float32.
_MOST_DEVIATION = 1e18


class FailureRecord(NamedTuple):
    """The failed updates of a member. In an ensemble, every leaf has a leading members axis.

    Attributes:
        is_frozen: Whether the member takes no more updates, bool[].
        num_failures: Number of failed updates, int32[].
        num_in_a_row: Number of failed updates since the last one that did not fail, int32[]. It is
            0 for a frozen member.
        cause: Cause of the last failure as an index of `CAUSES`, int32[]; 0 without a failure.
        first_step: Step of the first failed update, int32[]; 0 without a failure. The update from
            step 49 to step 50 is that of step 50.
        last_step: Step of the last failed update, int32[]; 0 without a failure.
        num_losses: Number of losses in the running mean, at most `HISTORY`, int32[].
        loss_mean: Running mean of the losses, float32[].
        loss_variance: Running variance of the losses, float32[].
    """

    is_frozen: jax.Array
    num_failures: jax.Array
    num_in_a_row: jax.Array
    cause: jax.Array
    first_step: jax.Array
    last_step: jax.Array
    num_losses: jax.Array
    loss_mean: jax.Array
    loss_variance: jax.Array


class FailedMember(NamedTuple):
    """A member with a failed update, as files and results name it.

    Attributes:
        member_id: Id of the member.
        cause: Cause of the last failure.
        failed_updates: Number of failed updates. Without a policy it is the number of losses that
            were not finite.
        first_step: Step of the first failed update.
        last_step: Step of the last failed update.
        is_frozen: Whether the member takes no more updates. It is left out of the scores of the
            ensemble then.
    """

    member_id: int
    cause: str
    failed_updates: int
    first_step: int
    last_step: int
    is_frozen: bool = False


def no_failures(shape: tuple[int, ...] = ()) -> FailureRecord:
    """Returns the record of members without a failed update, leaves of the given shape."""
    types = {"is_frozen": jnp.bool_, "loss_mean": jnp.float32, "loss_variance": jnp.float32}
    return FailureRecord(
        *(jnp.zeros(shape, types.get(name, jnp.int32)) for name in FailureRecord._fields)
    )


def taken_unless_failed(
    policy: FailurePolicy,
    update: Callable[..., Updated],
    state: State,
    metrics: Metrics,
    is_finite: jax.Array,
    cause_otherwise: int,
    *args: PyTree,
) -> tuple[State, Metrics]:
    """Returns the state of one member after an update, and the metrics with those of failures.

    If the update failed or the member is frozen, only its record changes. The step stays. An
    update whose numbers are not finite fails with `cause_otherwise`, an index of
    `CAUSES`. An update fails too if its metric "loss" is not finite.
    """
    record, loss = state.failures, metrics.get("loss", jnp.float32(0))
    cause = _cause_of(policy, record, loss, jnp.where(is_finite, 0, cause_otherwise))
    rests = record.is_frozen
    if state.stopping != ():
        rests |= state.stopping.stopped_step >= 0
    takes = (cause == 0) & ~rests
    new = apply_update(update, takes, Updated.of(state), *args)
    record = _recorded(policy, record, state.step + 1, jnp.where(rests, 0, cause))
    if policy.loss_threshold is not None:
        record = _with_loss(record, loss, takes)
    state = new.merged_into(state)._replace(failures=record)
    counts = {FAILED_UPDATES: record.num_failures, IS_FROZEN: record.is_frozen}
    return state, {**metrics, **{n: leaf.astype(jnp.float32) for n, leaf in counts.items()}}


def _cause_of(
    policy: FailurePolicy, record: FailureRecord, loss: jax.Array, cause: jax.Array
) -> jax.Array:
    """Returns why an update failed as an index of `CAUSES`, int32[]; 0 if it did not fail.

    New parameters of an optimizer are not read, which would cost as much as the optimizer. A
    parameter that is not finite makes the next loss or gradient so.
    """
    if policy.loss_threshold is not None:
        # Losses that are all equal have no deviation, and the next one may differ by a rounding.
        least = _LEAST_DEVIATION * jnp.abs(record.loss_mean)
        deviation = jnp.maximum(jnp.sqrt(record.loss_variance), least)
        limit = record.loss_mean + policy.loss_threshold * deviation
        is_far = (record.num_losses >= HISTORY) & (loss > limit)
        cause = jnp.where(is_far, _THRESHOLD, cause)
    return jnp.where(jnp.isfinite(loss), cause, _LOSS).astype(jnp.int32)


def are_finite(grads: Gradients) -> jax.Array:
    """Returns whether all gradients are finite, bool[], in the fastest way of the platform."""
    leaves = [leaf for leaf in jax.tree.leaves(grads) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if not leaves:
        return jnp.bool_(True)
    return jax.lax.platform_dependent(
        leaves, cuda=_are_finite_in_one, rocm=_are_finite_in_one, default=_are_sums_finite
    )


def _are_sums_finite(leaves: list[jax.Array]) -> jax.Array:
    """Returns whether the sums of leaves are finite, bool[]. They are read once, in vectors."""
    sums = [
        leaf.sum(axis=tuple(range(leaf.ndim - 1)), dtype=jnp.promote_types(leaf.dtype, "float32"))
        for leaf in leaves
    ]
    return reduce(jnp.logical_and, [jnp.isfinite(total).all() for total in sums])


def _are_finite_in_one(leaves: list[jax.Array]) -> jax.Array:
    """Returns whether all numbers are finite, bool[], by one kernel for all leaves of a type."""
    of_types: dict[jnp.dtype, list[jax.Array]] = {}
    for leaf in leaves:
        of_types.setdefault(leaf.dtype, []).append(leaf.ravel())
    together = [jnp.concatenate(of_type) for of_type in of_types.values()]
    return reduce(jnp.logical_and, [jnp.isfinite(numbers).all() for numbers in together])


def _recorded(
    policy: FailurePolicy, record: FailureRecord, step: jax.Array, cause: jax.Array
) -> FailureRecord:
    """Returns a record with the update of a step, int32[], and its cause as in `_cause_of`."""
    failed = cause > 0
    num_in_a_row = jnp.where(failed, record.num_in_a_row + 1, 0)
    freezes = failed
    if policy.policy == "skip":
        freezes = num_in_a_row >= MOST_SKIPPED_IN_A_ROW
    return record._replace(
        is_frozen=record.is_frozen | freezes,
        num_failures=record.num_failures + failed,
        num_in_a_row=num_in_a_row,
        cause=jnp.where(failed, cause, record.cause),
        first_step=jnp.where(failed & (record.first_step == 0), step, record.first_step),
        last_step=jnp.where(failed, step, record.last_step),
    )


def _with_loss(record: FailureRecord, loss: jax.Array, takes: jax.Array) -> FailureRecord:
    """Returns a record whose running mean and variance include the loss of an update, if taken.

    The n-th loss has the weight `a = max(1 / n, 1 / HISTORY)`:

        mean' = mean + a (loss - mean),   variance' = (1 - a) (variance + a (loss - mean)^2)
    """
    count = jnp.minimum(record.num_losses, HISTORY - 1) + 1  # Without end it would overflow.
    share = jnp.maximum(1 / count.astype(jnp.float32), 1 / HISTORY)
    delta = loss - record.loss_mean
    clipped = jnp.clip(delta, -_MOST_DEVIATION, _MOST_DEVIATION)
    variance = (1 - share) * (record.loss_variance + share * clipped * clipped)
    return record._replace(
        num_losses=jnp.where(takes, count, record.num_losses),
        loss_mean=jnp.where(takes, record.loss_mean + share * delta, record.loss_mean),
        loss_variance=jnp.where(takes, variance, record.loss_variance),
    )


def frozen_positions(state: State) -> list[int]:
    """Returns the positions of the members that take no more updates; every host calls it."""
    if not isinstance(state.failures, FailureRecord):
        return []
    return np.flatnonzero(to_host(state.failures.is_frozen)).tolist()


def failed_members(state: State) -> list[FailedMember]:
    """Returns what happened to each member with a failed update; every host calls it."""
    if not isinstance(state.failures, FailureRecord):
        return []
    record, member_ids = to_host((state.failures, state.member_id))
    return [
        _member_of(record, position, int(member_ids[position]))
        for position in np.flatnonzero(record.num_failures).tolist()
    ]


def _member_of(record: FailureRecord, position: int, member_id: int) -> FailedMember:
    """Returns what happened to a member at a position in the record of all, in NumPy."""
    return FailedMember(
        member_id,
        CAUSES[record.cause[position]],
        int(record.num_failures[position]),
        int(record.first_step[position]),
        int(record.last_step[position]),
        bool(record.is_frozen[position]),
    )
