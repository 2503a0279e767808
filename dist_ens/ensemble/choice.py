"""Which execution to use: by a rule, or by timing the candidates on the program itself."""

import dataclasses
import hashlib
import math
import pathlib
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import jax
from jax.extend.core import ClosedJaxpr

import dist_ens
from dist_ens import cluster, turns
from dist_ens.cache import keep_execution, kept_execution, spared_secs
from dist_ens.ensemble.batches import placement, steps_in
from dist_ens.ensemble.lift import Ensemble
from dist_ens.ensemble.lowerings import (
    CONVOLUTION,
    MAX_POOL_GRADIENT,
    PRODUCT,
    becomes_flat,
    becomes_sums,
)
from dist_ens.ensemble.rewrite import contains
from dist_ens.ensemble.state import State
from dist_ens.ensemble.waves import batches_of_wave
from dist_ens.execution import Execution
from dist_ens.layout import MEMBERS, Layout, Waves, copied

# Timing takes at most the smaller of the two: seconds, and this part of the expected run.
LONGEST_SECS = 20.0
PART_OF_THE_RUN = 0.05
# A candidate is timed for at least so many calls and seconds; or, where calls are long, for so many
# seconds, be it one call.
_FEWEST_CALLS = 3
_FEWEST_SECS = 0.1
_ENOUGH_SECS = 0.5
# Candidates that are less than so many times slower than the fastest are timed again, and the
# rule's, in turns, of which calls that are long need fewer: as many of them as there is time for.
_CLOSE = 1.6
_TURNS, _TURNS_OF_LONG_CALLS = 5, 3
_LONG_CALL_SECS = 0.2
# Those that are so close after their turns take as many again, and once more.
_VERY_CLOSE = 1.1
_ROUNDS = 3
# Beyond so many copies of a member's step in one program, to compile it takes longer than to try
# everything else: minutes, on a CPU a good part of one.
_MOST_UNROLLED, _MOST_UNROLLED_ON_CPU = 64, 16
# So many members are batched at a time where all of a device's would not stay in a core's cache.
_CHUNKS = range(5, 11)
# Multiplications of a product from which on a core is as busy with one member's as with many.
_LARGE_PRODUCT = 2**22


@dataclasses.dataclass(frozen=True)
class Choice:
    """An execution and why it was chosen.

    Attributes:
        option: `WAY[+LOWERING][+STEPS]`, and `on one device` where that is part of it.
        why: A sentence.
        step_secs: What was tried, and the seconds per step that it took.
        in_turns: Those of them that were timed a second time, in turns.
    """

    option: str
    why: str
    step_secs: Mapping[str, float] = dataclasses.field(default_factory=dict)
    in_turns: Sequence[str] = ()

    def __str__(self) -> str:
        def listed(names: Sequence[str]) -> str:
            return ", ".join(f"{name} {self.step_secs[name] * 1e3:.3g}" for name in names)

        once = [name for name in self.step_secs if name not in self.in_turns]
        tried = listed(once)
        if self.in_turns:
            tried = f"in turns {listed(self.in_turns)}" + (f"; once {tried}" if once else "")
        return f"Execution {self.option}: {self.why}" + (f" ({tried} ms a step)." if tried else ".")


