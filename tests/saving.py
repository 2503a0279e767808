"""Shared parts of the tests of checkpoints: states, snapshots, and files that are changed."""

import contextlib
import dataclasses
import io
import types
from unittest import mock

import jax
import numpy as np

from dist_ens.checkpoint import (
    Checkpoints,
    Snapshot,
    leaves_off_devices,
    saved_step,
    saved_steps,
)
from dist_ens.checkpoint.manifest import MANIFEST, Manifest, entries_of
from dist_ens.layout import Layout
from dist_ens.storage import Disk, place_of
from two_savers import RECORD

reader, steps_in = saved_step, saved_steps


def state_of(value, length=3):
    return Layout.make(4).put({"w": np.full((4, length), value, np.float32)}, "members")


def shapes_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def snapshot(step, state, record=None, **fields):
    return Snapshot(step, leaves_off_devices(state), record or RECORD, **fields)


def begun(folder, say=None, **fields):
    """The folder of a run, locked for it, as a context."""
    return Checkpoints(folder, **fields).open(RECORD, **({} if say is None else {"say": say}))


def save(folder, state, step=1, **fields):
    """Saves a state of a run, and waits for it."""
    with begun(folder) as opened:
        opened.save(snapshot(step, state, **fields))


def verified(run, step=None):
    """Verifies a run as the command does, and returns its code and its lines."""
    from launch import members

    flag = mock.patch.object(members, "_STEP", types.SimpleNamespace(value=step))
    with flag, contextlib.redirect_stdout(io.StringIO()) as printed:
        code = members._verify(place_of(run, "run"))
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
    changed = dataclasses.replace(Manifest.read(Disk(folder)), **changes)
    (folder / MANIFEST).write_bytes(changed.to_bytes())


def reseal(folder):
    """Writes the manifest anew for the files that are there, as if they had been saved."""
    place = Disk(folder)
    rewrite(folder, files=entries_of(place, {*place.names()} - {MANIFEST}))
