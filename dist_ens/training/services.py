"""A run with the services of the library, in their fixed order."""

import contextlib
from collections.abc import Callable, Iterator, Mapping

from dist_ens.callbacks import ProgressBar, RunInfo
from dist_ens.checkpoint import OpenCheckpoints
from dist_ens.ensemble.memory import explained_memory
from dist_ens.json_text import Json
from dist_ens.stop_signal import StopSignal
from dist_ens.training.arguments import Door, FitArguments
from dist_ens.training.beginning import Begun, begin_run
from dist_ens.training.best_state import BestState
from dist_ens.training.data_protocol import TrainingData
from dist_ens.training.evaluating import Evaluating
from dist_ens.training.failures import FailedMembers
from dist_ens.training.held_out import EvalData
from dist_ens.training.recording import Recording
from dist_ens.training.runner import Runner
from dist_ens.training.saving import Saving
from dist_ens.training.states import restore_states
from dist_ens.training.watching import Progress, Signals, hold


class Run(Runner):
    """A run with the services of the library.

    Args:
        begun: The run before its first step.
        arguments: Arguments of `fit`.
        data: Training data.
        eval_data: Data to score; None to score nothing.
        opened: Checkpoints of the run; None to save nothing.
        record: Record that is saved with each checkpoint.
        stop: Signal that asks the run to stop.
        say: Function that prints a sentence.
        warn: Function that prints a warning, even where nothing else is printed.
    """

    def __init__(
        self,
        begun: Begun,
        arguments: FitArguments,
        data: TrainingData,
        eval_data: EvalData | None,
        opened: OpenCheckpoints | None,
        record: Mapping[str, Json],
        stop: StopSignal,
        say: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        super().__init__(begun.info, begun.state, begun.batches, stop)
        scores_at = _no_scores
        self.evaluating = self.saving = None
        if eval_data is not None:
            self.evaluating = Evaluating(self, eval_data, opened.member_score if opened else None)
            scores_at = self.evaluating.scores_at
        self.failures = FailedMembers(begun.info.ensemble, self.step, self.state, warn, opened)
        self.best = BestState(self, data.batch, opened, scores_at, say)
        if opened is not None:
            self.saving = Saving(self, opened, record, data, self.failures, self.best, scores_at)
        self.services = [
            Progress(),
            Signals(self),
            self.failures,
            Recording(self, arguments.log_every),
            *arguments.callbacks,
            *([ProgressBar()] if arguments.progress else []),
            *([self.evaluating] if self.evaluating else []),
            self.best,
            *([self.saving] if self.saving else []),
        ]


def _no_scores(step: int) -> dict[str, float]:
    """Returns the scores of a run that scores nothing."""
    return {}


@contextlib.contextmanager
def running(
    arguments: FitArguments,
    data: TrainingData,
    eval_data: EvalData | None,
    info: RunInfo,
    door: Door,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> Iterator[Run]:
    """A context in which a run is trained. Its state is initialised or restored before.

    Args:
        arguments: Arguments of `fit`.
        data: Training data.
        eval_data: Data to score; None to score nothing.
        info: Ensemble to train, and steps of the whole run.
        door: Record of the run, and the check that it may be resumed.
        say: Function that prints a sentence.
        warn: Function that prints a warning, even where nothing else is printed.
    """
    checkpoints, record = arguments.checkpoints, door.record
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignal())
        hold(info.ensemble)
        opened = None
        if checkpoints is not None and record is not None:
            opened = stack.enter_context(
                checkpoints.open(
                    record.to_dict(),
                    check=door.check_resume,
                    say=warn,
                    directions=info.directions,
                )
            )
        stack.enter_context(explained_memory(info.ensemble))
        begun = begin_run(arguments, data, info, opened, say, warn)
        for note in opened.notes if opened else ():
            say(f"Note: {note}")
        if record is not None:
            record = record.chosen(
                begun.execution, begun.info.ensemble.layout.mesh.size, begun.steps_per_call
            )
        saved_record = {} if record is None else record.to_dict()
        run = Run(begun, arguments, data, eval_data, opened, saved_record, stop, say, warn)
        if checkpoints is not None and opened is not None and opened.saved_step:
            restore_states(run.services, opened, checkpoints)
        stop.listen()  # A signal before this line ends the process, as no progress is lost.
        stack.enter_context(run.closing())
        run.begin()
        yield run