def candidates(layout: Layout, traced: ClosedJaxpr, num_steps: int) -> list[str]:
    """Executions worth trying for a program, the one that the rule chooses first.

    The rule: on a CPU networks with convolutions are unrolled (mapped where a device holds more
    than 16), in canonical layout, with max-pooling's gradient by masks. Of others, on a CPU, matrix
    products are aligned if that makes sums of one of them, else gradients of weights are made flat
    if one of them has many terms; and several members are mapped if they have a product so large
    that one member's keeps a core busy. Every other network, and every one on an accelerator, is
    vmapped.

    Args:
        layout: Of the ensemble.
        traced: Its `traced_update`.
        num_steps: Of one call.

    Returns:
        Executions, each once.
    """
    members, on_cpu = layout.members_per_device, layout.platform == "cpu"
    convolves = contains(traced, CONVOLUTION)
    masks = "+masks" if contains(traced, MAX_POOL_GRADIENT) else ""
    few = members <= (_MOST_UNROLLED_ON_CPU if on_cpu else _MOST_UNROLLED)
    if convolves and on_cpu:
        one_by_one = [*(["unroll+canonical"] if few else []), "map+canonical"]
        # Left to XLA a convolution is slow inside a loop: the steps are unrolled too.
        copies = members * num_steps
        plain = ["unroll"] if copies <= _MOST_UNROLLED_ON_CPU else []
        names = [*one_by_one, "loop+canonical", "vmap+patches", *plain]
        return [name + masks for name in names] + (one_by_one[:1] if masks else [])
    if convolves:
        apart = ["vmap+apart" + masks] if few else []
        return list(dict.fromkeys(["vmap", "vmap" + masks, "vmap+patches" + masks, *apart]))
    products = _products(traced) if on_cpu else ""
    batched, plain = "vmap" + products, ["vmap"] if products else []
    if members == 1:
        return [batched, *plain, *([] if num_steps == 1 else [f"{batched}+single"])]
    # Where there is time for some only, the last are the least likely to win.
    one_by_one = ["map" + products, *(["unroll" + products] if few else [])]
    if on_cpu and contains(traced, PRODUCT, _is_large):
        return [*one_by_one, batched, *plain, "loop" + products]
    sizes = [size for size in _CHUNKS if members % size == 0 and members > _CHUNKS[-1]]
    chunked = [f"chunk:{sizes[-1]}{products}"] if on_cpu and sizes else []
    return [batched, *chunked, *one_by_one, *plain, "loop" + products]


def _products(traced: ClosedJaxpr) -> str:
    """The lowering of a CPU's matrix products that a program has work for."""
    if contains(traced, PRODUCT, becomes_sums):
        return "+aligned"
    return "+flat" if contains(traced, PRODUCT, becomes_flat) else ""


def _is_large(lhs: Any, rhs: Any, *, dimension_numbers: Any, **_: Any) -> bool:
    """Whether a product, each one of those that are batched, keeps a core busy; shapes will do."""
    (contracted, _), (batched, _) = dimension_numbers
    terms, matrices = (
        math.prod(lhs.shape[axis] for axis in axes) for axes in (contracted, batched)
    )
    return math.prod(lhs.shape) * math.prod(rhs.shape) >= _LARGE_PRODUCT * terms * matrices**2


