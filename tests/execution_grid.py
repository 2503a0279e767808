"""Trains one member of a shipped config in several ensembles, and compares its bits.

python tests/execution_grid.py CONFIG FILE

It writes to FILE what `compared` returns for each execution.
"""

import hashlib
import json
import pathlib
import runpy
import sys
from unittest import mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dist_ens.experiment import Experiment
from dist_ens.experiment.build import build_ensemble
from dist_ens.experiment.record import Run
from dist_ens.ground.state import select_members
from dist_ens.layout import BATCHES, MEMBERS
from networks import layout_on
from test_hlo import SPECS

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
BATCH = 4
CALLS = 3  # of one step each
MEMBER = 1  # Its id, and its position among others. Alone it is the first.
# Numbers of members and of devices along the ensemble axis. One device, then several.
ALONE, PAIR, THREE, FOUR, SIX = (1, 1), (2, 1), (3, 1), (4, 1), (6, 1)
ON_TWO, SIX_ON_TWO, ON_EIGHT = (4, 2), (6, 2), (16, 8)
MESHES = {
    "loop": [ALONE, PAIR, SIX_ON_TWO, ON_EIGHT],
    "map": [ALONE, PAIR, THREE, ON_TWO, SIX_ON_TWO, ON_EIGHT],
    "chunk:2": [FOUR, SIX, THREE, PAIR, ON_TWO, ON_EIGHT],
    "vmap": [PAIR, THREE],
    "unroll": [PAIR, THREE],
}
LOWERINGS = {
    "convolves": ["vmap+patches", "unroll+canonical", "map+canonical", "vmap+apart"],
    "pools": ["unroll+masks", "loop+canonical+masks"],
    "multiplies": ["vmap+aligned", "vmap+flat"],
}


def executions_of(config):
    """Executions to try for a config: the ways, and the lowerings that change its network."""
    lowered = []
    if config in ("mnist_lenet", "cifar_resnet"):
        lowered += LOWERINGS["convolves"]
    if config == "mnist_lenet":
        lowered += LOWERINGS["pools"]
    return [*MESHES, *lowered, *LOWERINGS["multiplies"]]


def random_batches(spec):
    """Batches of one step."""
    random = np.random.default_rng(0)
    shape = (1, BATCH, *spec.input_shape)
    if spec.input_dtype.startswith("float"):
        inputs = random.normal(size=shape)
    else:
        inputs = random.integers(0, spec.num_classes, shape)
    labels = random.integers(0, spec.num_classes or 2, (1, BATCH, *spec.label_shape))
    return {"inputs": inputs.astype(spec.input_dtype), "labels": labels.astype(spec.label_dtype)}


class Grid:
    """At most `most` members of a shipped config, each born the same in every ensemble."""

    def __init__(self, config, most=16):
        get_config = runpy.run_path(str(CONFIGS / f"{config}.py"))["get_config"]
        experiment = Experiment.from_dict(get_config().to_dict())
        self.run = Run(experiment, SPECS[config], 1000)
        self.batches = random_batches(SPECS[config])
        ensemble = build_ensemble(self.run, layout_on((1, 1), most)).replace(execution="loop")
        self.born = ensemble.init(self.run.batch(BATCH))

    def trained(self, execution, num_members, num_devices):
        """The bytes of each array of the member and its losses, and its loss in each call."""
        ensemble, state, batches, position = self._put(execution, num_members, num_devices)
        losses = []
        for _ in range(CALLS):
            state, metrics = ensemble.update_steps(state, batches)
            losses.append(float(jax.device_get(metrics["loss"])[0, position]))
        whole = jax.device_get((state.params, state.model_state, state.opt_state, losses))
        arrays = [leaf if np.ndim(leaf) == 0 else leaf[position] for leaf in jax.tree.leaves(whole)]
        return [np.asarray(array).tobytes() for array in arrays], losses

    def smooth_gradient(self, execution, num_members, num_devices):
        """The gradient of the first step, as one vector, with softplus in the place of ReLU.

        The gradient of a ReLU jumps at zero. So executions whose roundings differ can have
        gradients that differ by more, if an input of a ReLU is as near to zero as a rounding.
        """
        ensemble, state, batches, position = self._put(execution, num_members, num_devices)
        ensemble = ensemble.replace(optimizer=keeping_gradients())
        zeros = jax.tree.map(np.zeros_like, jax.device_get(state.params))
        state = state._replace(opt_state=ensemble.layout.put(zeros, MEMBERS))
        with mock.patch("jax.nn.relu", jax.nn.softplus), mock.patch.object(nn, "relu", nn.softplus):
            state, _ = ensemble.update_steps(state, batches)
        kept = jax.tree.leaves(jax.device_get(state.opt_state))
        return np.concatenate([leaf[position].ravel() for leaf in kept], dtype=np.float64)

    def _put(self, execution, num_members, num_devices):
        """The ensemble, its state and its batches on devices, and the member's position."""
        layout = layout_on((num_devices, 1), num_members)
        ensemble = build_ensemble(self.run, layout).replace(execution=execution)
        ids, position = range(num_members), MEMBER
        if num_members == 1:
            ids, position = (MEMBER,), 0
            ensemble = ensemble.replace(member_ids=ids)
        state = layout.moved(select_members(self.born, ids), MEMBERS)
        return ensemble, state, layout.put(self.batches, BATCHES), position


def keeping_gradients():
    """An optimizer that changes nothing, and whose state is the last gradient."""

    def update(gradients, state, params=None):
        return jax.tree.map(jnp.zeros_like, gradients), gradients

    return optax.GradientTransformation(lambda params: params, update)


def relative_difference(value, reference):
    """The length of the difference of two vectors or numbers, divided by the reference's."""
    difference, reference = np.subtract(value, reference), np.asarray(reference)
    return float(np.linalg.norm(difference.ravel()) / np.linalg.norm(reference.ravel()))


def compared(grid, execution, loss, gradient):
    """The bits of the member, and how far its first step is from the given loss and gradient.

    `bits` lists [num_members, num_devices, hash, difference of the loss]. `gradient` is the
    relative difference of the smooth gradient on the first mesh with several members.
    """
    meshes, bits = MESHES.get(execution, [PAIR]), []
    for num_members, num_devices in meshes:
        arrays, losses = grid.trained(execution, num_members, num_devices)
        digest = hashlib.sha256(b"".join(arrays)).hexdigest()[:8]
        bits.append([num_members, num_devices, digest, relative_difference(losses[0], loss)])
    several = next(mesh for mesh in meshes if mesh[0] > 1)
    found = grid.smooth_gradient(execution, *several)
    return {"bits": bits, "gradient": relative_difference(found, gradient)}


def main(config, file):
    grid = Grid(config)
    _, (loss, *_) = grid.trained("loop", *PAIR)
    gradient = grid.smooth_gradient("loop", *PAIR)
    found = {name: compared(grid, name, loss, gradient) for name in executions_of(config)}
    pathlib.Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
