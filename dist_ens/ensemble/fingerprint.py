"""The fingerprint of a training step, by which a resumed run recognises its network.

A config identifies its network by name, but a network written in Python has no such name. If a run
were resumed with another network, its record would be wrong.
"""

import hashlib
import re
import sys
from collections.abc import Iterator

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

import dist_ens
from dist_ens.ensemble.batches import rows_of
from dist_ens.ensemble.ensemble import Ensemble
from dist_ens.ensemble.initial_state import shapes_of
from dist_ens.ensemble.programs import step_of_one
from dist_ens.ground.types import Shapes

# Version of the operations that dist_ens itself adds to a step. Raise it when they change.
_STEP = "4"
# Another version of one of these packages may trace the same step to other operations.
_TRACING = ("jax", "flax", "optax", "equinox", "haiku")


def versions() -> dict[str, str]:
    """Returns what a traced step depends on, by name: versions of packages, and the platform."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    loaded = {name: sys.modules[name].__version__ for name in _TRACING if name in sys.modules}
    platform = {"platform": jax.default_backend()}
    ours = {"dist_ens": dist_ens.__version__, "dist_ens_step": _STEP}
    return {"python": python, **ours, **platform, **loaded}


def fingerprint_of_step(ensemble: Ensemble, batch: Shapes) -> str:
    """Returns a fingerprint of the step of one member on a global batch of some shapes.

    It depends on the operations of network, loss, methods and optimizer, and on the arrays that
    they capture. It does not depend on the mesh, the execution, the number of members or
    the precision that JAX is configured to use.
    """
    member = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
        ensemble.abstract_state(batch),
    )
    shared = shapes_of(ensemble.shared)
    rows = rows_of(batch)
    index = None if rows is None else jax.ShapeDtypeStruct((rows,), "int32")
    # The precision may differ between starts of a run, so the fingerprint does not depend on it.
    with jax.default_matmul_precision("default"), jax.enable_x64(False):
        traced = jax.make_jaxpr(step_of_one(ensemble))(member, batch, index, shared)
    digest = hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", str(traced)).encode())
    for array in _captured(traced):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def _captured(value: object) -> Iterator[np.ndarray]:
    """Yields the arrays that a traced function and the functions nested in it capture."""
    if isinstance(value, ClosedJaxpr):
        for array in value.consts:
            is_key = jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key)
            yield np.asarray(jax.random.key_data(array) if is_key else array)
        value = value.jaxpr
    if hasattr(value, "eqns"):
        for eqn in value.eqns:
            yield from _captured(tuple(eqn.params.values()))
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _captured(part)
