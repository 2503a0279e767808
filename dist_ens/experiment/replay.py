"""Training of one member of a finished run once more, alone, and its comparison with the run."""

import dataclasses

import jax
import numpy as np

from dist_ens.checkpoint import saved_step
from dist_ens.checkpoint.leaves import named_leaves
from dist_ens.ensemble.failures import frozen_positions
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.config_file import ConfigFile
from dist_ens.experiment.loaded import open_finished
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError
from dist_ens.ground.state import State
from dist_ens.layout import Layout
from dist_ens.storage import Folder
from dist_ens.training import fit


@dataclasses.dataclass(frozen=True)
class Replay:
    """The comparison of a member of a run with the same member trained alone.

    `differences` has the largest absolute difference in each leaf whose bits differ, divided by the
    largest absolute value of the leaf in the run.
    """

    member: int
    step: int
    execution: str
    differences: dict[str, float]
    num_leaves: int

    @property
    def largest(self) -> tuple[str, float]:
        """The leaf that differs most and its difference; ("", 0) if all bits are the same."""
        return max(
            self.differences.items(),
            key=lambda item: np.inf if np.isnan(item[1]) else item[1],
            default=("", 0.0),
        )


def replay(
    workdir: Folder,
    member: int,
    *,
    until: int | None = None,
    config: ConfigFile | None = None,
    progress: bool = True,
) -> Replay:
    """Trains one member of a run from its first step, alone, and compares it.

    It is trained on one device, or on as many as shared it in the run, if this machine has them.

    The member has the data and the execution of the run, and the seed and the id with which it was
    trained. Nothing is written. The default `until` is the newest step.
    """
    opened = open_finished(workdir, step=until, member_ids=[member], config=config)
    run, [lineage] = opened.config_run, opened.members
    experiment = run.experiment
    if lineage.seed is None and lineage.run is not None:
        raise UserError(f"Member {member} was imported from {quoted(lineage.run)}, not trained.")
    run.require_own_keys(workdir)
    saved = saved_step(workdir, opened.step)
    best, stopped = (
        saved.leaves([member], under=f"stopping.{name}_step").get("")
        for name in ("best", "stopped")
    )
    if best is not None and best[0] not in (-1, opened.step):
        raise UserError(
            f"Member {member} has the parameters of its best evaluation, at step "
            f"{best[0]:,}, and the rest of its state is of another step, so there is "
            "nothing to compare it with."
        )
    is_dropped = lineage.dropped_step is not None
    if stopped is not None and -1 < stopped[0] < opened.step and not is_dropped:
        raise UserError(
            f"Member {member} was stopped at step {stopped[0]:,}, and took no more updates. Set "
            f"--until to at most {stopped[0]:,}, a step of which there is a checkpoint."
        )
    # The comparison needs no scores, and one member of several groups has none.
    source = dataclasses.replace(opened.open_source(), valid=None)
    here = opened.ensemble.layout
    layout = Layout.make(
        1,
        model_axis=here.model_axis,
        model_rules=here.model_rules,
        devices=jax.local_devices()[: here.model_axis],
    )
    of_run = build_ensemble(run, layout, opened.parts, source)
    alone = of_run.replace(
        seed=experiment.seed if lineage.seed is None else lineage.seed,
        member_ids=(lineage.original_id,),
        hyper={**of_run.hyper},  # As numbers, which do not depend on the id.
        waves=1,
    )
    result = fit(
        alone,
        source,
        steps=opened.step,
        batch_size=experiment.data.global_batch_size,
        order=run.order_rule,
        steps_per_call=experiment.steps_per_call,
        progress=progress,
    )
    # A member of a merged run may have been trained under another id.
    trained = result.state._replace(member_id=opened.state.member_id)
    if result.all_failed:
        trained = _at_same_step(opened.state, trained, member)
    return Replay(
        member,
        opened.step,
        str(alone.execution),
        _differences(opened.state, trained),
        len(named_leaves(trained)),
    )


def _at_same_step(saved: State, trained: State, member: int) -> State:
    """Returns the state of a member that was trained alone, at the step of the run.

    The training of a frozen member ends early. In the run only its step has counted on.
    """
    there, here = (int(state.step[0]) % 2**32 for state in (saved, trained))
    if here < there and not frozen_positions(trained):
        raise UserError(f"Member {member} alone failed at step {here:,} of {there:,}. Set --until.")
    return trained._replace(step=saved.step)


def _differences(saved: State, trained: State) -> dict[str, float]:
    """Returns the relative difference of each leaf of two states whose bits differ."""
    ours, others = (jax.device_get(named_leaves(state)) for state in (saved, trained))
    return {
        name: _difference(leaf, others[name])
        for name, leaf in ours.items()
        if leaf.tobytes() != others[name].tobytes()
    }


def _difference(saved: np.ndarray, trained: np.ndarray) -> float:
    """Returns the largest absolute difference, relative to the largest value of the run."""
    there, here = saved.astype(np.float64), trained.astype(np.float64)
    return float(np.max(np.abs(there - here)) / (np.max(np.abs(there)) or 1.0))
