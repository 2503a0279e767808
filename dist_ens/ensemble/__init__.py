"""An ensemble: one member's init, update and predict, lifted over the mesh."""

from dist_ens.ensemble.batches import Drawn, Own
from dist_ens.ensemble.lift import Ensemble

__all__ = ["Drawn", "Ensemble", "Own"]