def choose(
    ensemble: Ensemble,
    state: State,
    batches: Any,
    num_steps: int,
    *,
    workdir: pathlib.Path | None = None,
    may_move: bool = True,
) -> tuple[Ensemble, Choice]:
    """The ensemble with the fastest execution that could be found in the time there is.

    What was chosen before for the same program on the same kind of device is taken again. Several
    hosts time together, and process 0 decides: by what it has kept, or by its clock. Where the
    devices are the cores of one CPU, the fastest is tried on one of them too.

    Args:
        ensemble: Of any execution.
        state: Of the ensemble; copied, not used up.
        batches: Of the first call, from `Layout.put`.
        num_steps: Steps that the run is going to take.
        workdir: The run's folder: what is chosen is kept there too, for a run that ends before its
            first checkpoint and begins again where nothing else remembers; None for no run.
        may_move: Whether the layout is open too; not where somebody says it.

    Returns:
        The ensemble with the execution chosen, of the same layout or of one device; and the choice.
    """
    if ensemble.waves > 1:  # what is best for the members of one is for those of all
        waves = Waves(ensemble.layout, ensemble.waves)
        _, choice = choose(
            ensemble.of_wave,
            waves.take(state, 0),
            batches_of_wave(waves, batches, 0),
            num_steps,
            workdir=workdir,
            may_move=False,
        )
        return dataclasses.replace(ensemble, execution=choice.option), choice
    layout, traced = ensemble.layout, ensemble.traced_update(state, batches)
    names = candidates(layout, traced, steps_in(batches))
    options = {name: dataclasses.replace(ensemble, execution=name) for name in names}
    if may_move and cluster.cores_are_devices() and layout.mesh.size > 1:
        alone = layout.on_one_device()
        options |= {
            f"{name} on one device": dataclasses.replace(ensemble, execution=name, layout=alone)
            for name in candidates(alone, traced, steps_in(batches))
        }
    rule = names[0]
    if len(options) == 1:
        return options[rule], Choice(rule, "nothing else is worth trying for this network")
    program = _program(ensemble, traced, [*options], state, batches)
    # What was not timed, for want of time, or not in turns, is not again in a run as long.
    of_this_length = f"{program} {num_steps}"

    def taken(name: str, choice: Choice) -> tuple[Ensemble, Choice]:
        if cluster.is_main() and workdir is not None:
            keep_execution(of_this_length, name, workdir)
        return options[name], choice

    for kept, why in (
        (kept_execution(of_this_length, workdir) if workdir else None, "as when this run began"),
        (kept_execution(program), "the fastest in an earlier run of this program"),
        (kept_execution(of_this_length), "as in an earlier run of as many steps"),
    ):
        position = cluster.as_main_sees([*options].index(kept) if kept in options else -1)
        if position >= 0:
            name = [*options][position]
            return taken(name, Choice(name, why))
    # Beside the state a copy of it, and what a step makes.
    if not cluster.as_main_sees(layout.free_bytes() >= 2 * _device_bytes(state)):
        return taken(rule, Choice(rule, "the rule, for there is no room to time candidates"))

    timing = _timed(options, names, state, batches, num_steps)
    if len(timing.step_secs) == 1:
        why = f"the rule, for {timing.budget_secs:.2g} s are too few to time others"
    else:
        why = "the fastest of those tried"
    if cluster.is_main():
        keep_execution(program if timing.settled else of_this_length, timing.fastest)
    return taken(timing.fastest, Choice(timing.fastest, why, timing.step_secs, timing.in_turns))


class _Timing(NamedTuple):
    """What was found out of the candidates.

    Attributes:
        fastest: The one to take.
        step_secs: Of those tried.
        in_turns: See `Choice`.
        settled: Whether a longer run has nothing more to find out.
        budget_secs: That there were for all but the first.
    """

    fastest: str
    step_secs: dict[str, float]
    in_turns: list[str]
    settled: bool
    budget_secs: float


class _Trial:
    """A copy of a state, which the candidates of its layout use up in turn."""

    def __init__(self, state: State, batches: Any) -> None:
        self.state = jax.block_until_ready(copied(state))
        self.batches = batches
        self.steps_per_call = steps_in(batches)

    def call(self, update: Any) -> None:
        """The steps of one call."""
        self.state, metrics = update(self.state, self.batches)
        jax.block_until_ready((self.state, metrics))


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """One that takes turns."""

    update: Any
    trial: _Trial

    def run(self, num_steps: int) -> None:
        """See `turns.Way`, whose steps are calls here."""
        for _ in range(num_steps):
            self.trial.call(self.update)

    def call_secs(self) -> list[float]:
        """Seconds of some calls, after one to warm up."""
        self.trial.call(self.update)
        secs: list[float] = []
        while sum(secs) < (_FEWEST_SECS if len(secs) >= _FEWEST_CALLS else _ENOUGH_SECS):
            started = cluster.clock()
            self.trial.call(self.update)
            secs.append(cluster.clock() - started)
        return secs


@dataclasses.dataclass(frozen=True)
class _Moment:
    """One in time, the same on every host.

    Attributes:
        clock: Seconds by process 0's clock.
        cached_secs: That its cache has spared its compiler.
    """

    clock: float
    cached_secs: float

    @classmethod
    def now(cls) -> Self:
        """This one."""
        return cls(cluster.clock(), cluster.as_main_sees(int(1e3 * spared_secs())) / 1e3)


