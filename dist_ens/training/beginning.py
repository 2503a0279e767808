"""The beginning of a run: its state, its execution and its batches."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

from dist_ens.callbacks import RunInfo
from dist_ens.checkpoint import OpenCheckpoints
from dist_ens.data import parts_of
from dist_ens.ensemble import Batches, Ensemble
from dist_ens.ensemble.batches import CallBatches
from dist_ens.ensemble.initial_state import set_label_scale
from dist_ens.ensemble.microbatches import microbatch_warning
from dist_ens.ensemble.select_execution import choose
from dist_ens.ensemble.stopping import finished, saved_structures, with_stopping
from dist_ens.execution.lowerings import CONVOLUTION, PRODUCT
from dist_ens.execution.rewrite import contains, equations
from dist_ens.execution.spec import AUTO
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.json_text import Json
from dist_ens.ground.state import State, check_alive, differing, leaf_types
from dist_ens.ground.types import Shapes
from dist_ens.layout import MEMBERS, Layout, connect_hosts, copied_like, to_host
from dist_ens.processes import cluster
from dist_ens.storage import place_of
from dist_ens.training.batch_iterable import BatchIterable
from dist_ens.training.data_protocol import TrainingData
from dist_ens.training.preparing import Job
from dist_ens.training.saving import saved_position

# Aimed duration of a call in seconds. Dispatching a call takes less than a hundredth of it. On a
# CPU, a call must also be long enough for a member's state to stay in the cache for several steps.
_CALL_SECS = {"cpu": 0.5}
_CALL_SECS_OF_ACCELERATORS = 0.02
# Order of magnitude of the operations per second of all devices of a CPU together, and of one
# accelerator.
_CPU_FLOPS, _ACCELERATOR_FLOPS = 1e11, 5e13
_MOST_STEPS = 64


@dataclasses.dataclass(frozen=True)
class Begun:
    """A run before its first step, with the ensemble in the execution that it uses."""

    info: RunInfo
    state: State
    steps_per_call: int
    batches: Iterator[CallBatches]


def begin_run(job: Job, opened: OpenCheckpoints | None) -> Begun:
    """Returns a run before its first step."""
    train, info, say, checkpoints = job.data, job.info, job.say, job.arguments.checkpoints
    connect_hosts(info.ensemble.layout)
    ensemble, restored = _resumed(job, opened)
    state, first_step = _first_state(job, ensemble, opened, restored)
    callbacks = job.arguments.callbacks
    of_members = [each for each in callbacks if getattr(each, "stops_members", False)]
    state = with_stopping(
        state,
        stops=bool(of_members) or ensemble.failure_policy.policy == "drop",
        keeps_best=any(getattr(each, "keeps_best", False) for each in of_members),
    )
    if first_step > info.last_step:
        raise UserError(
            f"The run has {counted(first_step, 'step')} already, and {info.last_step:,} are asked "
            "for. Give more steps, or another folder."
        )
    if opened is not None and opened.saved_step:  # The choice of the execution draws a batch.
        train.restore(saved_position(opened), first_step, say)
    steps_per_call = _steps_per_call(job, ensemble, state, opened)
    info = info._replace(member_ids=ensemble.ids.tolist(), first_step=first_step)
    batches = train.batches(ensemble.layout, info, steps_per_call, say)
    if first_step < info.last_step and ensemble.execution == AUTO:
        first = next(batches)
        folder = None if checkpoints is None else place_of(checkpoints.folder, "folder")
        may_move = not isinstance(train, BatchIterable) and not ensemble.layout.is_fixed
        chosen, choice = choose(
            ensemble, state, first, info.last_step, workdir=folder, may_move=may_move
        )
        say(str(choice))
        if chosen.layout is ensemble.layout:
            batches = itertools.chain(iter([first]), batches)
        else:
            state = chosen.layout.moved(state, MEMBERS)
            batches = train.batches(chosen.layout, info, steps_per_call, say)
        ensemble = chosen
    if first_step < info.last_step and restored is None and ensemble.microbatches > 1:
        first = next(batches)
        if warning := microbatch_warning(ensemble, state, first):
            job.warn(warning)
        batches = itertools.chain(iter([first]), batches)
    return Begun(info._replace(ensemble=ensemble), state, steps_per_call, batches)


def _first_state(
    job: Job, ensemble: Ensemble, opened: OpenCheckpoints | None, restored: State | None
) -> tuple[State, int]:
    """Returns the state that was restored, the given one or a new one, and its step."""
    state, checkpoints, train = job.arguments.state, job.arguments.checkpoints, job.data
    if restored is not None and opened is not None:
        if state is not None and checkpoints is not None:
            job.say(
                "Note: the given state is not used, since the folder "
                f"{quoted(str(checkpoints.folder))} holds step {opened.saved_step:,} of this run, "
                "which is resumed. Choose another folder to start from the given state."
            )
        return restored, opened.saved_step
    if state is None:
        return _with_label_scale(ensemble, ensemble.init(train.batch), train), 0
    given = finished(state)._replace(class_names=())
    state, step = _given_state(ensemble, given, train.batch)
    return (state if step else _with_label_scale(ensemble, state, train)), step


def _resumed(job: Job, opened: OpenCheckpoints | None) -> tuple[Ensemble, State | None]:
    """Returns the ensemble and the state of the newest sound checkpoint; None without one."""
    ensemble = job.info.ensemble
    saved = (None if opened is None else opened.saved_record) or {}
    names = sorted(saved.get("hyper") or {})
    if saved and names != [*ensemble.hyper]:
        raise UserError(
            f"hyper has {', '.join(ensemble.hyper) or 'no settings'}, and that of the run has "
            f"{', '.join(names) or 'none'}. resume='anyway' takes other values of the same names."
        )
    while opened is not None and opened.saved_step:
        as_saved = _as_saved(ensemble, opened)
        structures = saved_structures(as_saved.abstract_state(job.data.batch))
        state = opened.restore_state(*structures, member_ids=as_saved.ids.tolist())
        if state is not None:
            state = as_saved.with_record(state)
            checkpoints = job.arguments.checkpoints
            if state.hyper and checkpoints is not None and checkpoints.resume == "anyway":
                with jax.transfer_guard("allow"):
                    own = copied_like(dict(as_saved.hyper), state.hyper)
                state = state._replace(hyper=own)
            return as_saved, state
        # The checkpoint is damaged, and `opened` is at an older one.
    return ensemble, None


def _as_saved(ensemble: Ensemble, opened: OpenCheckpoints) -> Ensemble:
    """Returns an ensemble with the execution of the run that is resumed, unless one is given."""
    saved = opened.saved_record or {}
    layout = ensemble.layout
    if ensemble.execution != AUTO or not saved.get("execution") or layout.model_axis > 1:
        return ensemble
    had_one_device = cluster.cores_are_devices() and saved.get("num_devices") == 1
    if had_one_device and not layout.is_fixed:
        layout = layout.on_one_device()
    return ensemble.on(layout, saved["execution"])


def _given_state(ensemble: Ensemble, state: State, batch: Shapes) -> tuple[State, int]:
    """Returns a copy of a given state on the ensemble's layout, and its step."""
    check_alive(state.step)
    like, state = ensemble.abstract_state(batch), ensemble.with_record(state)
    expected, found = leaf_types(like), leaf_types(state)
    for name in differing(expected, found):
        raise UserError(
            f"The given state does not fit this ensemble: leaf {name} is "
            f"{found.get(name, 'absent')} there and {expected.get(name, 'absent')} here. Give a "
            "state of the same network, optimizer and number of members."
        )
    with jax.transfer_guard("allow"):
        for name, values in to_host(state.hyper or {}).items():
            if not np.array_equal(values, ensemble.hyper[name]):
                raise UserError(
                    f"The given state has hyper[{name!r}]={repr(values.tolist())[:200]}, and the "
                    f"ensemble {repr(ensemble.hyper[name].tolist())[:200]}. Give the values of the "
                    "state to the ensemble, or begin without a state."
                )
        member_ids = to_host(state.member_id).tolist()
        # The arrays count modulo 2^32, so that a step from 2^31 on is negative there.
        steps = {int(step) % 2**32 for step in to_host(state.step)}
    if member_ids != ensemble.ids.tolist() or len(steps) != 1:
        raise UserError(
            f"The given state holds the members {member_ids} at the steps {sorted(steps)}, and the "
            f"ensemble has the members {ensemble.ids.tolist()}. Make the ensemble with "
            f"member_ids={member_ids}, and give a state whose members are at one step."
        )
    # Nodes without arrays may differ, such as () for the model state of a network without one.
    leaves = dict(zip(found, jax.tree.leaves(state), strict=True))
    state = jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in expected])
    return copied_like(state, like), steps.pop()


