"""Mixup: training on points between two examples, and between their labels."""

from typing import Any

import jax

from dist_ens.config.checks import require_coefficient
from dist_ens.methods.loss import (
    LossInfo,
    MemberLoss,
    Method,
    require_objective,
    with_float_inputs,
)

# What `fold_in` is given to separate the key of the mixing from the network's.
_MIXUP = 0x6D69


def mixup(alpha: float) -> Method:
    """Mixes each example with the one at the batch's other end, by one weight per member and step.

        inputs = w inputs_i + (1 - w) inputs_j,  labels likewise,  w ~ Beta(alpha, alpha)

    A batch is in random order, so that its two ends are a random pair. Pairs are formed within one
    device's part of the batch: they depend on the length of the data axis, as dropout does.

    Args:
        alpha: Mixup coefficient; positive. 0.2 is usual, 1 draws the weight uniformly.

    Returns:
        The method, for ensembles with an objective: labels of classes become shares of classes,
        real targets are mixed themselves.

    Raises:
        UserError: If `alpha` is not positive and finite.

    Source: Zhang et al. (2018), https://arxiv.org/abs/1710.09412.
    """
    require_coefficient("The alpha of mixup", alpha, "0.2 is usual.")

    def method(loss: MemberLoss) -> MemberLoss:
        def mixed(params: Any, model_state: Any, batch: Any, info: LossInfo) -> Any:
            objective = require_objective(info, "mixup")
            inputs = with_float_inputs(batch, "mixup", objective.INPUTS)
            labels = objective.shares_of_labels(batch[objective.LABELS])
            weight = jax.random.beta(jax.random.fold_in(info.key, _MIXUP), alpha, alpha)
            between = {
                name: weight * values + (1 - weight) * values[::-1]
                for name, values in ((objective.INPUTS, inputs), (objective.LABELS, labels))
            }
            return loss(params, model_state, {**batch, **between}, info)

        return mixed

    method.is_mixup = True  # type: ignore[attr-defined]  # see `checked_methods`
    return method
