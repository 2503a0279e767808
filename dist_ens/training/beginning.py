"""The beginning of a run: its state, its execution and its batches."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens import cluster
from dist_ens.callbacks import RunInfo
from dist_ens.checkpoint import OpenCheckpoints, ids_text
from dist_ens.commands import quoted
from dist_ens.ensemble import Batches, Ensemble
from dist_ens.ensemble.batches import CallBatches
from dist_ens.ensemble.failures import saved_structures
from dist_ens.ensemble.microbatch_check import microbatch_warning
from dist_ens.ensemble.select_execution import choose
from dist_ens.errors import UserError, counted
from dist_ens.execution.spec import AUTO
from dist_ens.json_text import Json
from dist_ens.layout import MEMBERS, Layout, connect_hosts, copied_like, to_host
from dist_ens.members.label_scale import set_label_scale
from dist_ens.state import State, differing, leaf_types
from dist_ens.training.arguments import FitArguments
from dist_ens.training.batch_iterable import BatchIterable
from dist_ens.training.data import OrderedSplit
from dist_ens.training.data_protocol import TrainingData
from dist_ens.training.states import saved_position
from dist_ens.training.steps_per_call import choose_steps_per_call
from dist_ens.types import Shapes

# Largest number of differing leaves that a message names.
_MOST_NAMED = 5


@dataclasses.dataclass(frozen=True)
class Begun:
    """A run before its first step.

    Attributes:
        info: Steps of the run, and the ensemble with the execution and the layout to use.
        state: State at the first step, on the layout.
        steps_per_call: Number of steps in one call of the update.
        batches: Batches of each call from the first step on.
    """

    info: RunInfo
    state: State
    steps_per_call: int
    batches: Iterator[CallBatches]

    @property
    def execution(self) -> str | None:
        """Execution of the run; None if none was chosen because no step is left."""
        execution = self.info.ensemble.execution
        return None if execution == AUTO else execution


def begin_run(
    arguments: FitArguments,
    train: TrainingData,
    info: RunInfo,
    opened: OpenCheckpoints | None,
    say: Callable[[str], None],
    warn: Callable[[str], None],
) -> Begun:
    """Returns a run before its first step.

    Args:
        arguments: Arguments of `fit`.
        train: Training data.
        info: Ensemble to train, and steps of the whole run.
        opened: Checkpoints of the run; None without checkpoints.
        say: Function that prints a sentence.
        warn: Function that prints a warning, even where nothing else is printed.

    Raises:
        UserError: If the state does not fit, or has more steps than the run.
    """
    connect_hosts(info.ensemble.layout)
    ensemble, restored = _resumed(info.ensemble, train, opened, say)
    saved: Mapping[str, Json] = (opened.saved_record or {}) if opened else {}
    state, first_step = _first_state(arguments, ensemble, train, opened, restored, say)
    if first_step > info.last_step:
        raise UserError(
            f"The run has {counted(first_step, 'step')} already, and {info.last_step:,} are asked "
            "for. Give more steps, or another folder."
        )
    if opened is not None and opened.saved_step:  # The choice of the execution draws a batch.
        train.restore(saved_position(opened), first_step, say)
    steps_per_call = arguments.steps_per_call or saved.get("steps_per_call")
    if steps_per_call is None:
        steps_per_call = _steps_per_call(arguments, info, ensemble, state, train)
    batches_on = partial(
        train.batches,
        first_step=first_step,
        last_step=info.last_step,
        steps_per_call=steps_per_call,
        member_ids=ensemble.ids.tolist(),
        say=say,
    )
    layout = ensemble.layout
    batches = batches_on(layout)
    is_left = first_step < info.last_step
    if ensemble.execution == AUTO and is_left:
        first, checkpoints = next(batches), arguments.checkpoints
        ensemble, choice = choose(
            ensemble,
            state,
            first,
            info.last_step,
            workdir=pathlib.Path(checkpoints.folder) if checkpoints else None,
            may_move=not isinstance(train, BatchIterable) and not layout.is_fixed,
        )
        say(str(choice))
        if ensemble.layout is not layout:
            state = ensemble.layout.moved(state, MEMBERS)
            batches = batches_on(ensemble.layout)
        else:
            batches = _with_first(first, batches)
    if ensemble.microbatches > 1 and restored is None and is_left:
        first = next(batches)
        warning = microbatch_warning(ensemble, state, first)
        if warning is not None:
            warn(warning)
        batches = _with_first(first, batches)
    info = info._replace(ensemble=ensemble, member_ids=ensemble.ids.tolist(), first_step=first_step)
    return Begun(info, state, steps_per_call, batches)


def _first_state(
    arguments: FitArguments,
    ensemble: Ensemble,
    train: TrainingData,
    opened: OpenCheckpoints | None,
    restored: State | None,
    say: Callable[[str], None],
) -> tuple[State, int]:
    """Returns the state that was restored, the given one or a new one, and its step."""
    state = arguments.state
    if restored is not None and opened is not None:
        if state is not None and arguments.checkpoints is not None:
            folder = quoted(str(arguments.checkpoints.folder))
            say(
                f"Note: the given state is not used, since the folder {folder} holds step "
                f"{opened.saved_step:,} of this run, which is resumed. Choose another folder to "
                "start from the given state."
            )
        return restored, opened.saved_step
    if state is None:
        return _with_label_scale(ensemble, ensemble.init(train.batch), train), 0
    state, step = _given_state(ensemble, state._replace(class_names=()), train.batch)
    return (state if step else _with_label_scale(ensemble, state, train)), step


def _resumed(
    ensemble: Ensemble,
    train: TrainingData,
    opened: OpenCheckpoints | None,
    say: Callable[[str], None],
) -> tuple[Ensemble, State | None]:
    """Returns the ensemble and the state of the run that is resumed.

    Args:
        ensemble: Ensemble to train.
        train: Training data.
        opened: Checkpoints of the run; None without checkpoints.
        say: Function that prints a sentence.

    Returns:
        The ensemble with the execution of that run, without the members that it has dropped, and
        the state of its newest sound checkpoint.
        The given ensemble and None if there is no checkpoint.
    """
    while opened is not None and opened.saved_step:
        as_saved = _without_dropped(_as_saved(ensemble, opened), opened)
        structures = saved_structures(as_saved.abstract_state(train.batch))
        state = opened.restore_state(*structures, member_ids=as_saved.ids.tolist())
        if state is not None:
            gone = sorted({*ensemble.ids.tolist()} - {*as_saved.ids.tolist()})
            if gone:
                say(
                    f"The members {ids_text(gone)} were dropped. The run goes on with "
                    f"{as_saved.num_members} of {ensemble.num_members} members."
                )
            return as_saved, as_saved.with_record(state)
        # The checkpoint is damaged, and `opened` is at an older one.
    return ensemble, None


def _as_saved(ensemble: Ensemble, opened: OpenCheckpoints) -> Ensemble:
    """Returns an ensemble with the execution and the layout of the run that is resumed.

    Args:
        ensemble: Ensemble to train. It is returned unchanged if its execution is given.
        opened: Checkpoints of the run.
    """
    saved: Mapping[str, Json] = opened.saved_record or {}
    if ensemble.execution != AUTO or not saved.get("execution"):
        return ensemble
    layout = ensemble.layout
    had_one_device = cluster.cores_are_devices() and saved.get("num_devices") == 1
    if had_one_device and not layout.is_fixed:
        layout = layout.on_one_device()
    return ensemble.on(layout, saved["execution"])


def _without_dropped(ensemble: Ensemble, opened: OpenCheckpoints) -> Ensemble:
    """Returns an ensemble of the members that a resumed run still has.

    A member that the policy `drop` gave up leaves the arrays now, if no device then has more
    members, or another part of a batch, than before. Otherwise it stays, and takes no updates.

    Args:
        ensemble: Ensemble to train.
        opened: Checkpoints of the run, with a saved step.

    Raises:
        UserError: If members have left the arrays, and the policy is not `drop` any more.
    """
    ids = ensemble.ids.tolist()
    there = [member for member in opened.members if member.member_id in ids]
    kept = [member.member_id for member in there if member.dropped_step is None]
    drops = ensemble.failures.policy == "drop" and ensemble.num_groups == 1
    if not drops:
        gone = [member_id for member_id in ids if member_id not in {m.member_id for m in there}]
        if gone and len(there) == len(opened.members):
            raise UserError(
                f"The checkpoint of step {opened.saved_step} has the members "
                f"{ids_text(member.member_id for member in there)} and not {ids_text(gone)}. If "
                "the policy 'drop' left them out, set --config.failures.policy=drop "
                "(failures='drop' in Python) to go on with the others."
            )
        return ensemble
    if 0 < len(kept) < len(there):
        layout = _layout_of_fewer(ensemble.layout, len(kept))
        if layout is not None:
            return _of_members(ensemble, kept, layout)
    if 0 < len(there) < len(ids) and len(there) == len(opened.members):  # Some have left before.
        layout = _layout_of_fewer(ensemble.layout, len(there))
        return _of_members(ensemble, [member.member_id for member in there], layout)
    return ensemble


def _layout_of_fewer(layout: Layout, num_members: int) -> Layout | None:
    """Returns a layout of fewer members on rows of the same mesh; None if a row would have more.

    Args:
        layout: Layout of all members. On several hosts, each of them must keep its rows.
        num_members: Number of the members that are left.
    """
    rows = max(k for k in range(1, layout.ensemble_axis + 1) if num_members % k == 0)
    if num_members // rows > layout.members_per_device or jax.process_count() > 1:
        return None
    devices = layout.mesh.devices[:rows].flatten().tolist()
    return Layout.make(num_members, ensemble_axis=rows, devices=devices)


def _of_members(ensemble: Ensemble, member_ids: list[int], layout: Layout | None) -> Ensemble:
    """Returns an ensemble of some members, in as many waves, on a layout or the default one."""
    some = ensemble.with_members(member_ids)
    return some.replace(layout=layout or some.layout, waves=ensemble.waves)


def _with_first(first: CallBatches, rest: Iterator[CallBatches]) -> Iterator[CallBatches]:
    """Yields a first batch, and then the others."""
    yield first
    del first  # Its memory can be reused.
    yield from rest


def _given_state(ensemble: Ensemble, state: State, batch: Shapes) -> tuple[State, int]:
    """Returns a copy of a given state on the ensemble's layout, and its step.

    Args:
        ensemble: Ensemble to train.
        state: State that was given.
        batch: Shapes and types of a batch.

    Raises:
        UserError: If the state does not fit the ensemble, or its members are at different steps.
    """
    like, state = ensemble.abstract_state(batch), ensemble.with_record(state)
    expected, found = leaf_types(like), leaf_types(state)
    if expected != found:
        raise UserError(
            "The given state does not fit this ensemble: "
            f"{'; '.join(_differences(expected, found))}. Give a state that an "
            "ensemble of the same network, optimizer and number of members made."
        )
    with jax.transfer_guard("allow"):
        member_ids = to_host(state.member_id).tolist()
        # The arrays count modulo 2^32, so that a step from 2^31 on is negative there.
        steps = {int(step) % 2**32 for step in to_host(state.step)}
    if member_ids != ensemble.ids.tolist():
        raise UserError(
            f"The given state holds the members {member_ids}, and the ensemble has the members "
            f"{ensemble.ids.tolist()}. Make the ensemble with member_ids={member_ids}."
        )
    if len(steps) != 1:
        raise UserError(
            f"The members of the given state have seen different numbers of steps: {sorted(steps)}."
            " Give a state whose members have seen the same number."
        )
    # Nodes without arrays may differ, such as () for the model state of a network without one.
    leaves = dict(zip(found, jax.tree.leaves(state), strict=True))
    state = jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in expected])
    return copied_like(state, like), steps.pop()


def _differences(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Returns a clause for each leaf that differs, at most `_MOST_NAMED` and a count."""
    different = [
        f"leaf {name} is {found.get(name, 'absent')} there and {expected.get(name, 'absent')} here"
        for name in differing(expected, found)
    ]
    more = len(different) - _MOST_NAMED
    return [*different[:_MOST_NAMED], *([f"{more} more leaves differ"] if more > 0 else [])]


