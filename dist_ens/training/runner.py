"""The runner of a run, which calls the services around each call of the update in a fixed order.

The metrics of a call are read one call later, so that no device waits for the host.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction

import jax
import numpy as np

from dist_ens.callbacks import STOP, RunInfo, StepInfo
from dist_ens.callbacks.protocol import (
    Service,
    StopMembers,
    after_update,
    call_hook,
    name_of_callback,
)
from dist_ens.ensemble.batches import CallBatches, steps_in
from dist_ens.ensemble.failures import frozen_positions
from dist_ens.ensemble.stopping import keep_best, stop, stopped_members
from dist_ens.ground.errors import SaveError, UserError, kind_of
from dist_ens.ground.state import State, differing, leaf_types
from dist_ens.ground.types import Callback
from dist_ens.layout import MEMBERS, to_host
from dist_ens.processes import cluster
from dist_ens.processes.stop_signal import StopSignal
from dist_ens.training.compaction import Compaction, OfAllMembers


class _OfAnotherHost:
    """Stands for a callback of another host that ends the run."""

    __qualname__ = "a callback of another host"


class Runner:
    """The services of a run, and what they share.

    A `Service` is a callback of the library. It may have these hooks more than a user's callback:

        read(step, metrics) -> None              when the metrics of a call have arrived
        before(info: StepInfo) -> None | STOP    before the next batch is taken, and at the end
        failed(info: StepInfo) -> None           after an exception of an evaluation
        wait() -> None                           when the loop has ended, before the last evaluation

    All services and callbacks are called in the order of `services`. On several hosts, every host
    calls the same hooks at the same steps, and all hosts agree on `STOP`.

    Attributes:
        is_last: Whether the run ends at this step, and is complete.
        stopper: Callback or service that ends the run before its last step; None if none does.
    """

    def __init__(
        self, info: RunInfo, state: State, batches: Iterator[CallBatches], stop: StopSignal
    ) -> None:
        self.info, self.state, self.step = info, state, info.first_step
        self.is_last = info.first_step >= info.last_step
        self.compaction = Compaction(info.ensemble)
        self.stopped: Collection[int] = ()
        self.stopper: Callback | None = None
        self.services: Sequence[Callback] = ()
        self.history: list[dict[str, float]] = []
        self.stop, self.batches = stop, batches
        self._previous_step = info.first_step
        self._ask_hosts = True
        # The hooks of each call, which are found once.
        self._before: list[Callable[[StepInfo], object]] = []
        self._reads: list[Callable[[int, Mapping[str, np.ndarray]], object]] = []
        self._after: list[tuple[Callback, Callable[[StepInfo], object], int | None]] = []
        self.reader = MetricsReader(
            len(info.member_ids), info.first_step, self._read, self.compaction.expanded
        )

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal stops the run, which is then not complete."""
        return self.stopper is self.stop

    def begin(self) -> None:
        """Calls the services before the first step. A callback may end the run here."""
        services = [each for each in self.services if isinstance(each, Service)]
        self._before = [each.before for each in services if hasattr(each, "before")]
        self._reads = [each.read for each in services if hasattr(each, "read")]
        self._after = [
            (each, after_update(each), getattr(each, "every", None))
            for each in filter(callable, self.services)
        ]
        # The services of all hosts agree by themselves.
        own = any(not isinstance(each, Service) for each, _, _ in self._after)
        self._ask_hosts = cluster.any_host(own)
        stops = self.ask("begin", self.info)
        if self.state.stopping != ():
            stops |= self._tell_stopped() == len(self.info.member_ids)
        if stops or self.is_last:  # Nothing is trained, but callbacks still see the last state.
            self._call_after_update(is_last=True, keeps=self.is_last)
            self.is_last = True

    def before(self) -> bool:
        """Evaluates and saves the state, and returns whether the run goes on."""
        if self.is_last:
            self.reader.catch_up()
        info = StepInfo(self.step, self.state, {}, self.is_last, self.reader.step)
        for before in self._before:
            if before(info) is STOP:
                self.is_last = True
                self._call_after_update(is_last=True, keeps=False)
            if info.state is not self.state:  # An evaluation has stopped members.
                info = info._replace(state=self.state)
            if info.is_last != self.is_last:  # A callback or a signal ends the run here.
                info = info._replace(is_last=self.is_last)
        return not self.is_last and self.stopper is not self.stop

    def next_batch(self) -> CallBatches:
        """Returns the batches of the next call."""
        with jax.transfer_guard("allow"):
            return next(self.batches)

    def update(self, batch: CallBatches) -> None:
        """Takes the steps of a call, and calls the services after it."""
        self._previous_step = self.step
        with jax.transfer_guard("disallow"):
            ensemble = self.compaction.ensemble
            self.state, metrics = ensemble.update_steps(self.state, batch)
            self.step += steps_in(batch)
            self.stop.has_progress = True
            self.reader.dispatched(self._previous_step, self.step, metrics)
        ends = self.step >= self.info.last_step
        stoppers = self._call_after_update(is_last=ends, keeps=True)
        stops = (self._ask_hosts or bool(stoppers)) and self._is_stopped(stoppers)
        self.is_last = ends or stops
        # The callbacks have changed the state of this step already, so the state that they return
        # from this second call is not used.
        if stops and not ends:
            self._call_after_update(is_last=True, keeps=False)

    def ask(self, hook: str, *args: object) -> bool:
        """Calls a hook of all services, and returns whether one on any host returned `STOP`.

        Members that a service stops take no more updates from here on.
        """
        results = [(each, call_hook(each, hook, *args)) for each in self.services]
        meant = [(each, found) for each, found in results if isinstance(found, StopMembers)]
        if hook == "evaluated":
            self._keep_best()
        has_stopped_all = self._stop_members(meant)
        stoppers = [each for each, found in results if found is STOP]
        stoppers += [meant[-1][0]] if has_stopped_all and meant else []
        return self._is_stopped(stoppers)

    def call_all(self, hook: str, *args: object, own_only: bool = False) -> None:
        """Calls a hook of all services, or only of those of the library."""
        for service in self.services:
            if isinstance(service, Service) or not own_only:
                call_hook(service, hook, *args)

    def best_step(self) -> int | None:
        """Returns the step that a callback of process 0 names as the best one; None if none does.

        Every host must call this.
        """
        steps = (call_hook(service, "best_step") for service in self.services)
        step = cluster.as_main_sees(next((each for each in steps if each is not None), -1))
        return None if step < 0 else step

    def interrupt(self) -> None:
        """Stops the run at this step because of a signal."""
        self.stopper, self.is_last = self.stop, False

    def write(self, step: int, record: dict[str, float]) -> None:
        """Adds a record to the history and passes it to the writers."""
        self.history.append({"step": step, **record})
        if cluster.is_main():
            with jax.transfer_guard("allow"):  # A user's writer may transfer what it likes.
                self.call_all("write", step, record)

    def _read(self, step: int, metrics: Mapping[str, np.ndarray]) -> None:
        """Passes the metrics of a call that have arrived to the services."""
        for read in self._reads:
            read(step, metrics)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Closes all services at the end, whatever fails."""
        failed: type[BaseException] | None = None
        try:
            yield
        except BaseException as error:
            failed = type(error)
            raise
        finally:
            # A thread that saves may be about to read the last call. But after a second Ctrl-C the
            # process must end at once, and hosts cannot read together after one of them failed.
            waits = failed is not KeyboardInterrupt and jax.process_count() == 1
            with contextlib.ExitStack() as stack:
                if failed is not None:  # A disk that failed twice is reported once.
                    stack.enter_context(contextlib.suppress(SaveError))
                for service in reversed(self.services):
                    stack.callback(call_hook, service, "close")
                if failed is None or waits:
                    self.reader.catch_up()

    def _call_after_update(self, *, is_last: bool, keeps: bool) -> list[Callback]:
        """Calls the services after an update, and returns those that said `STOP`.

        A state that a callback returns is kept only if asked for.
        """
        if is_last:
            self.reader.catch_up()
        metrics = self.reader.unseen()  # Without this call, unseen metrics would pile up.
        of_updated = StepInfo(self.step, self.state, metrics, is_last, self.reader.step)
        info = of_updated
        if self.compaction.num_resting:
            info = OfAllMembers(*info).joined_by(self.compaction.joined)
        stoppers, meant, is_changed = [], [], False
        for service, call, every in self._after:
            if every is not None and not crossed(every, self._previous_step, self.step):
                continue
            # A service of the library takes what is updated, and asks for more if it needs it.
            result = call(of_updated if isinstance(service, Service) else info)
            if result is STOP:
                stoppers.append(service)
            elif isinstance(result, StopMembers):
                meant.append((service, result))
            elif result is not None:
                state = _placed(service, result, info.state, self.info)
                info, is_changed = StepInfo(*info)._replace(state=state), True
        if is_changed and keeps:
            self.state = self.compaction.split(info.state)
        if meant:
            stoppers += [meant[-1][0]] if self._stop_members(meant) else []
        return stoppers

    def _keep_best(self) -> None:
        """Keeps the parameters of the members that a callback says to be evaluated best now."""
        keeping = [each for each in self.services if getattr(each, "keeps_best", False)]
        improved = [k for each in keeping for k in call_hook(each, "improved_members") or ()]
        if improved:
            with jax.transfer_guard("allow"):
                ensemble = self.compaction.ensemble
                self.state = keep_best(ensemble, self.state, improved, self.step)

    def _stop_members(self, meant: Sequence[tuple[Callback, StopMembers]]) -> bool:
        """Stops the members that services have named, and returns whether none is left.

        Every host names the same ones.
        """
        for service, found in meant:
            name, unknown = name_of_callback(service), {*found.member_ids} - {*self.info.member_ids}
            if not getattr(service, "stops_members", False):
                raise UserError(
                    f"The callback {name} stops members, and has no attribute that says so. Give "
                    "its class the line stops_members = True."
                )
            if unknown:
                raise UserError(
                    f"The callback {name} stops the members {sorted(unknown)}, and the run has "
                    f"{repr(list(self.info.member_ids))[:200]}. Name members of the run."
                )
            with jax.transfer_guard("allow"):
                ensemble = self.compaction.ensemble
                self.state = stop(ensemble, self.state, found.member_ids, self.step)
        if not meant:
            return False
        return self._tell_stopped() == len(self.info.member_ids)

    def _tell_stopped(self) -> int:
        """Tells the services which members have stopped, and returns how many."""
        with jax.transfer_guard("allow"):
            self.stopped = {*self.stopped, *stopped_members(self.state)}
        self.call_all("members_stopped", sorted(self.stopped))
        return len(self.stopped)

    def _is_stopped(self, stoppers: Sequence[Callback]) -> bool:
        """Returns whether a service of any host stops the run, and keeps the first that does."""
        stops = cluster.any_host(bool(stoppers))
        if stops and (self.stopper is None or self.is_interrupted):
            self.stopper = next(iter(stoppers), _OfAnotherHost())
        return stops


def crossed(every_steps: int | Fraction | None, previous_step: int, step: int) -> bool:
    """Returns whether a multiple of `every_steps` lies in (previous_step, step]."""
    return every_steps is not None and step // every_steps > previous_step // every_steps


def _placed(callback: Callback, result: object, state: State, info: RunInfo) -> State:
    """Returns the state that a callback returned, on the layout, if it has the right structure."""
    name, layout = name_of_callback(callback), info.ensemble.layout
    is_state = isinstance(result, State)
    different = differing(leaf_types(state), leaf_types(result)) if is_state else []
    if different or not isinstance(result, State):
        what = f"a state in which {', '.join(different)} differ" if is_state else kind_of(result)
        raise UserError(
            f"The callback {name} returned {what}. Return None, dist_ens.callbacks.STOP, or a "
            "State with other values only, such as info.state._replace(params=new_params)."
        )
    placed = layout.placed(result, MEMBERS, f"The state of callback {name}")
    if info.ensemble.failure_policy.policy == "drop":
        with jax.transfer_guard("allow"):
            again = {*frozen_positions(state)} - {*frozen_positions(placed)}
            dropped = stopped_members(state).keys() & {info.member_ids[k] for k in again}
        if dropped:
            raise UserError(
                f"The callback {name} restarts the members {sorted(dropped)}, which the policy "
                "'drop' has stopped for good. Set failure_policy='freeze' to restart members."
            )
    return placed


class MetricsReader:
    """A reader of the metrics of each call after the next call has been dispatched.

    A thread that saves may read them earlier, so that the records of a checkpoint's steps are
    written before the checkpoint. The first call, which compiles, is read at once.

    Attributes:
        step: Number of steps taken up to the last row that was read.
        losses: Loss of each member at this step, float[members].
    """

    def __init__(
        self,
        num_members: int,
        first_step: int,
        on_read: Callable[[int, Mapping[str, np.ndarray]], None],
        expanded: Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]],
    ) -> None:
        self._first_step, self._on_read, self._expanded = first_step, on_read, expanded
        self._reading = threading.Lock()
        self._pending: tuple[int, int, Mapping[str, jax.Array]] | None = None
        self._unseen: list[dict[str, np.ndarray]] = []
        self.step, self.losses = first_step, np.zeros(num_members)
        self._started = time.monotonic()
        self._paused_secs = 0.0
        self._training_secs = 0.0  # Seconds of training until the last call that was read.
        # Seconds and steps of the first call, which compiles.
        self._first_call: tuple[float, int] | None = None
        self._ended: float | None = None
        # Seconds and step from which the pace is taken; None until the next call is read.
        self._pace_from: tuple[float, int] | None = None

    def dispatched(self, previous_step: int, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Stores the metrics of a call, float32[steps, members], and reads those before it."""
        self.catch_up()
        self._pending = (previous_step, step, metrics)
        # With waves, a call has ended when it returns, so the time of a first call that compiles
        # must be taken before the next call.
        if self._first_call is None:
            self.catch_up()

    def catch_up(self, last_step: float = float("inf")) -> None:
        """Reads the metrics of the last call, unless it ends after `last_step`. Any thread may."""
        with self._reading:
            if self._pending is not None and self._pending[1] <= last_step:
                pending, self._pending = self._pending, None
                self._read(*pending)

    def unseen(self) -> dict[str, np.ndarray]:
        """Returns the metrics read since this method was last called, float32[steps, members]."""
        with self._reading:
            parts, self._unseen = self._unseen, []
        if len(parts) <= 1:
            return parts[0] if parts else {}
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def paused(self, secs: float) -> None:
        """Excludes some seconds from the pace, such as those of an evaluation."""
        self._paused_secs += secs

    def end(self) -> None:
        """Stops the clock of `seconds`, once."""
        self._ended = self._ended or time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds from the beginning to the end, with all that a run does."""
        return (self._ended or time.monotonic()) - self._started

    def restart_pace(self) -> None:
        """Takes the pace anew after the next call, which compiles another program."""
        self._pace_from = None

    def pace(self) -> float:
        """Returns the steps per second of the present program; 0 before its second call."""
        secs, step = self._pace_from or (0.0, self.step)
        taken = self._training_secs - secs
        return (self.step - step) / taken if taken > 0 else 0.0

    def steps_per_second(self) -> float:
        """Returns the pace without evaluations, and without the first call if there are more."""
        seconds, steps = self._training_secs, self.step - self._first_step
        if self._first_call is not None and self._first_call[1] < steps:
            seconds, steps = seconds - self._first_call[0], steps - self._first_call[1]
        return steps / seconds if steps else 0.0

    def _read(self, previous_step: int, step: int, metrics: Mapping[str, jax.Array]) -> None:
        jax.block_until_ready(metrics)
        self._training_secs = self.seconds - self._paused_secs
        if self._first_call is None:
            self._first_call = (self._training_secs, step - previous_step)
        self._pace_from = self._pace_from or (self._training_secs, step)
        with jax.transfer_guard("allow"):
            values = self._expanded(to_host(metrics))
        self.step = step
        if "loss" in values:  # A user's own step need not have one.
            self.losses = values["loss"][-1]
        self._unseen.append(values)
        self._on_read(step, values)