class _Contest:
    """What the candidates take, as far as there is time to find out.

    To have tried one more is worth less than to be sure of the best two: where those are close, the
    time for their turns is kept. The rule's has a second chance whatever its first time was: it is
    the likeliest to win, and what disturbs a machine may last as long as one timing.

    Nothing can stop a compiler that has begun, so what one more will take is told beforehand: to
    compile as long as the slowest did, without its cache, for each copy of a step in the program.

    Args:
        options: The candidates.
        first: The rule's, which is timed in any case.
        state: Of the ensemble; copied.
        batches: Of a call.
        num_steps: That the run is going to take.
    """

    def __init__(
        self,
        options: Mapping[str, Ensemble],
        first: str,
        state: State,
        batches: Any,
        num_steps: int,
    ) -> None:
        self._options, self._state, self._batches = options, state, batches
        self._layout = options[first].layout
        started = _Moment.now()
        self._trial = _Trial(state, batches)
        self._first = first
        self._tried: dict[str, _Candidate] = {}
        self.step_secs: dict[str, float] = {}
        self._timing_secs = self._compiling_secs = 0.0
        self._time(first, _Candidate(options[first].update, self._trial), started)
        self._began = cluster.clock()
        self._skipped = False
        self.budget_secs = min(LONGEST_SECS, PART_OF_THE_RUN * num_steps * self.step_secs[first])

    @property
    def fastest(self) -> str:
        """Of those tried."""
        return min(self.step_secs, key=self.step_secs.__getitem__)

    def try_next(self, name: str) -> None:
        """Times one more, if there is time for what it will take."""
        expected_secs = self._timing_secs + self._compiling_secs * self._num_copies(name)
        for_turns = sum(map(self._turns_secs, self._that_take_turns(most=2)))
        if expected_secs + for_turns > self._left_secs():
            self._skipped = True
            return
        started = _Moment.now()
        option, trial = self._options[name], self._trial
        if option.layout is not self._layout:
            moved = option.layout.moved
            trial = _Trial(
                moved(self._state, MEMBERS), moved(self._batches, placement(self._batches))
            )
        update = _update_that_fits(option, trial)
        if update is None:
            self._count_compiling(name, started)
        else:
            self._time(name, _Candidate(update, trial), started)

    def _time(self, name: str, candidate: _Candidate, started: "_Moment") -> None:
        """Times one, and counts what it took since some moment."""
        call_secs = candidate.call_secs()
        self._tried[name] = candidate
        self.step_secs[name] = min(call_secs) / self._trial.steps_per_call
        timing_secs = min(call_secs) + sum(call_secs)  # once to warm up
        self._timing_secs = max(self._timing_secs, timing_secs)
        self._count_compiling(name, started, timing_secs)

    def _count_compiling(self, name: str, started: "_Moment", timing_secs: float = 0.0) -> None:
        now = _Moment.now()
        secs = now.clock - started.clock - timing_secs + now.cached_secs - started.cached_secs
        self._compiling_secs = max(self._compiling_secs, secs / self._num_copies(name))

    def _num_copies(self, name: str) -> int:
        """Copies of one step, of one member or of several batched, in an execution's program."""
        option = self._options[name]
        way, rule = (Execution.parse(e.execution) for e in (option, self._options[self._first]))
        members = option.layout.members_per_device if way.members == "unroll" else 1
        # Steps are unrolled for the sake of convolutions that are left to XLA.
        unrolls_steps = rule.convolutions == "canonical" and way.convolutions is None
        return members * (self._trial.steps_per_call if unrolls_steps else 1)

    def decided(self) -> _Timing:
        """What came of it, after turns of those that are close.

        What disturbed the machine while one was timed may have decided between them.
        """
        fastest, in_turns = self.fastest, self._that_take_turns()
        is_sure = bool(in_turns) or self._close() == [fastest]
        if in_turns:
            fastest = self._fastest_in_turns(in_turns)
        has_more_to_try = self._skipped and self.budget_secs < LONGEST_SECS
        settled = len(self.step_secs) > 1 and is_sure and not has_more_to_try
        return _Timing(fastest, self.step_secs, in_turns, settled, self.budget_secs)

    def _fastest_in_turns(self, names: Sequence[str]) -> str:
        """The fastest in the median of its turns; while others are very close, all take more."""
        num_turns = _num_turns(self._call_secs(names[-1]))
        call_secs: dict[str, list[float]] = {name: [] for name in names}
        for done in range(_ROUNDS):
            if done and sum(map(self._turns_secs, names)) > self._left_secs():
                self._skipped = True
                break
            ways = [self._tried[name] for name in names]
            of_ways = turns.step_secs_of_short_turns(ways, num_turns)
            for name, secs in zip(names, of_ways, strict=True):
                call_secs[name] += secs
                self.step_secs[name] = statistics.median(call_secs[name]) / (
                    self._trial.steps_per_call
                )
            # What was timed in other turns is not compared: the machine was another.
            fastest = min(names, key=self.step_secs.__getitem__)
            limit = _VERY_CLOSE * self.step_secs[fastest]
            names = [name for name in names if self.step_secs[name] <= limit]
            if len(names) == 1:
                break
        return fastest

    def _close(self) -> list[str]:
        """The fastest, those that are close to it, and the rule's; the fastest first."""
        limit = _CLOSE * self.step_secs[self.fastest]
        by_secs = sorted(self.step_secs, key=self.step_secs.__getitem__)
        return [name for name in by_secs if self.step_secs[name] <= limit or name == self._first]

    def _that_take_turns(self, most: int | None = None) -> list[str]:
        """As many of `_close` as there is time for, the fastest first; none if that is one."""
        close = self._close()[:most]
        while len(close) > 1 and sum(map(self._turns_secs, close)) > self._left_secs():
            close.pop()
        return close if len(close) > 1 else []

    def _turns_secs(self, name: str) -> float:
        call_secs = self._call_secs(name)
        return turns.expected_secs(call_secs, _num_turns(call_secs))

    def _call_secs(self, name: str) -> float:
        return self.step_secs[name] * self._trial.steps_per_call

    def _left_secs(self) -> float:
        return self.budget_secs - (cluster.clock() - self._began)


