"""Plans of the memory and the operations that a run needs on given devices.

XLA compiles the update for these devices, which need not be attached to this machine.
"""

from dist_ens.plan.collectives import Collective, collectives
from dist_ens.plan.fitting import planner_of
from dist_ens.plan.planned import PlannedMesh, mesh_line, plan_table
from dist_ens.plan.planner import Planner
from dist_ens.plan.topology import HERE, Topology

__all__ = [
    "HERE",
    "Collective",
    "PlannedMesh",
    "Planner",
    "Topology",
    "mesh_line",
    "collectives",
    "plan_table",
    "planner_of",
]
