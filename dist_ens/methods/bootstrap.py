"""The bootstrap: each member weights the examples by their counts in a random sample."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp

from dist_ens.ground.errors import UserError
from dist_ens.ground.randomness import EXAMPLES, pinned_generator
from dist_ens.ground.types import Batch, Key, ModelState, Params
from dist_ens.methods.loss import LossInfo, LossResults, MemberLoss, Method

# A Poisson variable of mean 1 exceeds this value less than once in 10**9 draws.
_MOST = 12


@pinned_generator()
def poisson_weight(key: Key, index: jax.Array) -> jax.Array:
    """Draws the count of each example in a member's bootstrap sample, float32[...].

        count ~ Poisson(1)

    For many examples, the counts are distributed as in a sample with replacement. A fraction 1 / e
    of the examples, about a third, has count 0. Counts depend on the key of the member's examples
    and on their positions in the split, `index`, alone, so they are the same at every step.

    >>> counts = poisson_weight(jax.random.key(0), jnp.arange(1000))
    >>> bool(abs(counts.mean() - 1) < 0.1)
    True
    """
    draw = jnp.vectorize(
        lambda at: jax.random.uniform(jax.random.fold_in(key, at), dtype=jnp.float32)
    )
    # The count is the number of bounds of the distribution function that the draw reaches.
    bounds = itertools.accumulate(math.exp(-1) / math.factorial(k) for k in range(_MOST))
    draws = draw(index)
    return functools.reduce(jnp.add, [(draws >= bound).astype(jnp.float32) for bound in bounds])


def bootstrap() -> Method:
    """Trains each member on its bootstrap sample of the examples.

        loss = (1 / batch) sum_i count_i loss_i,  count_i ~ Poisson(1)

    The counts of an example are the same at every step. All members see the same batches, and about
    a third of the examples have count 0 in a member. The sum is divided by the number of examples,
    or by the sum of the weights, and not by the sum of the counts.

    The method works with every objective, and with losses that take the argument `counts`,
    float[batch], and multiply the loss of each example by it. The data must be arrays or a source,
    whose examples have positions.

    Raises:
        UserError: When the loss is traced, if the batches come from an iterator.

    >>> loss = lambda params, state, batch, info: ((info.counts * batch).mean(), (state, {}))
    >>> info = LossInfo(jax.random.key(0), jax.random.key(1), jnp.int32(0), jnp.arange(4), None)
    >>> value, _ = bootstrap()(loss)({}, {}, jnp.ones(4), info)
    >>> counts = poisson_weight(jax.random.fold_in(info.member_key, EXAMPLES), info.positions)
    >>> bool(value == counts.mean())  # the loss of each example is 1
    True

    Source: Oza and Russell (2001), "Online Bagging and Boosting".
    """

    def method(loss: MemberLoss) -> MemberLoss:
        def weighted(
            params: Params, model_state: ModelState, batch: Batch, info: LossInfo
        ) -> LossResults:
            if info.positions is None:
                raise UserError("bootstrap takes data as arrays or a source, not as an iterator.")
            counts = poisson_weight(jax.random.fold_in(info.member_key, EXAMPLES), info.positions)
            return loss(params, model_state, batch, info._replace(counts=counts))

        return weighted

    method.uses_positions = True  # type: ignore[attr-defined]  # see Ensemble.uses_positions
    method.is_bootstrap = True  # type: ignore[attr-defined]  # see `checked_methods`
    return method
