"""Transfer of global arrays between the devices and the hosts that write and read them."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from dist_ens.ground.types import Array
from dist_ens.layout.placing import HOST_MEMORY, device_bytes

# At most this number of bytes is read before the arrays are on their devices.
_READ_AT_ONCE_BYTES = 2**31


@dataclasses.dataclass(frozen=True)
class Piece:
    """The values of a part of a global array, and the index of the part in it."""

    index: tuple[slice, ...]
    array: Array


class Reading(Protocol):
    """A part of an array that is being read."""

    def result(self) -> np.ndarray:
        """Waits for the part and returns it."""
        ...


def pieces_off_devices(arrays: Mapping[str, jax.Array]) -> dict[str, list[Piece]]:
    """Begins copies of this host's parts of arrays, which may be donated at once."""
    shards = [
        (name, shard)
        for name, array in arrays.items()
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]
    copies = jax.device_put(
        [shard.data for _, shard in shards],
        [SingleDeviceSharding(shard.device, memory_kind=HOST_MEMORY) for _, shard in shards],
        may_alias=False,
    )
    pieces: dict[str, list[Piece]] = {name: [] for name in arrays}
    for (name, shard), copy in zip(shards, copies, strict=True):
        pieces[name].append(Piece(shard.index, copy))
    return pieces


def read_onto_devices(
    abstract: Mapping[str, jax.ShapeDtypeStruct], read: Callable[[str, tuple[slice, ...]], Reading]
) -> dict[str, jax.Array]:
    """Reads global arrays of these shapes, types and shardings, by name.

    Every host reads the parts that its devices hold, each part once, and several at the same time,
    up to 2 GiB in the host's memory. `read` starts to read a part of an array, given its index.
    """
    arrays: dict[str, jax.Array] = {}
    begun: collections.deque[tuple[str, dict[str, Reading], int]] = collections.deque()

    def end_one() -> None:
        name, parts, _ = begun.popleft()
        leaf = abstract[name]
        arrays[name] = jax.make_array_from_callback(
            leaf.shape, leaf.sharding, lambda i: parts[str(i)].result(), dtype=leaf.dtype
        )

    for name, leaf in abstract.items():
        held = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        places = {str(index): index for index in held}
        num_bytes = len(places) * device_bytes(leaf)
        while begun and num_bytes + sum(size for _, _, size in begun) > _READ_AT_ONCE_BYTES:
            end_one()
        begun.append((name, {part: read(name, i) for part, i in places.items()}, num_bytes))
    while begun:
        end_one()
    return arrays