def _timed(
    options: Mapping[str, Ensemble], names: list[str], state: State, batches: Any, num_steps: int
) -> _Timing:
    """Times the first name, then others while there is time for them."""
    contest = _Contest(options, names[0], state, batches, num_steps)
    for name in names[1:]:
        contest.try_next(name)
    # The same way, or where one device would not have it, that device's rule.
    on_one = [name for name in options if name not in names]
    alike = f"{contest.fastest} on one device"
    for name in [alike] if alike in on_one else on_one[:1]:
        contest.try_next(name)
    return contest.decided()


def _num_turns(call_secs: float) -> int:
    return _TURNS if call_secs < _LONG_CALL_SECS else _TURNS_OF_LONG_CALLS


def _update_that_fits(ensemble: Ensemble, trial: _Trial) -> Any:
    """The compiled update; None if its device has no room for it beside what is there."""
    if not hasattr(ensemble.update, "lower"):  # dispatches smaller programs than the others are
        return ensemble.update
    compiled = ensemble.update.lower(trial.state, trial.batches).compile()
    memory = compiled.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    fits = memory.temp_size_in_bytes + new < ensemble.layout.free_bytes()
    return compiled if cluster.as_main_sees(fits) else None


def _device_bytes(state: State) -> int:
    """Of the state's part on one device."""
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))


def _program(
    ensemble: Ensemble, traced: ClosedJaxpr, names: list[str], state: State, batches: Any
) -> str:
    """A name for the program, the choice that there is, and the kind of device."""
    device = ensemble.layout.mesh.devices.flat[0]
    parts = (
        re.sub(r"0x[0-9a-f]+", "", str(traced)),  # addresses, which no two runs share
        [(leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves((state, batches))],
        names,
        str(ensemble.layout),
        device.device_kind,
        cluster.processor() if device.platform == "cpu" else None,
        jax.__version__,
        dist_ens.__version__,
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()
