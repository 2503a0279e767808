"""The planner of a run, and the smallest model axis with which the run fits on its devices."""

import dataclasses
from collections.abc import Callable, Sequence

import jax

from dist_ens.data.feed import TrainingSet
from dist_ens.ensemble.shared_arrays import shapes_of_shared
from dist_ens.execution.spec import AUTO
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.config_file import OwnParts
from dist_ens.experiment.record import Run
from dist_ens.ground.errors import ExitCode, UserError, counted
from dist_ens.plan.planner import Planner
from dist_ens.processes import cluster


def planner_of(
    run: Run,
    parts: OwnParts,
    devices: Sequence[jax.Device],
    *,
    in_memory: bool,
    are_cores: bool,
    say: Callable[[str], None],
) -> Planner:
    """Returns the planner of a run on some devices.

    Args:
        run: Run, whose number of examples is 0 if it is not known.
        parts: Parts of the run that a config file defines.
        devices: Devices of one kind, which need not be attached to this machine.
        in_memory: Whether the training examples are in the memory of the hosts.
        are_cores: Whether the devices are the cores of this CPU.
        say: Function that prints a line before each compilation.

    Raises:
        UserError: If the model axis of the run is "auto" and the run fits with none.
    """
    # Devices that are not attached hold no arrays.
    parts = dataclasses.replace(parts, shared=shapes_of_shared(parts.member, parts.shared))
    planner = Planner(
        run.experiment,
        run.spec,
        _training_set(run, in_memory) if run.num_train_examples else None,
        run.order_rule.is_per_member(run.spec.num_groups),
        lambda layout: build_ensemble(run, layout, parts),
        [*devices],
        are_cores=are_cores,
        say=say,
    )
    return _with_fitting_axis(planner) if run.experiment.layout.model_axis == AUTO else planner


def _with_fitting_axis(planner: Planner) -> Planner:
    """Returns a planner of the smallest model axis with which the run fits on the devices."""
    count = len(planner.devices)
    for axis in (k for k in range(1, count + 1) if count % k == 0):
        layout = dataclasses.replace(planner.experiment.layout, model_axis=axis)
        experiment = dataclasses.replace(planner.experiment, layout=layout)
        tried = dataclasses.replace(planner, experiment=experiment)
        try:
            fits = any(mesh.fits for mesh in tried.meshes())
        except UserError as error:
            if error.exit_code != ExitCode.IMPOSSIBLE_LAYOUT:
                raise
            planner.say(f"A model axis of {axis} is left out: {error}")
            continue
        if cluster.as_main_sees(fits):
            planner.say(f"layout.model_axis is {axis}, the smallest with which the run fits.")
            return tried
    raise UserError(
        f"The run fits on {counted(count, 'device')} with no model axis. dist-ens plan "
        f"--config.layout.model_axis={count} says what it needs.",
        exit_code=ExitCode.IMPOSSIBLE_LAYOUT,
    )


def _training_set(run: Run, in_memory: bool) -> TrainingSet | None:
    """Returns the training set that the devices may keep; None if the run is too short for it."""
    order = run.order
    call_examples = run.experiment.steps_per_call * order.global_batch_size
    training_set = TrainingSet(order, run.spec.example_bytes, call_examples)
    is_kept = training_set.is_worth_keeping(in_memory=in_memory, last_step=run.num_steps)
    return training_set if is_kept else None
