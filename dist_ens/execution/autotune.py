"""Timing of candidate executions on the program itself, within a time budget."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from dist_ens.execution import timing
from dist_ens.execution.lowerings import CONVOLUTION
from dist_ens.execution.spec import Execution
from dist_ens.ground.errors import first_line
from dist_ens.ground.state import State
from dist_ens.ground.types import Metrics, PyTree, Specs
from dist_ens.layout import MEMBERS, copied
from dist_ens.processes import cluster
from dist_ens.processes.compile_cache import spared_secs

# Timing takes at most this number of seconds, and at most this fraction of the expected run.
LONGEST_SECS = 20.0
PART_OF_THE_RUN = 0.05
# A candidate is timed for at least `_FEWEST_CALLS` calls and `_FEWEST_SECS` seconds. Calls may be
# so long that `_ENOUGH_SECS` are over earlier. The timing then ends, even after one call.
_FEWEST_CALLS = 3
_FEWEST_SECS = 0.1
_ENOUGH_SECS = 0.5
# The rule's candidate is timed again in interleaved rounds. So are the candidates within this
# factor of the fastest, as far as there is time. Long calls need fewer rounds.
_CLOSE = 1.6
_TURNS, _TURNS_OF_LONG_CALLS = 5, 3
_LONG_CALL_SECS = 0.2
# Candidates within this factor of the fastest are then timed again, while there is time. A
# candidate has at most `_ROUNDS` times its number of rounds.
_VERY_CLOSE = 1.1
_ROUNDS = 3
# The reference runs one member's own program, with all operations as the user wrote them.
REFERENCE = "loop"


# update(state, batches) -> (state, metrics), of all members and several steps.
_Update = Callable[[State, PyTree], tuple[State, Metrics]]


# An ensemble, of which only `layout`, `execution`, `update_steps` and `programs` are used.
Program: TypeAlias = Any


class Call(NamedTuple):
    """The arguments of one call of the update. The state is copied, not donated."""

    state: State
    batches: PyTree
    batch_specs: Specs
    num_steps: int


class Timing(NamedTuple):
    """Times of the candidates, by their names.

    Attributes:
        fastest: Candidate to use.
        step_secs: Seconds per step of each candidate that was timed.
        num_turns: Number of rounds of each candidate that was timed again. Only those with the same
            number can be compared, as the machine's speed varies.
        settled: Whether a longer run would make the same choice.
        budget_secs: Seconds that were allowed for all candidates except the first.
        failed: Error of each candidate that raised one.
    """

    fastest: str
    step_secs: dict[str, float]
    num_turns: dict[str, int]
    settled: bool
    budget_secs: float
    failed: dict[str, str] = {}  # noqa: RUF012 - never written to


def timed(options: Mapping[str, Program], names: list[str], call: Call, num_steps: int) -> Timing:
    """Times executions of an ensemble: the rule's, then others while there is time.

    `options` includes those on one device and the reference. `names` are the candidates on the
    ensemble's own layout, the rule's first. The run has `num_steps` steps. If every candidate
    raises an error, that of the first is raised.
    """
    contest = _Contest(options, names, call, num_steps)
    for name in contest.left_to_try:
        contest.try_next(name)
    # On one device the fastest execution is tried. If it is no candidate there, the rule's is.
    on_one = [name for name in options if name not in (*names, REFERENCE)]
    alike = f"{contest.fastest} on one device"
    for name in [alike] if alike in on_one else on_one[:1]:
        contest.try_next(name)
    return contest.decided()


class _Trial:
    """A copy of a state, on which the candidates of one layout are timed one after another."""

    def __init__(self, call: Call) -> None:
        self.state = jax.block_until_ready(copied(call.state))
        self.batches = call.batches
        self.steps_per_call = call.num_steps

    def call(self, update: _Update) -> None:
        self.state, metrics = update(self.state, self.batches)
        jax.block_until_ready((self.state, metrics))


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """A candidate that can be timed in interleaved rounds; a `timing.Candidate`."""

    update: _Update
    trial: _Trial

    def run(self, num_steps: int) -> None:
        """Makes some calls of the update; a step of `timing.Candidate` is one call here."""
        for _ in range(num_steps):
            self.trial.call(self.update)

    def call_secs(self, num_calls: float) -> list[float]:
        """Returns the seconds of each timed call, after one untimed call to warm up."""
        self.trial.call(self.update)
        secs: list[float] = []
        while sum(secs) < (_FEWEST_SECS if len(secs) >= _FEWEST_CALLS else _ENOUGH_SECS):
            started = cluster.clock()
            self.trial.call(self.update)
            secs.append(cluster.clock() - started)
            if PART_OF_THE_RUN * num_calls * secs[0] < _FEWEST_SECS:
                break
        return secs


def _clock() -> float:
    """Returns process 0's time in seconds, and the compilation time that its cache has saved."""
    return cluster.clock() + cluster.as_main_sees(int(1e3 * spared_secs())) / 1e3


