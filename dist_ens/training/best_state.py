"""The state of the best evaluation, which a run keeps, saves and returns."""

from collections.abc import Callable, Mapping, Sequence

from dist_ens import cluster
from dist_ens.callbacks.protocol import call_hook
from dist_ens.checkpoint import OpenCheckpoints
from dist_ens.ensemble import Ensemble
from dist_ens.ensemble.failures import saved_structures
from dist_ens.layout import copied_off_devices, copied_onto_devices
from dist_ens.state import State
from dist_ens.types import Callback, Shapes


class BestState:
    """The state of the best evaluation so far, if a callback says by `best_step` which it is.

    A copy of it waits in the hosts' memory. If the run has checkpoints, it is saved too, so that a
    run that is resumed has it. On several hosts, the callbacks of process 0 decide.

    Args:
        ensemble: Ensemble of the run.
        batch: Shapes and types of a batch.
        callbacks: Callbacks of the run. The first one that names a step decides.
        opened: Checkpoints of the run; None without checkpoints.
        say: Function that prints a sentence.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        batch: Shapes,
        callbacks: Sequence[Callback],
        opened: OpenCheckpoints | None,
        say: Callable[[str], None],
    ) -> None:
        self._say = say
        self._ensemble, self._batch = ensemble, batch
        self._callbacks, self._opened = callbacks, opened
        self._kept: tuple[int, State] | None = None
        self._due_step: int | None = None

    @property
    def step(self) -> int | None:
        """Step of the best evaluation; None if no callback names one. Every host must ask."""
        named = (call_hook(callback, "best_step") for callback in self._callbacks)
        step = cluster.as_main_sees(next((each for each in named if each is not None), -1))
        return None if step < 0 else step

    def is_due(self, step: int) -> bool:
        """Returns whether to save a step because its evaluation was the best so far."""
        return step == self._due_step

    def evaluated(self, step: int, state: State, scores: Mapping[str, float]) -> None:
        """Keeps the state of an evaluation if it is the best so far. Every host must call this.

        Args:
            step: Number of steps that the state has seen.
            state: State of the ensemble. It may be donated afterwards.
            scores: Scores of the evaluation by name, as they are saved.
        """
        is_best = self.step == step
        if is_best:
            self._kept = step, copied_off_devices(state)
        if is_best or (self._opened is not None and self._opened.is_best(step, scores)):
            self._due_step = step

    def at_end(self, step: int, state: State) -> tuple[int, State] | None:
        """Returns the step and the state of the best evaluation. Every host must call this.

        Args:
            step: Last step of the run.
            state: State at this step.

        Returns:
            None if no callback names a step. Also if a run that was resumed has no sound checkpoint
            of it, which is said.
        """
        best = self.step
        if best is None or best == step:
            return None if best is None else (step, state)
        kept_step, kept = self._kept or (None, None)
        found = copied_onto_devices(kept, state) if kept_step == best else self._saved_state(best)
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
        ensemble = self._ensemble
        structures = saved_structures(ensemble.abstract_state(self._batch))
        found = self._opened.restore_at(step, *structures, member_ids=ensemble.ids.tolist())
        return None if found is None else ensemble.with_record(found)
