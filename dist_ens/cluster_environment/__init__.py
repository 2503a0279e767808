"""The cluster that a process was started in, read from its environment variables.

This package starts nothing, and asks no other machine.
"""

from dist_ens.cluster_environment.detect import chosen_by_flags, detect, initialize_arguments
from dist_ens.cluster_environment.devices import (
    chosen_gpus,
    local_devices,
    num_gpus,
    visible_gpus,
)
from dist_ens.cluster_environment.reader import FLAGS, NONE, Detected

__all__ = [
    "FLAGS",
    "NONE",
    "Detected",
    "chosen_gpus",
    "detect",
    "initialize_arguments",
    "local_devices",
    "num_gpus",
    "visible_gpus",
    "chosen_by_flags",
]
