"""Adversarial training: the loss of an example and of one beside it that is worse."""

from typing import Any

import jax
import jax.numpy as jnp

from dist_ens.methods.loss import Batch, ExampleLoss, Forward, Learnt, Method


def adversarial(epsilon: float, input_ranges: Any) -> Method:
    """Trains on each example and on one by the fast gradient sign method, to equal parts.

        loss = (l(x) + l(x')) / 2,  x' = x + epsilon range sign(dl(x)/dx)

    Args:
        epsilon: As a part of each input's range, positive; 0.01 in the paper.
        input_ranges: Largest less smallest value of each input in the training data, of each group
            of members, float32[groups, *input].

    Returns:
        The method. The model state and what is reported beside the loss are of the examples
        themselves.

    Source: Goodfellow et al. (2015), https://arxiv.org/abs/1412.6572; Lakshminarayanan et al.
    (2017), https://arxiv.org/abs/1612.01474, algorithm 1.
    """

    def method(learn: ExampleLoss) -> ExampleLoss:
        def attacked(
            forward: Forward, batch: Batch, key: jax.Array, member_id: jax.Array
        ) -> Learnt:
            if input_ranges is None:
                raise RuntimeError("Adversarial training needs the ranges of the inputs.")
            inputs = batch["inputs"].astype(jnp.result_type(batch["inputs"], jnp.float32))

            def total(inputs: jax.Array) -> tuple[jax.Array, Learnt]:
                learnt = learn(forward, {**batch, "inputs": inputs}, key, member_id)
                return learnt.losses.sum(), learnt

            gradient, clean = jax.grad(total, has_aux=True)(inputs)
            ranges = jnp.asarray(input_ranges, inputs.dtype)
            step = epsilon * ranges[member_id % len(ranges)][None] * jnp.sign(gradient)
            # The worse example is data: the network does not learn through how it was found.
            worse = jax.lax.stop_gradient(inputs + step)
            beside = learn(forward, {**batch, "inputs": worse}, key, member_id)
            return clean._replace(losses=(clean.losses + beside.losses) / 2)

        return attacked

    return method