class _Contest:
    """The timing of the candidates, within a time budget.

    To be sure of the best two is worth more than to try one more candidate, so the time for their
    rounds is reserved. The rule's candidate is always timed again: it is the most likely to win,
    and a disturbance of the machine may last as long as one timing.

    A compilation cannot be stopped, so its time is estimated before it starts: as the longest so
    far without the cache, for each copy of a step in the program.
    """

    def __init__(
        self, options: Mapping[str, Program], names: Sequence[str], call: Call, num_steps: int
    ) -> None:
        self._options, self._call = options, call
        self._layout, self._first = options[names[0]].layout, names[0]
        self._trial, self._num_steps = _Trial(call), num_steps
        self._tried: dict[str, _Candidate] = {}
        self.step_secs: dict[str, float] = {}
        self._num_turns: dict[str, int] = {}
        self._failed: dict[str, str] = {}
        self._timing_secs = self._compiling_secs = 0.0
        self._first = first = self._time_first(names)
        self.left_to_try = [name for name in names if name not in self._failed and name != first]
        self._began = cluster.clock()
        self._skipped = False
        self.budget_secs = min(LONGEST_SECS, PART_OF_THE_RUN * num_steps * self.step_secs[first])

    def _time_first(self, names: Sequence[str]) -> str:
        """Times the first candidate that raises no error, and returns its name."""
        errors: list[Exception] = []
        for name in dict.fromkeys([*names, REFERENCE]):
            error = self._error_of(name, self._trial, must_fit=False)
            if error is None:
                return name
            errors.append(error)
        raise errors[0]

    def _error_of(self, name: str, trial: _Trial, *, must_fit: bool) -> Exception | None:
        """Times a candidate, and returns the error that it raises; None if it raises none.

        All hosts trace the same program, so they leave out the same candidates. If one of several
        hosts raises an error later, the run ends, because the other hosts are inside a call.
        """
        started, option, several = _clock(), self._options[name], jax.process_count() > 1

        def time() -> None:
            update = _update_that_fits(option, trial) if must_fit else option.update_steps
            if update is None:
                self._count_compiling(name, started)
            else:
                self._time(name, _Candidate(update, trial), started)

        try:
            if several:
                option.programs.trace_update(self._call.state, self._call.batches)
            else:
                time()
        except Exception as error:
            self._failed[name] = f"{type(error).__name__}: {first_line(error)[:200]}"
            if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._trial.state)):
                self._trial.state = jax.block_until_ready(copied(self._call.state))
            return error
        if several:
            time()
        return None

    @property
    def fastest(self) -> str:
        """Name of the fastest candidate so far."""
        return min(self.step_secs, key=self.step_secs.__getitem__)

    def try_next(self, name: str) -> None:
        """Times one more candidate, if there is enough time left."""
        expected_secs = self._timing_secs + self._compiling_secs * self._num_copies(name)
        for_turns = sum(map(self._turns_secs, self._that_take_turns(most=2)))
        if expected_secs + for_turns > self._left_secs():
            self._skipped = True
            return
        layout, trial = self._options[name].layout, self._trial
        if layout is not self._layout:
            moved, call = layout.moved, self._call
            trial = _Trial(
                call._replace(
                    state=moved(call.state, MEMBERS), batches=moved(call.batches, call.batch_specs)
                )
            )
        self._error_of(name, trial, must_fit=True)

    def _time(self, name: str, candidate: _Candidate, started: float) -> None:
        """Times a candidate, and records its compilation time since `started`."""
        num_calls = math.inf if self.step_secs else self._num_steps / self._trial.steps_per_call
        call_secs = candidate.call_secs(num_calls)
        self._tried[name] = candidate
        self.step_secs[name] = min(call_secs) / self._trial.steps_per_call
        timing_secs = min(call_secs) + sum(call_secs)  # The first term is the call to warm up.
        self._timing_secs = max(self._timing_secs, timing_secs, _FEWEST_SECS)
        self._count_compiling(name, started, timing_secs)

    def _count_compiling(self, name: str, started: float, timing_secs: float = 0.0) -> None:
        secs = _clock() - started - timing_secs
        self._compiling_secs = max(self._compiling_secs, secs / self._num_copies(name))

    def _num_copies(self, name: str) -> int:
        option = self._options[name]
        own, rule = (Execution.parse(e.execution) for e in (option, self._options[self._first]))
        members = option.layout.members_per_device if own.members == "unroll" else 1
        # A loop over steps is slow on a CPU for a convolution without the canonical layout, so the
        # steps are unrolled.
        unrolls_steps = "canonical" in rule.lowerings and own.lowering_of(CONVOLUTION) is None
        return members * (self._trial.steps_per_call if unrolls_steps else 1)

    def decided(self) -> Timing:
        """Returns the times, after further rounds of the candidates that are close."""
        fastest, close, in_turns = self.fastest, self._close(), self._that_take_turns()
        is_sure = bool(in_turns) or close == [fastest]
        if in_turns:
            self._skipped |= in_turns != close
            fastest = self._fastest_in_turns(in_turns)
        has_more_to_try = self._skipped and self.budget_secs < LONGEST_SECS
        settled = len(self.step_secs) > 1 and is_sure and not has_more_to_try
        return Timing(
            fastest, self.step_secs, self._num_turns, settled, self.budget_secs, self._failed
        )

    def _fastest_in_turns(self, names: list[str]) -> str:
        """Returns the candidate with the lowest median; those very close have further rounds."""
        num_turns = _num_turns(self._call_secs(names[-1]))
        call_secs: dict[str, list[float]] = {name: [] for name in names}
        for further_rounds in reversed(range(_ROUNDS)):
            began = cluster.clock()
            tried = [self._tried[name] for name in names]
            of_turns = timing.step_secs_of_turns(tried, num_turns)
            for name, secs in zip(names, of_turns, strict=True):
                call_secs[name] += secs
                self._num_turns[name] = len(call_secs[name])
                median = statistics.median(call_secs[name])
                self.step_secs[name] = median / self._trial.steps_per_call
            secs_of_each = (cluster.clock() - began) / len(names)
            by_secs = sorted(names, key=self.step_secs.__getitem__)
            fastest = by_secs[0]
            limit = _VERY_CLOSE * self.step_secs[fastest]
            names = [name for name in by_secs if self.step_secs[name] <= limit]
            if len(names) == 1 or not further_rounds:
                break
            there_is_time_for = max(0, int(self._left_secs() / secs_of_each))
            self._skipped |= there_is_time_for < len(names)
            names = names[:there_is_time_for]
            if len(names) < 2:
                break
        return fastest

    def _close(self) -> list[str]:
        """Returns the candidates close to the fastest and the rule's, the fastest first."""
        limit = _CLOSE * self.step_secs[self.fastest]
        by_secs = sorted(self.step_secs, key=self.step_secs.__getitem__)
        return [name for name in by_secs if self.step_secs[name] <= limit or name == self._first]

    def _that_take_turns(self, most: int | None = None) -> list[str]:
        """Returns as many of `_close` as there is time for; an empty list if that is only one."""
        close = self._close()[:most]
        while len(close) > 1 and sum(map(self._turns_secs, close)) > self._left_secs():
            close.pop()
        return close if len(close) > 1 else []

    def _turns_secs(self, name: str) -> float:
        call_secs = self._call_secs(name)
        return timing.expected_secs(call_secs, _num_turns(call_secs))

    def _call_secs(self, name: str) -> float:
        return self.step_secs[name] * self._trial.steps_per_call

    def _left_secs(self) -> float:
        return self.budget_secs - (cluster.clock() - self._began)


def _num_turns(call_secs: float) -> int:
    return _TURNS if call_secs < _LONG_CALL_SECS else _TURNS_OF_LONG_CALLS


def _update_that_fits(program: Program, trial: _Trial) -> _Update | None:
    """Returns the compiled update; None if the free memory of its device is too small for it."""
    # An update without `lower` dispatches smaller programs, so its memory is not checked.
    if not hasattr(program.update_steps, "lower"):
        return program.update_steps
    compiled = program.update_steps.lower(trial.state, trial.batches).compile()
    memory = compiled.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    fits = memory.temp_size_in_bytes + new < program.layout.free_bytes()
    return compiled if cluster.as_main_sees(fits) else None
