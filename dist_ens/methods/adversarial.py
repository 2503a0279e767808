"""Adversarial training on examples and on perturbed copies of them."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from dist_ens.ground.numbers import require_coefficient
from dist_ens.ground.types import Batch, ModelState, Params, PyTree
from dist_ens.losses.averaging import averaged
from dist_ens.methods.loss import LossInfo, LossResults, MemberLoss, Method, with_float_inputs


def adversarial(epsilon: float, input_ranges: ArrayLike = 1.0, *, key: str = "inputs") -> Method:
    """Trains on each example and on an adversarial copy, in equal parts.

        loss = (l(x) + l(x')) / 2,  x' = x + epsilon range sign(dl(x)/dx)

    The fast gradient sign method (FGSM) makes the copy x'. The method works with every loss of a
    dict batch.

    Model state and auxiliary scalars are those of the unperturbed examples.

    Args:
        epsilon: Step size, as a fraction of each input's range; positive. The paper uses 0.01.
        input_ranges: Largest minus smallest value of each input in the training data: a number,
            float[*input], or float[groups, *input] with the ranges of each group of members.
        key: Key of the inputs in the batch.

    Raises:
        UserError: If `epsilon` is not positive and finite; when the loss is traced, if the batch
            has no array with the key.

    >>> loss = lambda params, state, batch, info: (params * batch["inputs"].mean(), (state, {}))
    >>> value, _ = adversarial(0.5)(loss)(2.0, {}, {"inputs": jnp.array([1.0])}, None)
    >>> float(value)  # the loss is 2 at x = 1 and 3 at x' = 1.5
    2.5

    Source: Goodfellow et al. (2015), https://arxiv.org/abs/1412.6572; Lakshminarayanan et al.
    (2017), https://arxiv.org/abs/1612.01474, algorithm 1.
    """
    require_coefficient("The epsilon of adversarial", epsilon, "0.01 is usual.")

    def method(loss: MemberLoss) -> MemberLoss:
        def attacked(
            params: Params, model_state: ModelState, batch: Batch, info: LossInfo
        ) -> LossResults:
            inputs = with_float_inputs(batch, "adversarial", key)

            def loss_of(inputs: jax.Array) -> tuple[jax.Array, PyTree]:
                value, rest = loss(params, model_state, {**batch, key: inputs}, info)
                return averaged(value), (value, rest)

            gradient, (clean, rest) = jax.grad(loss_of, has_aux=True)(inputs)
            step = epsilon * _ranges_of(inputs, input_ranges, info) * jnp.sign(gradient)
            # The copy is data, so no gradient passes through the step that made it.
            worse = jax.lax.stop_gradient(inputs + step)
            perturbed, _ = loss(params, model_state, {**batch, key: worse}, info)
            return jax.tree.map(lambda a, b: (a + b) / 2, clean, perturbed), rest

        return attacked

    return method


def _ranges_of(inputs: jax.Array, input_ranges: ArrayLike, info: LossInfo) -> jax.Array:
    """Returns the ranges of this member's inputs, in a shape that broadcasts over the batch."""
    ranges = jnp.asarray(input_ranges, inputs.dtype)
    if ranges.ndim == inputs.ndim and ranges.shape[1:] == inputs.shape[1:]:
        return ranges[info.member_id % len(ranges)][None]
    return ranges if ranges.ndim == 0 else ranges[None]
