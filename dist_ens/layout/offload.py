"""Transfer of global arrays between the devices and the hosts that write and read them."""

import collections
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.typing import DTypeLike

from dist_ens.ground.types import Array
from dist_ens.layout.placing import HOST_MEMORY
from dist_ens.layout.specs import MEMBERS, MODEL

# At most this number of bytes is read before the arrays are on their devices.
_READ_AT_ONCE_BYTES = 2**31


@dataclasses.dataclass(frozen=True)
class Piece:
    """The values of a part of a global array, and the index of the part in it."""

    index: tuple[slice, ...]
    array: "Array | Joined"


class Reading(Protocol):
    """A part of an array that is being read."""

    def result(self) -> np.ndarray:
        """Waits for the part and returns it."""
        ...


def pieces_off_devices(arrays: Mapping[str, jax.Array]) -> dict[str, list[Piece]]:
    """Begins copies of this host's parts of arrays, which may be donated at once."""
    # Those that hosts share are whole on the devices one after another, which spares memory.
    shared = [name for name, array in arrays.items() if _is_shared(array)]
    if shared:
        others = {name: array for name, array in arrays.items() if name not in shared}
        found = pieces_off_devices(others)
        for name in shared:
            found |= pieces_off_devices({name: _of_whole_rows(arrays[name])})
            jax.block_until_ready([piece.array for piece in found[name]])
        return {name: found[name] for name in arrays}
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
    return {name: _of_whole_members(parts, arrays[name]) for name, parts in pieces.items()}


def _is_shared(array: jax.Array) -> bool:
    """Returns whether several hosts have parts of the same member's array."""
    sharding = array.sharding
    if array.is_fully_addressable or not isinstance(sharding, NamedSharding):
        return False
    if MODEL not in tuple(sharding.spec):
        return False
    of_members = sharding.mesh.devices.reshape(-1, sharding.mesh.shape[MODEL])
    return any(len({device.process_index for device in sharing}) > 1 for sharing in of_members)


def _of_whole_rows(array: jax.Array) -> jax.Array:
    if not isinstance(array.sharding, NamedSharding):
        return array
    whole = NamedSharding(array.sharding.mesh, MEMBERS)
    return jax.jit(lambda array: array, out_shardings=whole)(array)


def _of_whole_members(parts: list[Piece], array: jax.Array) -> list[Piece]:
    """Returns pieces of whole members, which the devices of a row may have shared."""
    if all(part.array.shape[1:] == array.shape[1:] for part in parts):
        return parts
    of_rows: dict[str, list[Piece]] = {}
    for part in parts:
        of_rows.setdefault(str(part.index[0]), []).append(part)
    return [
        Piece((shared[0].index[0], *(slice(None) for _ in array.shape[1:])), Joined(shared, array))
        for shared in of_rows.values()
    ]


class Joined:
    """An array of whole members, which is put together when it is read, from parts of it."""

    def __init__(self, parts: list[Piece], array: jax.Array) -> None:
        self._parts = parts
        self._whole: np.ndarray | None = None
        self.shape: tuple[int, ...] = (parts[0].array.shape[0], *array.shape[1:])
        self.dtype = array.dtype

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if self._whole is None:
            whole = np.empty(self.shape, self.dtype)
            for part in self._parts:
                whole[(slice(None), *part.index[1:])] = np.asarray(part.array)
            self._whole, self._parts = whole, []
        return self._whole


def read_onto_devices(
    abstract: Mapping[str, jax.ShapeDtypeStruct], read: Callable[[str, tuple[slice, ...]], Reading]
) -> dict[str, jax.Array]:
    """Reads global arrays of these shapes, types and shardings, by name.

    Every host reads the members that its devices hold, each once, and several arrays at the same
    time, up to 2 GiB in the host's memory. `read` starts to read whole members of an array, given
    their index.
    """
    arrays: dict[str, jax.Array] = {}
    begun: collections.deque[tuple[str, dict[str, Reading], int]] = collections.deque()

    def end_one() -> None:
        name, parts, _ = begun.popleft()
        leaf = abstract[name]

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            members, *rest = index or (slice(None),)
            return parts[str(members)].result()[(slice(None), *rest)]

        arrays[name] = jax.make_array_from_callback(
            leaf.shape, leaf.sharding, part, dtype=leaf.dtype
        )

    for name, leaf in abstract.items():
        held = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        whole = (slice(None),) * (leaf.ndim - 1)
        places = {str(index[0]): (index[0], *whole) for index in held}
        of_members = math.prod(leaf.shape[1:]) * leaf.dtype.itemsize
        num_bytes = of_members * sum(len(range(leaf.shape[0])[i[0]]) for i in places.values())
        while begun and num_bytes + sum(size for _, _, size in begun) > _READ_AT_ONCE_BYTES:
            end_one()
        begun.append((name, {part: read(name, i) for part, i in places.items()}, num_bytes))
    while begun:
        end_one()
    return arrays
