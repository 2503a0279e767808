"""Label smoothing: training on labels that are mixed with the uniform distribution."""

import optax

from dist_ens.ground.errors import UserError
from dist_ens.ground.numbers import require_fraction
from dist_ens.ground.types import Batch, ModelState, Params
from dist_ens.methods.loss import LossInfo, LossResults, MemberLoss, Method, require_objective


def label_smoothing(alpha: float) -> Method:
    """Trains an objective for classes on smoothed labels: a share of each class for one class.

        share_c = (1 - alpha) [c = label] + alpha / classes

    Args:
        alpha: Part of each label that is shared by all classes, in [0, 1).

    Raises:
        UserError: If `alpha` is not in [0, 1); when the loss is traced, if the labels are real
            targets or the ensemble has no objective.

    >>> import jax
    >>> from dist_ens.losses import categorical
    >>> info = LossInfo(jax.random.key(0), jax.random.key(1), 0, None, categorical(2))
    >>> labels_of = lambda params, state, batch, info: (batch["labels"], (state, {}))
    >>> batch = {"labels": jax.numpy.array([0])}
    >>> label_smoothing(0.5)(labels_of)({}, {}, batch, info)[0].tolist()
    [[0.75, 0.25]]

    Source: Szegedy et al. (2016), https://arxiv.org/abs/1512.00567.
    """
    require_fraction("The alpha of label_smoothing", alpha, "0.1 is usual.")

    def method(loss: MemberLoss) -> MemberLoss:
        def smoothed(
            params: Params, model_state: ModelState, batch: Batch, info: LossInfo
        ) -> LossResults:
            objective = require_objective(info, "label_smoothing")
            if objective.num_classes is None:
                raise UserError(f"label_smoothing needs classes, not {objective.name}.")
            shares = objective.shares_of_labels(batch[objective.LABELS])
            smooth = {**batch, objective.LABELS: optax.smooth_labels(shares, alpha)}
            return loss(params, model_state, smooth, info)

        return smoothed

    return method
