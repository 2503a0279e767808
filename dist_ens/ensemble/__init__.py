"""The ensemble: the network, optimizer and loss of one member, lifted over the mesh."""

from dist_ens.ensemble.batches import Batches, Drawn, MemberBatches
from dist_ens.ensemble.ensemble import Ensemble
from dist_ens.ensemble.failures import FailedMember, FailureRecord

__all__ = ["Batches", "Drawn", "Ensemble", "FailedMember", "FailureRecord", "MemberBatches"]
