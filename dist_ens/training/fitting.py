"""`fit`: training of an ensemble, as a story that reads from top to bottom, without configs."""

from collections.abc import Sequence

from dist_ens.checkpoint import Checkpoints
from dist_ens.data import OrderRule
from dist_ens.ensemble import Ensemble
from dist_ens.execution.spec import AUTO
from dist_ens.ground.state import State
from dist_ens.ground.types import Callback, Data
from dist_ens.metrics import Metric
from dist_ens.training.arguments import Door, FitArguments
from dist_ens.training.ending import FitResult, end_run, report_end
from dist_ens.training.evaluating import EvalData
from dist_ens.training.preparing import prepared
from dist_ens.training.services import running


def fit(
    ensemble: Ensemble,
    data: Data,
    *,
    steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    order: OrderRule | None = None,
    state: State | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoints: Checkpoints | None = None,
    eval_data: Data | EvalData | None = None,
    eval_every: int | str | None = None,
    validation: float | None = None,
    metrics: Sequence[Metric | str] = (),
    steps_per_call: int | None = None,
    log_every: int = 100,
    progress: bool = True,
    compact: str = AUTO,
) -> FitResult:
    """Trains an ensemble.

    Args:
        ensemble: Ensemble to train. With `execution="auto"` the candidates are timed first.
        data: Training data, in one of four forms:

            - a dict (or another pytree) of arrays [examples, ...], which stay on the devices if
              they fit. Labels of classes may be their names, an array of text: the classes are
              numbered in the order of the sorted names, which the state keeps;
            - a source of `dist_ens.data`;
            - an iterable of batches, such as a Grain dataset, a PyTorch DataLoader, or a function
              that returns an iterator. On several hosts, it yields the examples of the mesh columns
              in which its host has a device (`layout.host_columns`). Hosts that share a column
              must yield the same examples for it; with `Layout.make(num_members,
              ensemble_axis=1)`, none do. With a data axis of 1, a batch may be any pytree of
              arrays; see `Ensemble.batch_specs` for a longer one;
            - None, for a loss function that draws its own examples from its key. It is given None
              as its batch, and `init` is given None as its inputs.
        steps: Number of steps that the state will have seen at the end. It includes the steps of a
            given or restored state. Exactly one of `steps` and `epochs` must be given.
        epochs: Number of passes over the training examples, positive. A batch that a pass does not
            fill has examples of the next one, so `epochs * examples / batch_size` steps are
            taken, rounded up.
        batch_size: Number of examples of a step, over all hosts. Default: 128, or all examples of
            an epoch if there are fewer.
        order: Rule for which examples of arrays or a source a member sees: `data.shared()`,
            `data.permuted()` or `data.kfold(num_folds)` of `dist_ens.data`. Default: all members
            see the same batches, in a new order in every epoch.
        state: State to start from, of any layout. It is copied and not donated. Arrays and sources
            continue in their order at the state's step, and an iterable continues at its current
            position. Default: `ensemble.init`.
        callbacks: Callbacks and writers; see `dist_ens.callbacks`. They are called after each call
            of the update, not after each step.
        checkpoints: Folder of the run and the times at which it is saved. If the folder holds this
            run, the run resumes and `state` is not used. An iterable is then moved to the saved
            position, if its iterator has `get_state` and `set_state`. Otherwise the batches that
            the run has seen are drawn again and skipped, so the iterable must begin where it began
            in the first run. Default: nothing is saved.
        eval_data: Data to score, with the keys of the training data. Default: nothing is scored,
            unless `validation` is given or a source has a validation split.
        eval_every: Number of steps between two evaluations, or "epoch" for one at the end of each
            pass over the training examples. Default: only at the end.
        validation: Share of the training examples that is held out and scored, in (0, 1). It
            excludes `eval_data`.
        metrics: Metrics of the scores beside those of the objective, or names of its optional
            metrics; see `evaluate`.
        steps_per_call: Number of steps in one call of the update, after which the callbacks are
            called. Default: a number from 1 to 64 that keeps the devices busy.
        log_every: Number of steps between two records of training metrics.
        progress: Whether to show the progress.
        compact: Whether members that a callback or the policy `drop` has stopped leave the arrays,
            so that the others train faster: "auto" if that spares more time than it takes to
            compile their program, or "never". On several hosts, in waves and in groups they always
            stay, and only rest.

    Returns:
        The result of the run. Its state is the last one, or that of the best evaluation if a
        callback such as `EarlyStopping` chooses it. After Ctrl-C or SIGTERM, `fit` saves the state
        so far, if it has `checkpoints`, and returns it.

    Raises:
        UserError: If an argument cannot be used. Most arguments are checked before anything is
            compiled.
        RunError: If a callback raises an exception, the data ends too early, or a checkpoint cannot
            be read or written.

    >>> import jax, numpy as np, optax
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
    # The arguments of this function are the fields of `FitArguments`.
    return run_fit(FitArguments(**locals()), Door())


def run_fit(arguments: FitArguments, door: Door) -> FitResult:
    """Trains an ensemble for a door; see `fit`."""
    # 1. Everything is checked before anything is written.
    job = prepared(arguments, door)
    # 2. The state is made on the mesh, or restored onto it; then the execution is chosen.
    with running(job) as run:
        # 3. The loop: evaluate, save, take the batch, update.
        while run.before():  # What is evaluated and saved is the state at `step`.
            run.update(run.next_batch())
        result = end_run(run, job)
    report_end(run, job, result)
    return result
