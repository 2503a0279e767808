"""Training data on its way to the devices: resident, sharded, streamed, or from an iterable.

A split goes where there is room for it, and the examples and their order are the same everywhere.
"""

from dist_ens.feed.call_batches import feed
from dist_ens.feed.placement import (
    INDEX_BYTES,
    PART_OF_THE_MEMORY,
    Placement,
    TrainingSet,
    abstract_batches,
)
from dist_ens.feed.resident import ResidentFeed, put_whole

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