def _with_label_scale(ensemble: Ensemble, state: State, train: TrainingData) -> State:
    """Returns a state at step 0 with the scale of the labels, where the objective needs it."""
    objective = ensemble.objective
    if objective is None or not objective.standardize or train.split is None:
        return state
    parts = parts_of(train.split, [objective.LABELS, objective.WEIGHTS])
    labels, weights = parts[objective.LABELS], parts.get(objective.WEIGHTS)
    return set_label_scale(ensemble.layout, state, labels, objective.label_shape, weights)


def _steps_per_call(
    job: Job, ensemble: Ensemble, state: State, opened: OpenCheckpoints | None
) -> int:
    """Returns the number of steps in one call: the given or the saved one, or a choice."""
    saved: Mapping[str, Json] = (opened.saved_record or {}) if opened else {}
    arguments, train = job.arguments, job.data
    given = arguments.steps_per_call or saved.get("steps_per_call")
    if given is not None:
        return given
    if isinstance(train, BatchIterable) or ensemble.waves > 1:
        return 1
    traced = ensemble.traced_update(state, Batches.shapes_of_step(train.batch, train.index))
    checkpoints = arguments.checkpoints
    cadences = (
        job.info.eval_every,
        arguments.log_every,
        checkpoints.every_steps if checkpoints else None,
        *(getattr(callback, "every", None) for callback in arguments.callbacks),
    )
    # Only calls of one step can end where an epoch of a fractional number of steps ends.
    multiples = [int(each) if each.denominator == 1 else 1 for each in cadences if each is not None]
    return choose_steps_per_call(ensemble.layout, traced, *multiples)


