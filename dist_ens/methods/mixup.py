"""Mixup: training on convex combinations of two examples and of their labels."""

import jax

from dist_ens.ground.numbers import require_coefficient
from dist_ens.ground.types import Batch, ModelState, Params
from dist_ens.methods.loss import (
    LossInfo,
    LossResults,
    MemberLoss,
    Method,
    require_objective,
    with_float_inputs,
)

# Data for `fold_in` that separates the key of the mixing weight from the network's key.
_MIXUP = 0x6D69


def mixup(alpha: float) -> Method:
    """Trains on mixtures of two examples of a batch, with one random weight per member and step.

        inputs = w inputs_i + (1 - w) inputs_j
        labels = w labels_i + (1 - w) labels_j,  w ~ Beta(alpha, alpha)

    Example i from the start of the batch is paired with example i from its end. A batch is in
    random order, so the pairs are random. Labels of classes become shares of classes. Real targets
    are mixed themselves.

    Args:
        alpha: Mixup coefficient, positive. 0.2 is usual. 1 draws the weight uniformly.

    Raises:
        UserError: If `alpha` is not positive and finite; when the loss is traced, if the ensemble
            has no objective or the inputs are not one array.

    >>> from dist_ens.losses import squared_error
    >>> info = LossInfo(jax.random.key(0), jax.random.key(1), 0, None, squared_error())
    >>> batch = {"inputs": jax.numpy.array([0.0, 1.0]), "labels": jax.numpy.array([0.0, 1.0])}
    >>> inputs_of = lambda params, state, batch, info: (batch["inputs"], (state, {}))
    >>> mixed, _ = mixup(0.2)(inputs_of)({}, {}, batch, info)
    >>> round(float(mixed.sum()), 4)  # 1 - w and w
    1.0

    Source: Zhang et al. (2018), https://arxiv.org/abs/1710.09412.
    """
    require_coefficient("The alpha of mixup", alpha, "0.2 is usual.")

    def method(loss: MemberLoss) -> MemberLoss:
        def mixed(
            params: Params, model_state: ModelState, batch: Batch, info: LossInfo
        ) -> LossResults:
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
