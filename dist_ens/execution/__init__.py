"""Execution of a device's members: executions, lowerings, the lift, and how one is chosen."""

from dist_ens.execution.apply import lowered, over_members
from dist_ens.execution.spec import AUTO, Execution, Lowering, MemberExecution, register

__all__ = [
    "AUTO",
    "Execution",
    "Lowering",
    "MemberExecution",
    "lowered",
    "over_members",
    "register",
]
