"""Training data on its way to the devices: resident, sharded or streamed.

The free memory of the devices decides where a split is placed. The examples of a step and their
order do not depend on the placement.
"""

from dist_ens.data.feed.call_batches import feed
from dist_ens.data.feed.on_devices import ResidentFeed, put_whole
from dist_ens.data.feed.placement import (
    INDEX_BYTES,
    PART_OF_THE_MEMORY,
    Placement,
    TrainingSet,
    abstract_batches,
)

__all__ = [
    "INDEX_BYTES",
    "PART_OF_THE_MEMORY",
    "Placement",
    "ResidentFeed",
    "TrainingSet",
    "abstract_batches",
    "feed",
    "put_whole",
]
