"""What a run will need on devices that need not be here, from XLA's own compiler."""

from dist_ens.plan.collectives import Collective, collectives
from dist_ens.plan.planned import Plan, PlannedMesh
from dist_ens.plan.planner import Planner
from dist_ens.plan.table import mesh_line, plan_table
from dist_ens.plan.topology import CHIPS, HERE, Topology

__all__ = [
    "CHIPS",
    "HERE",
    "Collective",
    "Plan",
    "PlannedMesh",
    "Planner",
    "Topology",
    "mesh_line",
    "collectives",
    "plan_table",
]
