"""The choice of the number of steps in one call of the update."""

import math
from typing import Any

from jax.extend.core import ClosedJaxpr

from dist_ens.execution.lowerings import CONVOLUTION, PRODUCT
from dist_ens.execution.rewrite import contains, equations
from dist_ens.layout import Layout

# Aimed duration of a call in seconds. Dispatching a call takes less than a hundredth of it. On a
# CPU, a call must also be long enough for a member's state to stay in the cache for several steps.
_CALL_SECS = {"cpu": 0.5}
_CALL_SECS_OF_ACCELERATORS = 0.02
# Order of magnitude of the operations per second of all devices of a CPU together, and of one
# accelerator.
_CPU_FLOPS, _ACCELERATOR_FLOPS = 1e11, 5e13
_MOST_STEPS = 64


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
