"""The ensemble: the network, optimizer and loss of one member, lifted over the mesh."""

from dist_ens.ensemble.batches import Batches, Drawn, MemberBatches
from dist_ens.ensemble.ensemble import Ensemble
from dist_ens.ensemble.failures import FailedMember, FailureRecord
from dist_ens.ensemble.gradient_step import ZERO_WEIGHTS

__all__ = [
    "ZERO_WEIGHTS",
    "Batches",
    "Drawn",
    "Ensemble",
    "FailedMember",
    "FailureRecord",
    "MemberBatches",
]
