"""Methods: transformations of a member's loss, which can be combined.

A method is a function from a loss to a loss. A loss is called as
`loss(params, model_state, batch, info)` and returns `(value, (model_state, aux))`; `info` is a
`LossInfo` with the keys, the member's id, the positions of the examples and the objective. A config
combines methods in the order of `__all__`, the innermost first.
"""

from dist_ens.methods.adversarial import adversarial
from dist_ens.methods.bootstrap import bootstrap, poisson_weight
from dist_ens.methods.label_smoothing import label_smoothing
from dist_ens.methods.loss import (
    LossFunction,
    LossInfo,
    LossResults,
    MemberLoss,
    Method,
    loss_of_function,
    loss_of_objective,
)
from dist_ens.methods.mixup import mixup
from dist_ens.methods.svgd import svgd as svgd

# A config names a method of these. `svgd` is for members with heads, which it does not name.
__all__ = [
    "MemberLoss",
    "Method",
    "LossFunction",
    "LossInfo",
    "LossResults",
    "loss_of_function",
    "loss_of_objective",
    "poisson_weight",
    "label_smoothing",
    "adversarial",
    "mixup",
    "bootstrap",
]
