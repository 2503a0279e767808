"""Networks, and members made from other networks.

A config can name those in `__all__`: each is a function of an input shape and a number of outputs.
`dist_ens.members.as_member` makes a member from a network of your own. `lora`, `heads`,
`with_prior`, `with_embeddings`, `batch_ensemble`, `tabm` and `trunk_and_heads` make a member from
one or two networks of any library.
"""

from dist_ens.models.batch_ensemble import batch_ensemble as batch_ensemble
from dist_ens.models.batch_ensemble import tabm as tabm
from dist_ens.models.convolutional import lenet5, resnet8
from dist_ens.models.embeddings import with_embeddings as with_embeddings
from dist_ens.models.lora import lora as lora
from dist_ens.models.mlp import dropout as dropout
from dist_ens.models.mlp import mlp, mlp_bn_dropout
from dist_ens.models.packed import packed as packed
from dist_ens.models.prior import with_prior as with_prior
from dist_ens.models.transformer import transformer
from dist_ens.models.trunks import heads as heads
from dist_ens.models.trunks import trunk_and_heads as trunk_and_heads

# A config names one of these networks.
__all__ = ["mlp", "mlp_bn_dropout", "lenet5", "resnet8", "transformer"]
