"""Label smoothing: a part of every label is given to all classes."""

from typing import Any

import optax

from dist_ens.config.checks import require_fraction
from dist_ens.errors import UserError
from dist_ens.methods.loss import LossInfo, MemberLoss, Method, require_objective


def label_smoothing(alpha: float) -> Method:
    """Trains on shares of the classes in place of labels.

        share_c = (1 - alpha) [c = label] + alpha / classes

    Args:
        alpha: Part of each label that is shared by all classes, in [0, 1).

    Returns:
        The method, for ensembles with an objective of classes.

    Raises:
        UserError: If `alpha` is not in [0, 1); when the loss is traced, if the labels are real
            targets.

    Source: Szegedy et al. (2016), https://arxiv.org/abs/1512.00567.
    """
    require_fraction("The alpha of label_smoothing", alpha, "0.1 is usual.")

    def method(loss: MemberLoss) -> MemberLoss:
        def smoothed(params: Any, model_state: Any, batch: Any, info: LossInfo) -> Any:
            objective = require_objective(info, "label_smoothing")
            if objective.num_classes is None:
                raise UserError(
                    f"label_smoothing was given with the objective {objective.name}, whose labels "
                    "are not classes. Leave it out."
                )
            shares = objective.shares_of_labels(batch[objective.LABELS])
            smooth = {**batch, objective.LABELS: optax.smooth_labels(shares, alpha)}
            return loss(params, model_state, smooth, info)

        return smoothed

    return method
