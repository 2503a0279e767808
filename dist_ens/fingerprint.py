"""Fingerprints of what is given in Python: a network's training step, and a data set.

A config file names its parts, but a network or a data set that was made in Python has no name that
says what it is. A run that goes on with another one would be recorded as something that it is not.
"""

import hashlib
import re
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr

import dist_ens
from dist_ens.data import Source, Spec, Split
from dist_ens.ensemble import Ensemble

_AT_A_TIME = 10_000  # examples
_SAMPLED = 100  # examples of a split that is not in memory
# A step that is traced by another version of one of these may read otherwise and compute the same.
_TRACING = ("jax", "flax", "optax", "equinox")


def versions() -> dict[str, str]:
    """Returns the versions of what takes part in tracing a step, by name."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    loaded = {name: sys.modules[name].__version__ for name in _TRACING if name in sys.modules}
    return {"python": python, "dist_ens": dist_ens.__version__, **loaded}


def fingerprint_of_step(ensemble: Ensemble, spec: Spec, global_batch_size: int) -> str:
    """Returns a fingerprint of the step of one member on the whole global batch.

    It depends on the operations of network, loss, methods and optimizer, and on the arrays that
    they capture. It does not depend on the mesh, on the execution or on the number of members.

    Args:
        ensemble: The lifted member.
        spec: Description of the data.
        global_batch_size: Examples of a step.

    Returns:
        64 hexadecimal digits.
    """
    inputs = jax.ShapeDtypeStruct((global_batch_size, *spec.input_shape), spec.input_dtype)
    member = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
        ensemble.abstract_state(inputs),
    )
    batch = {
        "inputs": inputs,
        "labels": jax.ShapeDtypeStruct((global_batch_size, *spec.label_shape), spec.label_dtype),
        "index": jax.ShapeDtypeStruct((global_batch_size,), "int32"),
    }
    traced = jax.make_jaxpr(ensemble.step_of_one)(member, batch)
    digest = hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", str(traced)).encode())
    for array in _captured(traced):
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def fingerprint_of_data(source: Source) -> dict[str, str]:
    """Returns a fingerprint of the training and one of the test examples.

    Args:
        source: The data. Examples in memory are all read; of others 100 that are evenly spread.

    Returns:
        By the split's name 64 hexadecimal digits.
    """
    return {"train": _of_split(source.train), "test": _of_split(source.test)}


def _of_split(split: Split) -> str:
    if split.in_memory:
        positions = np.arange(len(split))
    else:
        positions = np.unique(np.linspace(0, len(split) - 1, _SAMPLED).astype(np.int64))
    digest = hashlib.sha256(str(len(split)).encode())
    for first in range(0, len(positions), _AT_A_TIME):
        examples = split.take(positions[first : first + _AT_A_TIME])
        for name in sorted(examples):
            leaf = np.ascontiguousarray(examples[name])
            digest.update(f"{name} {leaf.dtype} {leaf.shape[1:]}".encode())
            digest.update(leaf.tobytes())
    return digest.hexdigest()


def _captured(value: Any) -> Iterator[np.ndarray]:
    """Yields the arrays that a traced function captures, and the functions inside it."""
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
