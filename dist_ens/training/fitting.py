"""`fit`: trains an ensemble. The whole story, top to bottom; it knows no config."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
from rich.console import Console

from dist_ens import cluster
from dist_ens.callbacks import ProgressBar, RunInfo
from dist_ens.callbacks.protocol import call_hook
from dist_ens.checkpoint import Checkpoints, OpenCheckpoints
from dist_ens.ensemble import Ensemble
from dist_ens.errors import UserError
from dist_ens.metrics import Metric
from dist_ens.state import State
from dist_ens.training.beginning import begin_run
from dist_ens.training.checks import check_arguments, check_ensemble, check_labels
from dist_ens.training.data import TrainingData, training_data
from dist_ens.training.held_out import check_eval_labels, eval_data_of, with_validation
from dist_ens.training.loop import Loop, Outcome
from dist_ens.training.run_record import record_of

_CALLBACKS_FILE, _POSITION_FILE = "callbacks", "position"


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` returns.

    Attributes:
        ensemble: Ensemble with the execution and the layout that were used.
        state: State of the ensemble, on its layout.
        history: Records of metrics, one for each logging interval and evaluation: dicts from names
            such as "train/loss" or "test/nll/member_03" to numbers, with the "step".
        scores: Scores of the evaluation data at the end; None without evaluation data, or if the
            run was stopped before its end.
        step: Number of steps that the state has seen.
        signal: Number of the signal that stopped the run; None if none did.
        seconds: Seconds from the beginning to the end; compilation, evaluation and saving included.
        steps_per_second: Pace of training, without the first call, which compiles.
        evaluation: The last evaluation in full, for a report.
    """

    ensemble: Ensemble
    state: State
    history: list[dict[str, float]]
    scores: Any
    step: int
    signal: int | None = None
    seconds: float = 0.0
    steps_per_second: float = 0.0
    evaluation: Any = None

    def __repr__(self) -> str:
        return (
            f"FitResult(step={self.step}, num_members={self.ensemble.num_members}, "
            f"execution={self.ensemble.execution!r}, scores={self.scores!r})"
        )


class RunRecord(Protocol):
    """What a checkpoint belongs to, in the words of one of the two doors."""

    def chosen(self, execution: str, num_devices: int, steps_per_call: int) -> "RunRecord":
        """Returns the record with what was chosen when the run began."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data that JSON can hold."""
        ...


