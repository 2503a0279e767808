"""Checks of the batches that the hosts of a run yield."""

import hashlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from dist_ens.ground.errors import RunError, UserError
from dist_ens.ground.state import described
from dist_ens.ground.types import Batch, Shapes, Specs
from dist_ens.layout import REPLICATED, Layout, broadcast
from dist_ens.processes import cluster

_DIGEST_NUMBERS = 4
T = TypeVar("T")


def read_together(read: Callable[[], T]) -> T:
    """Returns what a function reads on this host. If it fails on one host, it fails on all.

    Otherwise the other hosts would wait for that host in the next step. Every host must call this.
    """
    if jax.process_count() == 1:
        return read()
    error: Exception | None = None
    try:
        result = read()
    except Exception as raised:  # The iterator of a user may raise anything.
        error = raised
    failed = cluster.hosts_with(error is not None)
    if error is not None:
        raise error
    if failed:
        raise RunError(
            f"Process {failed[0]} has no batch for the next step. Its output says why. Correct its "
            "data, then run the same command again."
        )
    return result


def check_shapes_agree(shapes: Shapes) -> None:
    """Raises a `UserError` on every host if the hosts' batches have different shapes."""
    text = str(jax.tree_util.tree_leaves_with_path(shapes)).encode()
    of_hosts = multihost_utils.process_allgather(_digest([np.frombuffer(text, np.uint8)]))
    different = np.flatnonzero((of_hosts != of_hosts[:1]).any(axis=1)).tolist()
    if different:
        raise UserError(
            f"The hosts yield batches of different shapes: hosts {different} differ from host 0, "
            f"and this host ({jax.process_index()}) yields {described(shapes)}. Yield the "
            "same shapes on every host."
        )


def check_columns_agree(layout: Layout, batch: Batch, specs: Specs) -> None:
    """Raises a `UserError` on every host if hosts yield different arrays where they should agree.

    A shared leaf of the first batch is the same on all hosts, any other on the hosts that feed the
    same column. The rows of this host's part divide over its columns.
    """
    parts = len(layout.host_columns)
    digests = np.zeros((layout.data_axis + 1, _DIGEST_NUMBERS), np.int32)
    leaves = list(zip(jax.tree.leaves(batch), broadcast(specs, batch), strict=True))
    rows = [leaf for leaf, spec in leaves if spec != REPLICATED]
    for number, column in enumerate(layout.host_columns):
        digests[column] = _digest(np.split(x, parts)[number] if parts > 1 else x for x in rows)
    digests[-1] = _digest(leaf for leaf, spec in leaves if spec == REPLICATED)
    of_hosts = multihost_utils.process_allgather(digests)  # [hosts, columns + 1, numbers]
    for column in range(layout.data_axis):
        feeding = np.flatnonzero(of_hosts[:, column].any(axis=1))
        if (of_hosts[feeding, column] != of_hosts[feeding[:1], column]).any():
            raise UserError(
                f"Hosts {feeding.tolist()} feed column {column} of the mesh {layout}, and yield "
                "different examples for it. Yield the same examples on hosts that share columns "
                "(layout.host_columns), or give each host columns of its own with "
                "Layout.make(num_members, ensemble_axis=1)."
            )
    if (of_hosts[:, -1] != of_hosts[:1, -1]).any():
        raise UserError(
            "The hosts yield different values of the leaves that batch_specs calls shared. Yield "
            "the same values on every host."
        )


def _digest(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Returns a hash of the bytes of arrays, int32[_DIGEST_NUMBERS]."""
    digest = hashlib.sha256(b"".join(array.tobytes() for array in arrays)).digest()
    return np.frombuffer(digest[: 4 * _DIGEST_NUMBERS], np.int32)
