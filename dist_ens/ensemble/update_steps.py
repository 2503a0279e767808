"""The update: several steps of all members in one call, at once or in waves.

A wave has the same number of members of every device. The members of one wave are on the devices,
the others wait in the hosts' memory. One compiled program trains all waves, and the results are
those of training without waves.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from dist_ens.ensemble.batches import (
    Batches,
    CallBatches,
    Drawn,
    MemberBatches,
    as_batches,
    located,
    one_step,
    specs_of,
    steps_in,
)
from dist_ens.execution.apply import lowered
from dist_ens.execution.heuristics import ONE_BY_ONE, by_rule
from dist_ens.execution.lift import sharded
from dist_ens.execution.loop import Loop, of_one_state
from dist_ens.execution.lowerings import CONVOLUTION
from dist_ens.execution.rewrite import contains
from dist_ens.execution.spec import Execution
from dist_ens.ground.shared import NOTHING_SHARED, Shared
from dist_ens.ground.state import State
from dist_ens.ground.types import Batch, Inputs, Metrics, PyTree, Specs, Structure, Tree
from dist_ens.layout import (
    BATCHES,
    MEMBER_BATCHES,
    MEMBER_METRICS,
    MEMBERS,
    REPLICATED,
    Layout,
    Waves,
    copied_off_devices,
    data_index,
    in_turn,
    put_numbers,
)

# step(state, batch, index, shared) -> (state, metrics), of one member.
Step = Callable[[State, Batch, jax.Array | None, Shared], tuple[State, Metrics]]
# update(state, batches) -> (state, metrics), of all members and several steps.
Update = Callable[[State, CallBatches | PyTree], tuple[State, Metrics]]


def steps_of_all(step: Step, layout: Layout, given: Execution) -> Update:
    """Returns the update of several steps, not yet jitted. Metrics are float32[steps, members]."""

    def update(state: State, batches: CallBatches | PyTree) -> tuple[State, Metrics]:
        plain = steps_of_all(step, layout, ONE_BY_ONE)
        execution = by_rule(given, layout, lambda: jax.make_jaxpr(plain)(state, batches))
        batches = as_batches(batches)
        # The inner jit traces the step once, however many members and steps call it.
        update_once = jax.jit(lowered(step, execution, layout), inline=True)
        count = steps_in(batches)

        def over_steps(
            state: State,
            per_step: PyTree,
            shared: Shared,
            batch_of: Callable[[PyTree], tuple[Batch, jax.Array | None]],
        ) -> tuple[State, Metrics]:
            def update_one(state: State, at: PyTree) -> tuple[State, Metrics]:
                return update_once(state, *batch_of(at), shared)

            def at_step(number: int) -> PyTree:
                return jax.tree.map(lambda leaf: leaf[number], per_step)

            # A loop over steps in that over members would hide what all members share.
            is_hidden = not shared.is_empty and execution.members != "vmap"
            scans = not is_hidden or execution.steps == "scanned"
            if scans and _scans(execution, layout, count, update_one, state, at_step(0)):
                return jax.lax.scan(update_one, state, per_step)
            metrics = []
            for number in range(count):
                state, metrics_of_step = update_one(state, at_step(number))
                metrics.append(metrics_of_step)
            return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *metrics)

        def of_given(state: State, batches: Batches | MemberBatches) -> tuple[State, Metrics]:
            per_step = dataclasses.replace(batches, shared=NOTHING_SHARED)
            return over_steps(state, per_step, batches.shared, lambda at: (at.examples, at.index))

        def of_drawn(
            state: State, split: PyTree, indices: jax.Array, shared: Shared
        ) -> tuple[State, Metrics]:
            def batch_of(at: jax.Array) -> tuple[Batch, jax.Array]:
                drawn = jax.tree.map(lambda leaf: leaf.at[at].get(mode="promise_in_bounds"), split)
                return drawn, at

            return over_steps(state, indices, shared, batch_of)

        out_specs = (MEMBERS, MEMBER_METRICS)
        if not isinstance(batches, Drawn):
            program = sharded(of_given, layout, (MEMBERS, specs_of(batches)), out_specs, execution)
            return program(state, batches)
        of_indices = MEMBER_BATCHES if batches.order.per_member else BATCHES
        indices = layout.shard_map(
            lambda ids, cursor: located(
                Drawn(None, cursor, batches.order), ids, layout, data_index()
            ),
            in_specs=(MEMBERS, REPLICATED),
            out_specs=of_indices,
        )(state.member_id, batches.cursor)
        in_specs = (MEMBERS, REPLICATED, of_indices, REPLICATED)
        program = sharded(of_drawn, layout, in_specs, out_specs, execution)
        return program(state, batches.split, indices, batches.shared)

    return update


def dispatched(step: Step, layout: Layout, execution: Execution, *, of_one: bool = False) -> Update:
    """Returns the update of several steps, as one or more programs. It donates the state.

    `of_one` says that the state is that of one member, without a members axis.
    """
    if execution.members == "loop":
        return _each_member(step, layout, execution)
    if execution.steps == "single":
        return _each_step(step, layout, execution, of_one=of_one)
    update = steps_of_all(step, layout, execution)
    return in_turn(layout, jax.jit(of_one_state(update) if of_one else update, donate_argnums=0))


class WithShared:
    """An update that adds the arrays that all members share to the batches of each call."""

    def __init__(self, update: Update, add: Callable[[CallBatches | PyTree], CallBatches]) -> None:
        self._update, self._add = update, add
        if hasattr(update, "lower"):
            self.lower = lambda state, batches: update.lower(state, add(batches))

    def __call__(self, state: State, batches: CallBatches | PyTree) -> tuple[State, Metrics]:
        """Returns the new state and the metrics."""
        return self._update(state, self._add(batches))


def _each_member(step: Step, layout: Layout, execution: Execution) -> Update:
    """Returns the update as a program of one member, dispatched for each member."""
    alone = dataclasses.replace(execution, members="unroll")
    loops: dict[tuple[type, Structure], Loop] = {}

    def update(state: State, batches: CallBatches | PyTree) -> tuple[State, Metrics]:
        batches = as_batches(batches)
        kind = (type(batches), jax.tree.structure(batches))
        if kind not in loops:
            loops[kind] = Loop(
                layout,
                (MEMBERS, specs_of(batches)),
                (MEMBERS, MEMBER_METRICS),
                lambda of_row, of_one: dispatched(step, of_row, alone, of_one=of_one),
                in_place=True,
            )
        return loops[kind](state, batches)

    return update


def _each_step(step: Step, layout: Layout, execution: Execution, *, of_one: bool) -> Update:
    """Returns the update as a program of one step, dispatched for each step of a call."""
    of_some = steps_of_all(step, layout, execution)

    def at(state: State, batches: CallBatches, number: jax.Array) -> tuple[State, Metrics]:
        return of_some(state, one_step(batches, number))

    update_one = in_turn(layout, jax.jit(of_one_state(at) if of_one else at, donate_argnums=0))

    @jax.jit
    def in_order(metrics: list[Metrics]) -> Metrics:
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *metrics)

    numbers: list[jax.Array] = []

    def update(state: State, batches: CallBatches | PyTree) -> tuple[State, Metrics]:
        batches = as_batches(batches)
        count, metrics = steps_in(batches), []
        if len(numbers) < count:
            numbers[:] = put_numbers(layout, count)
        for number in numbers[:count]:
            state, metrics_of_step = update_one(state, batches, number)
            metrics.append(metrics_of_step)
        return state, in_order(metrics)

    return update


def _scans(
    execution: Execution,
    layout: Layout,
    count: int,
    update_one: Callable[[State, PyTree], tuple[State, Metrics]],
    state: State,
    at: PyTree,
) -> bool:
    """Returns whether the steps of a call are a loop (`while`) inside the program.

    On a CPU, the gradient of a convolution's weights runs 20 to 50 times slower inside such a loop,
    unless the convolution's layout is canonical.
    """
    if count == 1 or execution.steps is not None:
        return count > 1 and execution.steps == "scanned"
    if layout.platform != "cpu" or "canonical" in execution.lowerings:
        return True
    return not contains(jax.make_jaxpr(update_one)(state, at), CONVOLUTION)


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