def choose_steps_per_call(layout: Layout, traced_step: ClosedJaxpr, *multiples: int) -> int:
    """Returns the number of steps in a call for which dispatching costs little, at most 64.

    It depends on the network, the batch and the platform, and on no clock, so that a run that
    resumes makes the same calls. The result divides the multiples, which are cadences in steps.
    """
    if layout.platform == "cpu" and contains(traced_step, CONVOLUTION):
        return 1  # The gradient of a convolution is slow inside a loop.
    members = layout.members_per_device
    flops = members * sum(_flops(eqn) for eqn in equations(traced_step.jaxpr))
    if layout.platform == "cpu":
        secs = flops * layout.mesh.size / _CPU_FLOPS
    else:
        secs = flops / _ACCELERATOR_FLOPS
    wanted = _CALL_SECS.get(layout.platform, _CALL_SECS_OF_ACCELERATORS) / max(secs, 1e-9)
    most = max(1, min(_MOST_STEPS, int(wanted)))
    common = math.gcd(*multiples)  # 0 without multiples, which every number divides.
    return max(divisor for divisor in range(1, most + 1) if common % divisor == 0)


def _flops(eqn: Any) -> float:
    """Returns the operations of a matrix product or a convolution; 0 for others."""
    if eqn.primitive is PRODUCT:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * terms
    if eqn.primitive is CONVOLUTION:
        kernel = eqn.invars[1].aval.shape
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / max(kernel)
    return 0.0
