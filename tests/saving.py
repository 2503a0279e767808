"""Shared parts of the tests of checkpoints: states, snapshots, and files that are changed."""

import contextlib
import dataclasses
import io
import types
from unittest import mock

import jax
import numpy as np

from dist_ens.checkpoint import CheckpointStore, Snapshot, leaves_off_devices
from dist_ens.checkpoint.manifest import MANIFEST, Manifest, entries_of, files_in
from dist_ens.layout import Layout


def state_of(value, length=3):
    return Layout.make(4).put({"w": np.full((4, length), value, np.float32)}, "members")


def shapes_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def snapshot(step, state, record=None, **fields):
    return Snapshot(step, leaves_off_devices(state), record or {}, **fields)


def save(folder, state, *rest, **fields):
    """Saves a state as step 1 of a run, and waits for it."""
    with CheckpointStore(folder) as store:
        store.save(snapshot(1, state, *rest, **fields))


def reader(folder, step):
    """The checkpoint of a step, as a process reads it that has not written it."""
    return CheckpointStore(folder, read_only=True).at(step)


def steps_in(folder):
    return CheckpointStore(folder, read_only=True).steps()


def verified(run):
    """Verifies all steps of a run as the command does, and returns its code and its lines."""
    from launch import members

    all_steps = mock.patch.object(members, "_STEP", types.SimpleNamespace(value=None))
    with all_steps, contextlib.redirect_stdout(io.StringIO()) as printed:
        code = members._verify(run)
    return code, printed.getvalue().splitlines()


def assert_same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)


def flip(path, place, bit=0):
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


def rewrite(folder, **changes):
    """Gives a checkpoint a manifest with other fields and with the right hash."""
    changed = dataclasses.replace(Manifest.read(folder), **changes)
    (folder / MANIFEST).write_bytes(changed.to_bytes())


def reseal(folder):
    """Writes the manifest anew for the files that are there, as if they had been saved."""
    rewrite(folder, files=entries_of(folder, {*files_in(folder)} - {MANIFEST}))
