"""The lift: one member's init, update and predict become the ensemble's, over the mesh."""

from dist_ens.ensemble.batches import Drawn, Own
from dist_ens.ensemble.lift import Ensemble
from dist_ens.ensemble.state import (
    State,
    select_members,
    stack_members,
    unstack_members,
)

__all__ = [
    "Drawn",
    "Ensemble",
    "Own",
    "State",
    "select_members",
    "stack_members",
    "unstack_members",
]