def _with_label_scale(ensemble: Ensemble, state: State, train: TrainingData) -> State:
    """Returns a state at step 0 with the mean and standard deviation of the training labels.

    The state is returned unchanged if the objective does not standardise labels.
    """
    objective = ensemble.objective
    if objective is None or not objective.standardize or not isinstance(train, OrderedSplit):
        return state
    labels = train.split.take(np.arange(len(train.split)))[objective.LABELS]
    return set_label_scale(ensemble.layout, state, labels)


def _steps_per_call(
    arguments: FitArguments, info: RunInfo, ensemble: Ensemble, state: State, train: TrainingData
) -> int:
    """Returns the number of steps in one call of the update, if it was not given."""
    if isinstance(train, BatchIterable) or ensemble.waves > 1:
        return 1
    index = None
    if isinstance(train, OrderedSplit):
        index = jax.ShapeDtypeStruct((train.order.global_batch_size,), jnp.int32)
    traced = ensemble.traced_update(state, Batches.shapes_of_step(train.batch, index))
    checkpoints = arguments.checkpoints
    cadences = (
        info.eval_every,
        arguments.log_every,
        checkpoints.every_steps if checkpoints else None,
        *(getattr(callback, "every", None) for callback in arguments.callbacks),
    )
    # Only calls of one step can end where an epoch of a fractional number of steps ends.
    multiples = [int(each) if each.denominator == 1 else 1 for each in cadences if each is not None]
    return choose_steps_per_call(ensemble.layout, traced, *multiples)
