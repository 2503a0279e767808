"""A run with the services of the library, in their fixed order."""

import contextlib
import itertools
from collections.abc import Iterator

import jax

from dist_ens.callbacks import ProgressBar, RunInfo, StepInfo
from dist_ens.callbacks.protocol import Service
from dist_ens.checkpoint import OpenCheckpoints
from dist_ens.checkpoint.network_files import keep_shared
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.memory import explained_memory
from dist_ens.ensemble.select_execution import choose
from dist_ens.execution.spec import AUTO
from dist_ens.layout import holdings
from dist_ens.processes import progress
from dist_ens.processes.compile_cache import LongestCompilation
from dist_ens.processes.peers import Peers
from dist_ens.processes.stop_signal import StopSignal
from dist_ens.storage import place_of
from dist_ens.training.batch_iterable import BatchIterable
from dist_ens.training.beginning import Begun, begin_run
from dist_ens.training.cadence import Cadence
from dist_ens.training.evaluating import Evaluating, Recording
from dist_ens.training.failure_response import FailureResponse
from dist_ens.training.preparing import Job
from dist_ens.training.runner import Runner
from dist_ens.training.saving import BestState, Saving, restore_states

# Seconds that it takes to let members leave, besides those of compiling a program.
_OTHER_SECS = 1.0


class Progress(Service):
    """The service that shows the watchdog and the other processes that the run goes on."""

    def begin(self, run: RunInfo) -> None:
        """Tells the other processes what this one holds."""
        _hold(run.ensemble)

    def before(self, info: StepInfo) -> None:
        """Notes that a call was dispatched."""
        progress.made()


class Signals(Service):
    """The service that stops a run at a signal, at the same step on every host."""

    def __init__(self, run: Runner) -> None:
        self._run = run

    def before(self, info: StepInfo) -> None:
        """Stops the run if a signal asks for it. Every host must ask equally often."""
        if self._run.stop.is_set() and not info.is_last:
            self._run.interrupt()


class Run(Runner):
    """A run with the services of the library, and the callbacks of the user."""

    def __init__(
        self,
        job: Job,
        begun: Begun,
        opened: OpenCheckpoints | None,
        stop: StopSignal,
        compiling: LongestCompilation,
    ) -> None:
        super().__init__(begun.info, begun.state, begun.batches, stop)
        self._job, self._steps_per_call = job, begun.steps_per_call
        self._compiling = compiling
        self.num_computed = {self.step: begun.info.ensemble.num_members}
        self.failure_response = FailureResponse(
            begun.info.ensemble, self.step, self.state, job.warn, opened, self.compaction.joined
        )
        self.evaluating = Evaluating(self, job.eval_data, opened.member_score if opened else None)
        scores_at = self.evaluating.scores_at
        # A run that is resumed has recorded its settings, unless it goes on with others.
        is_resumed = opened is not None and opened.saved_step > 0
        checkpoints = job.arguments.checkpoints
        has_settings = is_resumed and checkpoints is not None and checkpoints.resume != "anyway"
        self.best = BestState(self, job.data.batch, opened, scores_at, job.say)
        saving = []
        if opened is not None and checkpoints is not None and job.door.record is not None:
            ensemble = begun.info.ensemble
            execution = None if ensemble.execution == AUTO else ensemble.execution
            num_devices = ensemble.layout.mesh.size
            chosen = job.door.record.chosen(execution, num_devices, begun.steps_per_call)
            saving = [
                Saving(
                    self,
                    opened,
                    Cadence(checkpoints.every_steps, checkpoints.every_secs, opened.saved_step),
                    chosen.to_dict(),
                    job.data,
                    self.failure_response,
                    self.best,
                    scores_at,
                )
            ]
        self.services = [
            Progress(),
            Signals(self),
            self.failure_response,
            Recording(self, job.arguments.log_every, has_settings=has_settings),
            *job.arguments.callbacks,
            *([ProgressBar()] if job.arguments.progress else []),
            self.evaluating,
            self.best,
            *saving,
        ]

    def before(self) -> bool:
        """Evaluates, saves and lets members leave, and returns whether the run goes on."""
        goes_on = super().before()
        if goes_on and self.stopped and self._job.arguments.compact == AUTO:
            self._compact()
        return goes_on

    def _compact(self) -> None:
        """Goes on without stopped members, if that spares more time than compiling takes."""
        before, pace = self.compaction.ensemble, self.reader.pace()
        # Several hosts would have to move members to each other. Waves wait on the host anyway.
        is_alone = before.waves == before.num_groups == jax.process_count() == 1
        if not is_alone or pace == 0:
            return
        ids = self.compaction.without(self.stopped)
        spared = (self.info.last_step - self.step) / pace * (1 - len(ids) / before.num_members)
        if len(ids) == before.num_members or spared < self._compiling.secs + _OTHER_SECS:
            return
        self.reader.catch_up()
        self.reader.restart_pace()
        self.state = self.compaction.shrink(self.state, ids)
        self.num_computed[self.step] = len(ids)
        train, small = self._job.data, self.compaction.ensemble
        if not isinstance(train, BatchIterable):  # Its batches are those of all members.
            rest = self.info._replace(member_ids=ids, first_step=self.step)
            self.batches = train.batches(small.layout, rest, self._steps_per_call, self._job.say)
        why = ""
        if self._job.info.ensemble.execution == AUTO:
            first = next(self.batches)
            self.batches = itertools.chain(iter([first]), self.batches)
            left = self.info.last_step - self.step
            chosen, choice = choose(small, self.state, first, left, may_move=False)
            self.compaction.ensemble, why = chosen, f" {choice}"
        self._job.say(
            f"Step {self.step:,}: {len(ids)} of {before.num_members} members go on in smaller "
            f"arrays; the others take no more updates.{why}"
        )


@contextlib.contextmanager
def running(job: Job) -> Iterator[Run]:
    """A context in which a run is trained. Its state is initialised or restored before."""
    checkpoints, record = job.arguments.checkpoints, job.door.record
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        _hold(job.info.ensemble)
        opened = None
        if checkpoints is not None and record is not None:
            opened = stack.enter_context(
                checkpoints.open(
                    record.to_dict(),
                    check=job.door.check_resume,
                    say=job.warn,
                    directions=job.info.directions,
                )
            )
        stack.enter_context(explained_memory(job.info.ensemble))
        compiling = stack.enter_context(LongestCompilation())
        run = Run(job, begin_run(job, opened), opened, stop, compiling)
        if checkpoints is not None and opened is not None:
            saved = (opened.saved_record or {}).get("shared")
            folder = place_of(checkpoints.folder, "folder")
            is_saved = record is not None and saved == record.shared
            keep_shared(folder, job.info.ensemble.shared, is_saved=is_saved)
        for note in opened.notes if opened else ():
            job.say(f"Note: {note}")
        if checkpoints is not None and opened is not None and opened.saved_step:
            restore_states(run.services, opened, checkpoints)
        stop.listen()  # A signal before this line ends the process, as no progress is lost.
        stack.enter_context(run.closing())
        run.begin()
        yield run


def _hold(ensemble: Ensemble) -> None:
    """Tells the other processes of a run which part of it each process holds."""
    if Peers.current is not None:
        Peers.current.hold(holdings(ensemble.layout))
