"""How members are trained apart or together: small things that combine."""

from dist_ens.methods.adversarial import adversarial
from dist_ens.methods.bootstrap import poisson_weight
from dist_ens.methods.label_smoothing import label_smoothing
from dist_ens.methods.loss import ExampleLoss, Method, of_outputs
from dist_ens.methods.mixup import mixup

__all__ = [
    "ExampleLoss",
    "Method",
    "adversarial",
    "label_smoothing",
    "mixup",
    "of_outputs",
    "poisson_weight",
]
