"""Waves: equal parts of the members, for members that do not fit on the devices together."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec, SingleDeviceSharding

from dist_ens.ground.types import Leaf, Tree
from dist_ens.layout.mesh import Layout
from dist_ens.layout.placing import HOST_MEMORY
from dist_ens.layout.specs import ENSEMBLE


@dataclasses.dataclass(frozen=True)
class Waves:
    """A division of each device's members into equal parts, of which one is on it at a time."""

    layout: Layout
    count: int

    @classmethod
    def at_least(cls, layout: Layout, count: int) -> "Waves":
        """Returns `count` waves, or more: a divisor of the number of members of a device.

        >>> from dist_ens.layout import Layout
        >>> Waves.at_least(Layout.make(8, devices=jax.devices()[:1]), 3).count
        4
        """
        members = layout.members_per_device
        return cls(layout, next((k for k in range(count, members) if members % k == 0), members))

    @property
    def layout_of_one(self) -> Layout:
        """Layout of the members of one wave."""
        return dataclasses.replace(self.layout, num_members=self.layout.num_members // self.count)

    def take(self, tree: Tree, number: int) -> Tree:
        """Returns one wave of the members, on the devices, as global arrays of `layout_of_one`."""
        of_one = self.layout_of_one
        size = of_one.members_per_device
        start, stop = number * size, (number + 1) * size

        def part(leaf: Leaf) -> jax.Array:
            here = [
                jax.device_put(jax.device_get(shard.data)[start:stop], shard.device)
                if leaf.sharding.memory_kind == HOST_MEMORY
                else jax.lax.slice_in_dim(shard.data, start, stop)
                for shard in leaf.addressable_shards
            ]
            shape = (of_one.num_members, *leaf.shape[1:])
            sharding = of_one.sharding(leaf.sharding.spec)
            return jax.make_array_from_single_device_arrays(shape, sharding, here)

        return jax.tree.map(part, tree)

    def join(self, trees: Sequence[Tree], spec: PartitionSpec) -> Tree:
        """Returns the global arrays of all members, in the same memory; the inverse of `take`."""
        axis = tuple(spec).index(ENSEMBLE)

        def whole(*waves: jax.Array) -> jax.Array:
            sharding, here = self.layout.sharding(spec), []
            waits = waves[0].sharding.memory_kind == HOST_MEMORY
            if waits:
                sharding = sharding.with_memory_kind(HOST_MEMORY)
            for shards in zip(*(wave.addressable_shards for wave in waves), strict=True):
                parts = [shard.data for shard in shards]
                if waits:
                    place = SingleDeviceSharding(shards[0].device, memory_kind=HOST_MEMORY)
                    here.append(jax.device_put(np.concatenate(jax.device_get(parts), axis), place))
                else:
                    here.append(jnp.concatenate(parts, axis))
            shape = list(waves[0].shape)
            shape[axis] *= self.count
            return jax.make_array_from_single_device_arrays(tuple(shape), sharding, here)

        return jax.tree.map(whole, *trees)
