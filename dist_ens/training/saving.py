"""The checkpoints of a run, with the states of its services, and that of its best evaluation."""

import json
import operator
from collections.abc import Callable, Mapping, Sequence

import jax

from dist_ens.callbacks import StepInfo
from dist_ens.callbacks.protocol import OWN, Service, call_hook, name_of_callback
from dist_ens.checkpoint import (
    RESULT_FILE,
    Checkpoints,
    OpenCheckpoints,
    Snapshot,
    leaves_off_devices,
)
from dist_ens.ensemble.stopping import saved_structures
from dist_ens.evaluation import Scores
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError, first_line
from dist_ens.ground.json_text import Json, JsonDict
from dist_ens.ground.state import State
from dist_ens.ground.types import Callback, Shapes
from dist_ens.layout import copied, copied_off_devices
from dist_ens.training.cadence import Cadence
from dist_ens.training.data_protocol import TrainingData
from dist_ens.training.evaluating import Evaluating
from dist_ens.training.failure_response import (
    FailureResponse,
    finite_members,
    has_finite_member,
)
from dist_ens.training.runner import Runner

# Files of a checkpoint. Any host may read the first one of another. The second one is of one host.
_SHARED, _OF_HOST = "services", "position"
# Files of a checkpoint whose last step has not been scored by the run.
EVALUATION_IS_OWED = {
    _SHARED: json.dumps([{"name": f"{OWN}{Evaluating.__qualname__}", "state": True}]).encode()
}
Taken = tuple[Callback, Json]  # A service, and its state.
_PATIENCE_SECS = 10.0  # Time that a save which is due waits for the one before it.


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
            self._kept = step, copied_off_devices(self._run.compaction.joined(info.state))
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


class Saving(Service):
    """The service that saves the state of a run, and the states of its services and its data."""

    def __init__(
        self,
        run: Runner,
        opened: OpenCheckpoints,
        cadence: Cadence,
        record: Mapping[str, Json],
        data: TrainingData,
        failure_response: FailureResponse,
        best: BestState,
        scores_at: Callable[[int], Mapping[str, float]],
    ) -> None:
        self._run, self._opened, self._cadence = run, opened, cadence
        self._record, self._data = record, data
        self._is_late = False  # Whether a save is due, and the one before it has not ended.
        # States of the callbacks before they were given scores, until all have taken them.
        self._before_scores: list[Taken] | None = None
        self._failure_response, self._best, self._scores_at = failure_response, best, scores_at

    def before(self, info: StepInfo) -> None:
        """Saves the state if the cadence, the best evaluation or the end of the run asks for it."""
        self._opened.require_held()
        is_due = self._cadence.is_due(info.step) and info.step > self._run.info.first_step
        if info.is_last or (self._run.is_interrupted and info.step > 0):
            self._save(info, is_last=True)
        elif self._best.is_due(info.step):
            self._save(info, is_last=False)
        elif is_due or self._is_late:
            # A server that does not answer must not keep the run waiting.
            self._is_late = not self._opened.is_free(0 if self._is_late else _PATIENCE_SECS)
            if not self._is_late:
                self._save(info, is_last=False)

    def scored(self) -> None:
        """Keeps the states of the callbacks, which are given scores next."""
        own = [each for each in self._run.services if not isinstance(each, Service)]
        self._before_scores = taken_states(own)

    def evaluated(self, step: int, scores: Scores) -> None:
        """Notes that all callbacks have taken the scores."""
        self._before_scores = None

    def failed(self, info: StepInfo) -> None:
        """Saves the state whose evaluation failed. On several hosts, others would not take part."""
        if jax.process_count() == 1:
            self._save(info._replace(is_last=False), is_last=True)

    def wait(self) -> None:
        """Waits until the last save is on disk."""
        self._opened.wait()

    def _save(self, info: StepInfo, *, is_last: bool) -> None:
        """Starts to save a checkpoint, after which nothing is saved if `is_last`."""
        step, reader, state = info.step, self._run.reader, self._run.compaction.joined(info.state)
        # The metrics of a checkpoint's steps are written before it. On one host, the thread that
        # saves reads them, and looks at the parameters that it has copied. Several hosts do both
        # together, in their main threads.
        is_alone = jax.process_count() == 1
        if not is_alone:
            reader.catch_up()
            has_finite = bool(finite_members(state.params, self._run.info.ensemble).any())
            if not self._failure_response.may_replace_checkpoints(
                step, has_finite_member=has_finite
            ):
                return

        kept_step = self._run.best_step()
        if self._opened.is_saved(step):  # The run may have been killed before it deleted others.
            self._opened.delete_oldest(kept_step)
            return
        if self._before_scores is None:
            taken = taken_states(self._run.services)
        else:  # An error or a signal came between. The resumed run gives the scores to all again.
            own = [each for each in self._run.services if isinstance(each, Service)]
            taken = [*self._before_scores, *taken_states(own)]
        states = files_of_states(taken, self._data, step)
        leaves = leaves_off_devices(state)

        def before() -> Mapping[str, bytes] | None:
            reader.catch_up(step)
            self._run.call_all("sync")
            files = states()
            is_wanted = not is_alone or self._failure_response.may_replace_checkpoints(
                step, has_finite_member=has_finite_member(leaves)
            )
            return files if is_wanted else None

        is_named = info.is_last and kept_step is not None
        snapshot = Snapshot(
            step,
            leaves,
            self._record,
            scores=self._scores_at(step),
            host_files={RESULT_FILE: str(kept_step).encode()} if is_named else {},
            kept_step=kept_step,
            before=before,
        )
        self._opened.save(snapshot, is_last=is_last)


