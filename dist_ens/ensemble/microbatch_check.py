"""Comparison of the loss of a whole batch with that of its microbatches, before training."""

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens import cluster
from dist_ens.ensemble.batches import CallBatches, one_step
from dist_ens.ensemble.gradient_step import GradientStep
from dist_ens.ensemble.gradients import loss_of_member
from dist_ens.ensemble.microbatches import loss_in_parts
from dist_ens.ensemble.update_steps import steps_of_all
from dist_ens.execution.spec import Execution
from dist_ens.layout import Layout, to_host
from dist_ens.losses.averaging import averaged
from dist_ens.randomness import UPDATE, pinned_generator
from dist_ens.state import State
from dist_ens.types import Batch, Metrics

# Number of draws of each loss, since dropout and other noise are drawn for each part anew.
_DRAWS = 8
# Differences that are rounding, relative to the loss, or noise, in standard errors.
_ROUNDING, _NOISE = 1e-3, 8.0


def microbatch_warning(
    step: GradientStep, layout: Layout, state: State, batches: CallBatches
) -> str | None:
    """Returns a warning if the loss of a batch is not the mean over its microbatches.

    Args:
        step: Step of one member, with several microbatches.
        layout: Layout of the members and the data.
        state: State of the members. It is not donated.
        batches: Batches of a call, of which the first is compared.

    Returns:
        The warning, with both losses. None if they are equal up to rounding and noise, or if the
        whole batch would need more than half of the free memory of a device.
    """

    @pinned_generator()
    def losses(state: State, batch: Batch, index: jax.Array | None) -> tuple[State, Metrics]:
        loss = loss_of_member(step.loss, step.objective, state)
        args = state.params, state.model_state, (batch, index)

        def draw(key: jax.Array) -> Metrics:
            value, _ = loss(*args, key)
            parts = loss_in_parts(loss, step.microbatches, *args, key)
            return {"whole": averaged(value), "parts": parts}

        key = jax.random.fold_in(jax.random.fold_in(state.key, UPDATE), state.step)
        # A program has no use for the state that a step returns.
        rest = state._replace(params=(), model_state=(), opt_state=(), failures=())
        return rest, jax.lax.map(draw, jax.random.split(key, _DRAWS))

    # The members of a device run one after another, so that it needs the memory of one member only.
    of_all = steps_of_all(losses, layout, Execution(members="map"))
    first = jax.jit(lambda state, batches: of_all(state, one_step(batches, jnp.int32(0)))[1])
    needed = np.inf
    try:
        program = first.lower(state, batches).compile()
        memory = program.memory_analysis()
        needed = memory.temp_size_in_bytes if memory is not None else 0
    except jax.errors.JaxRuntimeError as error:
        # The compiler of an accelerator refuses a program that is too large for it.
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
    if cluster.any_host(needed > layout.free_bytes() / 2):
        return None
    found = {
        name: each[0].astype(np.float64) for name, each in to_host(program(state, batches)).items()
    }
    return _warning(found["whole"], found["parts"], step.microbatches)


def _warning(whole: np.ndarray, parts: np.ndarray, count: int) -> str | None:
    """Returns the warning about losses of members and draws, float64[members, draws]."""
    differences = whole - parts
    noise = np.sqrt(differences.var(axis=1, ddof=1).mean() / differences.size)
    if not abs(differences.mean()) > _ROUNDING * np.abs(whole).mean() + _NOISE * noise:
        return None  # So it is for NaN, to which a policy for failures responds.
    return (
        f"The loss of the first batch is {whole.mean():.5g} as a whole, and {parts.mean():.5g} as "
        f"the mean over its {count} microbatches, so its members learn from another loss. Return a "
        "weighted mean as batch_mean(values, weights, ratio=True). A sum, a loss over pairs and "
        "batch statistics depend on the size of the batch: set microbatches=1, or accept the "
        "loss of the parts."
    )
