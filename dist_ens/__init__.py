"""Deep ensembles trained as one JAX program.

The names below are documented and stable. They are imported when they are first used, so
`import dist_ens` itself is fast. Everything else can be imported from its own package, and may
change.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Module of each public name.
_NAMES = {
    "Ensemble": "dist_ens.ensemble",
    "FailurePolicy": "dist_ens.ensemble.failure_policy",
    "State": "dist_ens.ground.state",
    "Layout": "dist_ens.layout",
    "Checkpoints": "dist_ens.checkpoint",
    "as_member": "dist_ens.members",
    "from_file": "dist_ens.checkpoint.network_files",
    "lift": "dist_ens.execution.lift",
    "fit": "dist_ens.training",
    "evaluate": "dist_ens.evaluation",
    "calibrate": "dist_ens.evaluation.fit_calibration",
    "Calibration": "dist_ens.evaluation.calibration",
    "select": "dist_ens.evaluation.selection",
    "Selection": "dist_ens.evaluation.selection",
    "load": "dist_ens.experiment",
    "stack_members": "dist_ens.ground.state",
    "unstack_members": "dist_ens.ground.state",
    "select_members": "dist_ens.ground.state",
}
_MODULES = {
    **{
        name: f"dist_ens.{name}"
        for name in ("losses", "metrics", "methods", "models", "callbacks", "data")
    },
    "hyper": "dist_ens.sampling.hyper",
}

if TYPE_CHECKING:
    from dist_ens import callbacks, data, losses, methods, metrics, models
    from dist_ens.checkpoint import Checkpoints
    from dist_ens.checkpoint.network_files import from_file
    from dist_ens.ensemble import Ensemble
    from dist_ens.ensemble.failure_policy import FailurePolicy
    from dist_ens.evaluation import evaluate
    from dist_ens.evaluation.calibration import Calibration
    from dist_ens.evaluation.fit_calibration import calibrate
    from dist_ens.evaluation.selection import Selection, select
    from dist_ens.execution.lift import lift
    from dist_ens.experiment import load
    from dist_ens.ground.state import State, select_members, stack_members, unstack_members
    from dist_ens.layout import Layout
    from dist_ens.members import as_member
    from dist_ens.sampling import hyper
    from dist_ens.training import fit

__all__ = [
    "Calibration",
    "Checkpoints",
    "Ensemble",
    "FailurePolicy",
    "Layout",
    "Selection",
    "State",
    "as_member",
    "calibrate",
    "callbacks",
    "data",
    "evaluate",
    "fit",
    "from_file",
    "hyper",
    "lift",
    "load",
    "losses",
    "methods",
    "metrics",
    "models",
    "select",
    "select_members",
    "stack_members",
    "unstack_members",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name in _NAMES:
        value = getattr(importlib.import_module(_NAMES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
