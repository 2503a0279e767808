"""Benchmark of an experiment's training on this machine against two hand-written ways."""

import dataclasses
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np

from dist_ens.data import ArraySplit, Source, batch_shapes_of, calls
from dist_ens.data.feed import PART_OF_THE_MEMORY, ResidentFeed, put_whole
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.programs import step_of_one
from dist_ens.ensemble.select_execution import choose
from dist_ens.execution.spec import AUTO
from dist_ens.execution.timing import Candidate, step_ms_of_turns
from dist_ens.experiment.build import layout_for
from dist_ens.experiment.reading import words_of_a_config
from dist_ens.experiment.record import Run
from dist_ens.ground.json_text import JsonDict
from dist_ens.ground.state import State
from dist_ens.ground.types import Batch, Metrics
from dist_ens.layout import BATCH, MEMBER_BATCH, MEMBERS, REPLICATED, Layout, in_turn
from dist_ens.sampling import Order

DIST_ENS, LOOP, VMAP = "dist_ens", "loop", "jit(vmap)"
# Largest factor between the ratios of two rounds for which a comparison is conclusive.
WIDEST = 1.5
_SEED = 0
# Number of steps of a run that is long enough to time all executions that may be worth it.
_RUN_STEPS = 10**6
# Fraction of a device's free memory for the examples. The hand-written ways hold a copy each, which
# on a CPU is in the same memory.
_PART_OF_THE_MEMORY = PART_OF_THE_MEMORY / 4
# Number of steps for which the hand-written ways compute the order of the examples together.
_DRAWN_AT_ONCE = 64


class Updates:
    """The training of dist_ens: the updates of an ensemble, with batches drawn on the device."""

    def __init__(
        self,
        ensemble: Ensemble,
        source: Source,
        order: Order,
        steps_per_call: int,
        *,
        chosen: bool = False,
        may_move: bool = True,
    ) -> None:
        layout = ensemble.layout
        self._draws = ResidentFeed(put_whole(source.train, layout), order, layout, _SEED)
        self._steps_per_call = steps_per_call
        self.state: State = ensemble.init(batch_shapes_of(source.train, order.global_batch_size))
        self.execution = ensemble.execution
        if chosen:
            first = self._draws(range(steps_per_call))
            ensemble, choice = choose(ensemble, self.state, first, _RUN_STEPS, may_move=may_move)
            self.execution = choice.option
        if ensemble.layout is not layout:
            layout = ensemble.layout
            self.state = layout.moved(self.state, MEMBERS)
            self._draws = ResidentFeed(put_whole(source.train, layout), order, layout, _SEED)
        self._update = ensemble.update_steps

    def run(self, num_steps: int) -> None:
        """Trains every member for some more steps, and waits for the last one."""
        for steps in calls(0, num_steps, self._steps_per_call):
            self.state, metrics = self._update(self.state, self._draws(steps))
        jax.block_until_ready((self.state, metrics))


class LoopByHand:
    """A hand-written loop: one member's jitted step, dispatched for each member on one device.

    With waves the device cannot hold all members, so the states of one wave stand for them.
    """

    def __init__(self, ensemble: Ensemble, source: Source, order: Order) -> None:
        self._num_members = ensemble.layout.num_members
        held = self._num_members
        if ensemble.waves > 1:
            held = ensemble.of_wave.layout.members_per_device
        self._per_member = order.per_member
        self._batches = _host_batches(source, order, ensemble)
        self._layout = layout = Layout.make(
            1, devices=ensemble.layout.mesh.devices.ravel()[:1].tolist()
        )
        alone = ensemble.replace(layout=layout, num_members=1, waves=1)
        batch = batch_shapes_of(source.train, order.global_batch_size)
        self.states: list[State] = [
            jax.tree.map(lambda leaf: leaf[0], alone.replace(member_ids=[number]).init(batch))
            for number in range(held)
        ]
        self._step, self._shared = jax.jit(step_of_one(alone), donate_argnums=0), alone.shared

    def run(self, num_steps: int) -> None:
        """Trains every member for some more steps, and waits for the last one."""
        metrics: list[Metrics | None] = [None] * self._num_members
        for batch in itertools.islice(self._batches, num_steps):
            of_all = batch if self._per_member else self._layout.put(batch, "shared")
            for number in range(self._num_members):
                own = of_all
                if self._per_member:
                    own = jax.tree.map(lambda leaf, n=number: leaf[n], batch)
                place = number % len(self.states)
                self.states[place], metrics[number] = self._step(
                    self.states[place], *own, self._shared
                )
        jax.block_until_ready((self.states, metrics))


