"""The state of the best evaluation, which a run keeps, saves and returns."""

from collections.abc import Callable, Mapping

from dist_ens.callbacks import StepInfo
from dist_ens.callbacks.protocol import Service
from dist_ens.checkpoint import OpenCheckpoints
from dist_ens.ensemble.failures import saved_structures
from dist_ens.evaluation import Scores
from dist_ens.ground.state import State
from dist_ens.ground.types import Shapes
from dist_ens.layout import copied, copied_off_devices
from dist_ens.training.runner import Runner


class BestState(Service):
    """The service that keeps the state of the best evaluation, if a callback has a `best_step`.

    A copy of it waits in the hosts' memory. If the run has checkpoints, it is saved too.
    """

    def __init__(
        self,
        run: Runner,
        batch: Shapes,
        opened: OpenCheckpoints | None,
        scores_at: Callable[[int], Mapping[str, float]],
        say: Callable[[str], None],
    ) -> None:
        self._run, self._batch, self._opened = run, batch, opened
        self._scores_at, self._say = scores_at, say
        self._kept: tuple[int, State] | None = None
        self._evaluated_step: int | None = None
        self._due_step: int | None = None

    def is_due(self, step: int) -> bool:
        """Returns whether to save a step because its evaluation was the best so far."""
        return step == self._due_step

    def evaluated(self, step: int, scores: Scores) -> None:
        """Notes that a step was evaluated."""
        self._evaluated_step = step

    def before(self, info: StepInfo) -> None:
        """Keeps the state of an evaluation if it is the best so far."""
        step, self._evaluated_step = self._evaluated_step, None
        if step != info.step:
            return
        is_best = self._run.best_step() == step
        if is_best:
            self._kept = step, copied_off_devices(info.state)
        opened, scores = self._opened, self._scores_at(step)
        if is_best or (opened is not None and opened.is_best(step, scores)):
            self._due_step = step

    def at_end(self, step: int, state: State) -> tuple[int, State] | None:
        """Returns the step and the state of the best evaluation; None without one.

        Every host must call this.
        """
        best = self._run.best_step()
        if best is None or best == step:
            return None if best is None else (step, state)
        kept_step, kept = self._kept or (None, None)
        found = copied(kept, state) if kept_step == best else self._saved_state(best)
        if found is None:
            self._say(
                f"The best evaluation was that of step {best:,}, which is in no sound checkpoint. "
                f"The result is the last state, of step {step:,}."
            )
            return None
        return best, found

    def _saved_state(self, step: int) -> State | None:
        """Returns the state of a checkpoint; None if it is not saved, or damaged."""
        if self._opened is None:
            return None
        ensemble = self._run.info.ensemble
        structures = saved_structures(ensemble.abstract_state(self._batch))
        found = self._opened.restore_at(step, *structures, member_ids=ensemble.ids.tolist())
        return None if found is None else ensemble.with_record(found)
