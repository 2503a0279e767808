"""How many steps one call of the update takes, where nobody says it."""

import math
from typing import Any

from jax.extend.core import ClosedJaxpr

from dist_ens.execution.lowerings import CONVOLUTION, PRODUCT
from dist_ens.execution.rewrite import contains, equations
from dist_ens.layout import Layout

# Seconds of a call. Dispatching one takes less than a hundredth of either; on a CPU a call also has
# to be long enough for a member's state to stay in the cache for several of its steps.
_CALL_SECS = {"cpu": 0.5}
_CALL_SECS_OF_ACCELERATORS = 0.02
# Operations per second of all devices of a CPU together, and of one accelerator, to the order of
# magnitude.
_CPU_FLOPS, _ACCELERATOR_FLOPS = 1e11, 5e13
_MOST_STEPS = 64


def choose_steps_per_call(layout: Layout, traced_step: ClosedJaxpr, *multiples: int | None) -> int:
    """Returns how many steps a call takes, so that dispatching it costs little.

    The number depends on the network, the batch and the platform, and on no clock: a run that
    resumes takes the same calls.

    Args:
        layout: Layout of the members and the data.
        traced_step: One step of one member after another, from `Ensemble.traced_update`.
        *multiples: Cadences in steps, such as those of evaluation and logging, of which the result
            is a divisor.
    """
    if layout.platform == "cpu" and contains(traced_step, CONVOLUTION):
        return 1  # in a loop its gradient is slow
    members = layout.members_per_device
    flops = members * sum(_flops(eqn) for eqn in equations(traced_step.jaxpr))
    if layout.platform == "cpu":
        secs = flops * layout.mesh.size / _CPU_FLOPS
    else:
        secs = flops / _ACCELERATOR_FLOPS
    wanted = _CALL_SECS.get(layout.platform, _CALL_SECS_OF_ACCELERATORS) / max(secs, 1e-9)
    most = max(1, min(_MOST_STEPS, int(wanted)))
    common = math.gcd(*(m for m in multiples if m is not None)) if any(multiples) else 0
    if not common:
        return most
    return max(divisor for divisor in range(1, most + 1) if common % divisor == 0)


def _flops(eqn: Any) -> float:
    """Returns the operations of one matrix product or convolution; 0 of others."""
    if eqn.primitive is PRODUCT:
        (contracted, _), _ = eqn.params["dimension_numbers"]
        terms = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * terms
    if eqn.primitive is CONVOLUTION:
        kernel = eqn.invars[1].aval.shape
        return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / max(kernel)
    return 0.0
