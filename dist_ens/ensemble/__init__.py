"""The lift: one member's init, update and predict become the ensemble's, over the mesh."""

from dist_ens.ensemble.batches import Drawn, Own
from dist_ens.ensemble.lift import EXAMPLES, Ensemble
from dist_ens.ensemble.state import (
    State,
    member_key,
    select_members,
    stack_members,
    unstack_members,
)

__all__ = [
    "EXAMPLES",
    "Drawn",
    "Ensemble",
    "Own",
    "State",
    "member_key",
    "select_members",
    "stack_members",
    "unstack_members",
]
