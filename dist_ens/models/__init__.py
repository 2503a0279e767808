"""Networks that a config can name: each is a function of an input shape and a number of outputs.

`dist_ens.members.as_member` makes a member from a network of your own.
"""

from dist_ens.models.convolutional import lenet5, resnet8
from dist_ens.models.mlp import dropout as dropout
from dist_ens.models.mlp import mlp, mlp_bn_dropout
from dist_ens.models.transformer import transformer

# A config names one of these networks.
__all__ = ["mlp", "mlp_bn_dropout", "lenet5", "resnet8", "transformer"]
