"""What an experiment's training costs on this machine, beside two ways of writing it by hand."""

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from dist_ens import cluster
from dist_ens.data import Source, calls
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.choice import choose
from dist_ens.execution import AUTO
from dist_ens.feed import Draws, put_whole
from dist_ens.layout import MEMBERS, Layout, make_layout
from dist_ens.methods import Order
from dist_ens.run import Run
from dist_ens.turns import Way, step_ms_of_turns

DIST_ENS, LOOP, VMAP = "dist_ens", "loop", "jit(vmap)"
# Where one pair of neighbours says more than so many times what another says, nothing is concluded.
WIDEST = 1.5
_SEED = 0
# Of a run so long that all executions worth trying are timed.
_RUN_STEPS = 10**6


class Updates:
    """A way to train: an ensemble's updates, each step's batch drawn from a split on the device.

    Args:
        ensemble: Of any execution.
        source: Of the training examples.
        order: In which they come.
        steps_per_call: Of the update.
        chosen: Whether the execution, and with it the layout, is to be chosen.

    Attributes:
        execution: The one that is used.
        state: Of the ensemble.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        source: Source,
        order: Order,
        steps_per_call: int,
        *,
        chosen: bool = False,
    ) -> None:
        layout = ensemble.layout
        self._draws = Draws(put_whole(source.train, layout), order, layout, _SEED)
        self._steps_per_call = steps_per_call
        self.state: Any = ensemble.init(_SEED, _batch_of_inputs(source, order, layout))
        self.execution = ensemble.execution
        if chosen:
            first = self._draws(range(steps_per_call))
            ensemble, choice = choose(ensemble, self.state, first, _RUN_STEPS)
            self.execution = choice.option
        if ensemble.layout is not layout:
            layout = ensemble.layout
            self.state = layout.moved(self.state, MEMBERS)
            self._draws = Draws(put_whole(source.train, layout), order, layout, _SEED)
        self._update = ensemble.update

    def run(self, num_steps: int) -> None:
        """See `Way`. A call of a number of steps that is new is compiled."""
        for steps in calls(0, num_steps, self._steps_per_call):
            self.state, metrics = self._update(self.state, self._draws(steps))
        jax.block_until_ready((self.state, metrics))


class LoopByHand:
    """A way to train: one member's program, each member's state apart, member after member.

    Args:
        make_ensemble: Of a layout.
        source: Of the training examples.
        order: In which they come.
        num_members: Members of the ensemble.
    """

    def __init__(
        self,
        make_ensemble: Callable[[Layout], Ensemble],
        source: Source,
        order: Order,
        num_members: int,
    ) -> None:
        layout = make_layout(1, devices=jax.devices()[:1])
        alone = dataclasses.replace(make_ensemble(layout), execution="unroll")
        split, inputs = put_whole(source.train, layout), _batch_of_inputs(source, order, layout)
        self._per_member = order.per_member
        self._draws = [
            Draws(split, order, layout, _SEED, [number])
            for number in range(num_members if order.per_member else 1)
        ]
        self._states: list[Any] = [
            alone.init(_SEED, inputs, [number]) for number in range(num_members)
        ]
        self._update = alone.update

    def run(self, num_steps: int) -> None:
        """See `Way`."""
        metrics: list[Any] = [None] * len(self._states)
        for step in range(num_steps):
            batches = [draws(range(step, step + 1)) for draws in self._draws]
            for number, state in enumerate(self._states):
                own = batches[number if self._per_member else 0]
                self._states[number], metrics[number] = self._update(state, own)
        jax.block_until_ready((self._states, metrics))


def _batch_of_inputs(source: Source, order: Order, layout: Layout) -> jax.ShapeDtypeStruct:
    per_device = order.global_batch_size // layout.data_axis
    return jax.ShapeDtypeStruct((per_device, *source.spec.input_shape), source.spec.input_dtype)


@dataclasses.dataclass(frozen=True)
class Point:
    """The ways for one number of members.

    Attributes:
        num_members: Members of the ensemble.
        execution: The one that was chosen.
        examples_per_second: Member-examples per second of each way, the median of its turns.
        ratios: By which the turns of dist_ens were faster than their neighbours, of each other way.
    """

    num_members: int
    execution: str
    examples_per_second: Mapping[str, float]
    ratios: Mapping[str, list[float]]

    def is_conclusive(self) -> bool:
        """Whether neighbours agree well enough to conclude anything."""
        return all(max(ratios) <= WIDEST * min(ratios) for ratios in self.ratios.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return dataclasses.asdict(self) | {"conclusive": self.is_conclusive()}


def bench(
    run: Run, source: Source, make_ensemble: Callable[[Layout], Ensemble], num_turns: int
) -> Iterator[Point]:
    """Times an experiment against a loop over its members, and `jit(vmap)` of one step.

    All have the data on the device and take turns, A B C A B C …; the ratios are of neighbours. The
    loop runs on one device, as such loops do; the others have all.

    Args:
        run: The experiment, and what its data is.
        source: The data.
        make_ensemble: Of a layout.
        num_turns: Of each way.

    Yields:
        For 1, 2, 4, … members and for as many as the experiment has.
    """
    experiment = run.experiment
    most, rows = run.num_members, experiment.layout.ensemble_axis
    sizes = [2**k for k in range(most.bit_length()) if 2**k < most]
    if rows is not None:
        sizes = [size for size in sizes if size % rows == 0]
    for num_members in [*sizes, most]:
        layout = make_layout(num_members, rows, cluster.devices_for(num_members, rows))
        if experiment.data.global_batch_size % layout.data_axis and num_members < most:
            continue  # fewer members than devices, over which this batch does not divide
        yield _point(run, source, make_ensemble, layout, num_turns)


def _point(
    run: Run,
    source: Source,
    make_ensemble: Callable[[Layout], Ensemble],
    layout: Layout,
    num_turns: int,
) -> Point:
    experiment, order, ensemble = run.experiment, run.order, make_ensemble(layout)
    layout.check_batch_size("data.global_batch_size", order.global_batch_size)
    run.check_training(ensemble)
    ours = Updates(
        ensemble, source, order, experiment.steps_per_call, chosen=experiment.execution == AUTO
    )
    vmap = dataclasses.replace(ensemble, execution="vmap")
    ways: dict[str, Way] = {
        DIST_ENS: ours,
        LOOP: LoopByHand(make_ensemble, source, order, layout.num_members),
        VMAP: Updates(vmap, source, order, 1),
    }
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