def fit(
    ensemble: Ensemble,
    data: Any,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    state: State | None = None,
    callbacks: Sequence[Any] = (),
    checkpoints: Checkpoints | None = None,
    eval_data: Any = None,
    eval_every: int | None = None,
    validation: float | None = None,
    metrics: Sequence[Metric] = (),
    steps_per_call: int | None = None,
    log_every: int = 100,
    progress: bool = True,
    record: RunRecord | None = None,
    say: Callable[[str], None] | None = None,
    check_resume: Callable[[Mapping[str, Any]], None] | None = None,
) -> FitResult:
    """Trains an ensemble.

    Args:
        ensemble: Ensemble to train. With `execution="auto"` the candidates are timed first.
        data: Training data: a dict (or another pytree) of arrays [examples, ...], which stay on the
            devices if they fit; a source of `dist_ens.data`; or an iterable of batches, such as a
            Grain dataset, a PyTorch DataLoader or a function that returns an iterator. On several
            hosts an iterable yields each host's own part of the batch.
        steps: Number of steps that the state will have seen at the end, those of a given or
            restored state included. Exactly one of `steps` and `epochs` must be given.
        epochs: Number of passes over the training examples.
        batch_size: Number of examples of a step, over all hosts. Default: 128, or all examples if
            there are fewer.
        state: State to start from, of any layout; it is not used up. Default: `ensemble.init`.
        callbacks: Callbacks and writers; see `dist_ens.callbacks`.
        checkpoints: Where and when to save. A folder that holds this run resumes it.
        eval_data: Data to score, of the same keys as the training data.
        eval_every: Number of steps between two evaluations. Default: only at the end.
        validation: Share of the training examples that are held out and scored, in (0, 1).
        metrics: Metrics of the scores beside those of the objective.
        steps_per_call: Number of steps in one call of the update. Default: as many as keep the
            devices busy.
        log_every: Number of steps between two records of training metrics.
        progress: Whether to show the progress.
        record: What a checkpoint belongs to. Default: the names of the ensemble's parts and a
            fingerprint of its step.
        say: Function that prints a sentence. Default: the console, if `progress`.
        check_resume: Function that refuses to resume a saved record.

    Returns:
        The trained ensemble. A run that is interrupted by Ctrl-C saves, and returns its state.

    Raises:
        UserError: If an argument cannot be used; before anything is compiled where that is
            possible.

    >>> import numpy as np, optax
    >>> from dist_ens.losses import categorical
    >>> network = (
    ...     lambda key: {"w": jax.random.normal(key, (3, 2))},
    ...     lambda params, inputs: inputs @ params["w"],
    ... )
    >>> ensemble = Ensemble(network, optax.sgd(0.1), categorical(2), num_members=4)
    >>> x = np.random.default_rng(0).normal(size=(64, 3))
    >>> data = {"inputs": x, "labels": (x[:, 0] > 0).astype(int)}
    >>> result = fit(ensemble, data, steps=20, batch_size=16, progress=False)
    >>> int(result.state.step[0])
    20
    """
    # 1. Everything is checked before anything is written.
    check_arguments(
        ensemble,
        steps,
        epochs,
        steps_per_call,
        eval_every,
        log_every,
        checkpoints,
        state,
        callbacks,
    )
    if say is None:
        say = _print if progress and cluster.is_main() else _be_silent
    data, held_out = with_validation(data, validation)
    train = training_data(data, batch_size, ensemble.seed, ensemble.layout)
    given = eval_data
    if eval_data is not None or held_out is not None:
        eval_data = eval_data_of(eval_data, held_out, metrics)
    check_labels(ensemble, train, say)
    check_ensemble(ensemble, train.batch)
    if eval_data is not given:  # Whoever gives an EvalData has checked it.
        check_eval_labels(ensemble, eval_data.split, train.batch)
    last_step = _last_step(steps, epochs, train)
    record = record or record_of(ensemble, train.batch)
    callbacks = [*callbacks, *([ProgressBar()] if progress else [])]

    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(cluster.StopSignal())
        opened = None
        if checkpoints is not None:
            opened = stack.enter_context(checkpoints.open(record.to_dict()))
            if opened.saved_record is not None and check_resume is not None:
                check_resume(opened.saved_record)
            for note in opened.notes:
                say(f"Note: {note}")
        # 2. The state is born on the mesh, or restored onto it; then the execution is chosen.
        begun = begin_run(
            ensemble,
            train,
            state=state,
            opened=opened,
            last_step=last_step,
            steps_per_call=steps_per_call,
            cadences=(eval_every, log_every, checkpoints.every_steps if checkpoints else None),
            folder=checkpoints.folder if checkpoints else None,
            say=say,
        )
        _restore(train, callbacks, opened, begun.first_step, say)
        record = record.chosen(
            begun.ensemble.execution, begun.ensemble.layout.mesh.size, begun.steps_per_call
        )
        run = RunInfo(
            begun.ensemble,
            begun.ensemble.ids.tolist(),
            begun.first_step,
            last_step,
            jax.tree.leaves(train.batch)[0].shape[0],
        )
        loop = Loop(
            run,
            callbacks=callbacks,
            eval_data=eval_data,
            eval_every=eval_every,
            log_every=log_every,
            opened=opened,
            record=record.to_dict(),
            host_files=partial(_host_files, train, callbacks),
        )

        # 3. The loop: evaluate, save, take the batch, update.
        stop.listen()  # until here there was nothing to lose
        outcome = loop.run(begun.state, begun.batches, stop)
    return _result(begun.ensemble, outcome)


def _restore(
    train: TrainingData,
    callbacks: Sequence[Any],
    opened: OpenCheckpoints | None,
    first_step: int,
    say: Callable[[str], None],
) -> None:
    """Puts the data and the callbacks where they were at a checkpoint."""
    resumed = opened is not None and opened.saved_step > 0
    position = opened.restore_host_file(_POSITION_FILE) if resumed and opened else None
    train.restore(position, first_step, say)
    stored = opened.restore_host_file(_CALLBACKS_FILE) if resumed and opened else None
    states = json.loads(stored) if stored else []
    with_state = [callback for callback in callbacks if hasattr(callback, "restore")]
    for callback, of_callback in zip(with_state, states, strict=False):
        callback.restore(of_callback)


def _host_files(train: TrainingData, callbacks: Sequence[Any]) -> dict[str, bytes]:
    """Returns what this host saves beside the state: positions in data, and states of callbacks."""
    files = {}
    position = train.position()
    if position is not None:
        files[_POSITION_FILE] = position
    states = [call_hook(each, "state") for each in callbacks if hasattr(each, "restore")]
    if states:
        files[_CALLBACKS_FILE] = json.dumps(states).encode()
    return files


def _last_step(steps: int | None, epochs: float | None, train: TrainingData) -> int:
    if steps is not None:
        return int(steps)
    if train.epoch_steps is None or epochs is None:
        raise UserError(
            f"epochs={epochs} was given with an iterable, whose length is not known. Give steps."
        )
    return max(1, math.ceil(round(epochs * train.epoch_steps, 6)))  # rounding begins no step


def _result(ensemble: Ensemble, outcome: Outcome) -> FitResult:
    return FitResult(
        ensemble=ensemble,
        state=outcome.state,
        history=outcome.history,
        scores=outcome.scores,
        step=outcome.step,
        signal=outcome.signal,
        seconds=outcome.seconds,
        steps_per_second=outcome.steps_per_second,
        evaluation=outcome.evaluation,
    )


def _print(sentence: str) -> None:
    Console(markup=False, highlight=False).print(sentence, soft_wrap=True)


def _be_silent(sentence: str) -> None:
    pass