class VmapByHand:
    """A hand-written `jit(vmap(step))`, with members and batches sharded over the mesh."""

    def __init__(self, ensemble: Ensemble, source: Source, order: Order) -> None:
        layout = ensemble.layout
        self._batches = _host_batches(source, order, ensemble)
        ensemble = ensemble.replace(waves=1)
        members = layout.sharding(MEMBERS)
        batch = layout.sharding(MEMBER_BATCH if order.per_member else BATCH)
        self.state: State = ensemble.init(batch_shapes_of(source.train, order.global_batch_size))
        axis = 0 if order.per_member else None
        step = jax.jit(
            jax.vmap(step_of_one(ensemble), in_axes=(0, axis, axis, None)),
            in_shardings=(members, batch, batch, layout.sharding(REPLICATED)),
            out_shardings=members,
            donate_argnums=0,
        )
        self._step, self._shared = in_turn(layout, step), ensemble.shared

    def run(self, num_steps: int) -> None:
        """Trains every member for some more steps, and waits for the last one."""
        metrics: Metrics | None = None
        for batch in itertools.islice(self._batches, num_steps):
            self.state, metrics = self._step(self.state, *batch, self._shared)
        jax.block_until_ready((self.state, metrics))


def _host_batches(
    source: Source, order: Order, ensemble: Ensemble
) -> Iterator[tuple[Batch, np.ndarray | None]]:
    """Yields batches, [batch, ...] or [members, batch, ...], and the positions of their examples.

    The positions are None unless a method uses them.
    """
    examples = source.train.take(np.arange(len(source.train)))
    # The indices of many steps are computed at once, because they are not part of the measurement.
    member_ids = np.arange(ensemble.layout.num_members, dtype=np.int32)
    rows = np.arange(order.global_batch_size)
    indices_of = jax.jit(lambda cursor: order.member_indices(cursor, rows, member_ids))
    for first in itertools.count(step=_DRAWN_AT_ONCE):
        cursor = order.cursor(_SEED, range(first, first + _DRAWN_AT_ONCE))
        indices = np.asarray(indices_of(cursor))
        for index in indices.swapaxes(0, 1) if order.per_member else indices:
            batch = jax.tree.map(lambda leaf, at=index: leaf[at], examples)
            yield batch, index.astype(np.int32) if ensemble.uses_positions else None


@dataclasses.dataclass(frozen=True)
class Point:
    """The measurements for one number of members.

    Member-examples per second are medians over the rounds. `ratios` are times of another way over
    those of dist_ens in each round. `jit(vmap)` is absent for members in waves.
    """

    num_members: int
    execution: str
    examples_per_second: Mapping[str, float]
    ratios: Mapping[str, list[float]]

    def is_conclusive(self, name: str) -> bool:
        """Returns whether the rounds agree well enough to compare another way with dist_ens."""
        return max(self.ratios[name]) <= WIDEST * min(self.ratios[name])

    def to_dict(self) -> JsonDict:
        """Returns plain data that JSON can hold."""
        conclusive = all(map(self.is_conclusive, self.ratios))
        return dataclasses.asdict(self) | {"conclusive": conclusive}


def with_examples_that_fit(source: Source, layout: Layout) -> Source:
    """Returns a source with as many training examples as all ways can hold in memory.

    A source with several groups is a small table, and is returned as it is.
    """
    room, example_bytes = _PART_OF_THE_MEMORY * layout.free_bytes(), source.spec.example_bytes
    if len(source.train) * example_bytes <= room or source.spec.num_groups > 1:
        return source
    first = source.train.take(np.arange(int(room) // example_bytes))
    return dataclasses.replace(source, train=ArraySplit(first["inputs"], first["labels"]))


@words_of_a_config()
def layouts_to_time(run: Run) -> list[Layout]:
    """Returns layouts for 1, 2, 4, … members that fit the mesh, and for those of the experiment."""
    most, rows = run.num_members, run.experiment.layout.ensemble_axis
    batch_size = run.experiment.data.global_batch_size
    sizes = [2**k for k in range(most.bit_length()) if 2**k < most]
    if rows is not None:
        sizes = [size for size in sizes if size % rows == 0]
    *smaller, whole = (layout_for(size, run.experiment.layout) for size in [*sizes, most])
    whole.check_batch_size("data.global_batch_size", batch_size)
    return [each for each in smaller if batch_size % each.data_axis == 0] + [whole]


def bench(
    run: Run,
    source: Source,
    make_ensemble: Callable[[Layout], Ensemble],
    layout: Layout,
    num_turns: int,
) -> Point:
    """Times an experiment against a loop over its members and `jit(vmap)` of one step.

    The ways are timed in interleaved rounds, A B C A B C …. dist_ens holds the training set on the
    devices; the others send batches from the host. The loop uses one device, the others use all.
    """
    experiment, order, ensemble = run.experiment, run.order, make_ensemble(layout)
    ours = Updates(
        ensemble,
        source,
        order,
        experiment.steps_per_call,
        chosen=experiment.execution == AUTO,
        may_move=experiment.layout.ensemble_axis is None,
    )
    ways: dict[str, Candidate] = {DIST_ENS: ours, LOOP: LoopByHand(ensemble, source, order)}
    if ensemble.waves == 1:  # With waves, the devices cannot hold all members at once.
        ways[VMAP] = VmapByHand(ensemble, source, order)
    turns = step_ms_of_turns(ways, num_turns)
    per_step = layout.num_members * order.global_batch_size
    return Point(
        layout.num_members,
        ours.execution,
        {name: per_step / statistics.median(ms) * 1e3 for name, ms in turns.items()},
        {
            name: [theirs / mine for mine, theirs in zip(turns[DIST_ENS], ms, strict=True)]
            for name, ms in turns.items()
            if name != DIST_ENS
        },
    )