def taken_states(services: Sequence[Callback]) -> list[Taken]:
    """Returns the services that can be restored, each with its present state."""
    return [(each, _plain(each, call_hook(each, "state"))) for each in _with_state(services)]


def files_of_states(
    states: Sequence[Taken], data: TrainingData, step: int
) -> Callable[[], dict[str, bytes]]:
    """Returns a function that returns the files with the states of services and data, by name.

    The position in the data is taken now. The state of a service may be a function, which is called
    by the thread that saves, once the metrics of the step have been read.
    """
    position = _plain(data, data.position(step))

    def files() -> dict[str, bytes]:
        found: dict[str, list[Json]] = {}
        for service, taken in states:
            state = taken() if callable(taken) else taken
            if state is not None or not isinstance(service, Service):
                entry = {"name": name_of_callback(service), "state": state}
                found.setdefault(_SHARED, []).append(entry)
        if position is not None:
            found[_OF_HOST] = [{"name": name_of_callback(data), "state": position}]
        return {file: json.dumps(entries).encode() for file, entries in found.items()}

    return files


def restore_states(
    services: Sequence[Callback], opened: OpenCheckpoints, checkpoints: Checkpoints
) -> None:
    """Restores the states of services and callbacks in a run that is resumed.

    `resume="anyway"` restores the callbacks with the name of a saved one.
    """
    saved = [(each["name"], each["state"]) for each in _read(opened, _SHARED)]
    with_state = _with_state(services)
    given = [name_of_callback(each) for each in with_state if not isinstance(each, Service)]
    found = [name for name, _ in saved if not name.startswith(OWN)]
    if found and given != found and checkpoints.resume == "same":
        raise UserError(
            f"{quoted(checkpoints.folder)} holds states of the callbacks {', '.join(found)}, and "
            f"this run has {', '.join(given) or 'none'}. Give the same callbacks in the same "
            "order, or set resume='anyway' to begin others anew."
        )
    for service in with_state:
        names = [name for name, _ in saved]
        if name_of_callback(service) in names:
            _, state = saved.pop(names.index(name_of_callback(service)))
            call_hook(service, "restore", state)


def saved_position(opened: OpenCheckpoints) -> Json:
    """Returns the position of this host in the data; None if the step determines it."""
    return next((each["state"] for each in _read(opened, _OF_HOST)), None)


def _read(opened: OpenCheckpoints, file: str) -> list[JsonDict]:
    stored = opened.restore_host_file(file, is_shared=file == _SHARED)
    return [] if stored is None else json.loads(stored)


def _with_state(services: Sequence[Callback]) -> list[Callback]:
    return [service for service in services if hasattr(service, "restore")]


def _plain(service: Callback, state: object) -> Json:
    """Returns a copy of a state in types that JSON holds; the state itself if it is a function."""
    if isinstance(service, Service) and callable(state):
        return state
    try:
        return json.loads(json.dumps(state, default=operator.methodcaller("item")))
    except (AttributeError, TypeError, ValueError) as error:
        name = name_of_callback(service)
        raise UserError(
            f"The state of the callback {name} cannot be saved: {first_line(error)} Return what "
            f"JSON can hold from {name}.state, such as a dict of numbers."
        ) from error
