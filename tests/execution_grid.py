"""Trains one member of a shipped config in several ensembles, and compares its bits.

python tests/execution_grid.py CONFIG FILE

It writes to FILE, for each execution, a list of what `compared` returns. XLA compiles as for a
user: tests have flags with which it compiles soon, and other programs may have other bits.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import runpy
import sys

import numpy as np

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


class Grid:
    """The members of a shipped config, each the same in every ensemble when it is born.

    Args:
        config: Name of the config.
        most: Largest number of members.
    """

    def __init__(self, config, most=16):
        import jax

        from dist_ens.config import Experiment
        from dist_ens.experiment.build import build_ensemble
        from dist_ens.experiment.record import Run
        from dist_ens.layout import Layout
        from test_hlo import SPECS
        from test_loop_bits import random_batches

        get_config = runpy.run_path(str(CONFIGS / f"{config}.py"))["get_config"]
        experiment = Experiment.from_dict(get_config().to_dict())
        self.run = Run(experiment, SPECS[config], 1000, execution="loop")
        self.batches = random_batches(SPECS[config])
        self.devices = jax.devices()
        layout = Layout.make(most, ensemble_axis=1, devices=self.devices[:1])
        self.born = build_ensemble(self.run, layout).init(self.run.batch(BATCH))

    def trained(self, execution, num_members, num_devices):
        """The member after the calls.

        Returns:
            The bytes of each array of its state and of its losses, and its loss in each call.
        """
        import jax

        from dist_ens.experiment.build import build_ensemble
        from dist_ens.layout import BATCHES, MEMBERS, Layout
        from dist_ens.state import select_members

        layout = Layout.make(
            num_members, ensemble_axis=num_devices, devices=self.devices[:num_devices]
        )
        ensemble = build_ensemble(dataclasses.replace(self.run, execution=execution), layout)
        ids, position = range(num_members), MEMBER
        if num_members == 1:
            ids, position = (MEMBER,), 0
            ensemble = dataclasses.replace(ensemble, member_ids=ids)
        state = layout.moved(select_members(self.born, ids), MEMBERS)
        batches = layout.put(self.batches, BATCHES)
        losses = []
        for _ in range(CALLS):
            state, metrics = ensemble.update_steps(state, batches)
            losses.append(float(jax.device_get(metrics["loss"])[0, position]))
        whole = jax.device_get((state.params, state.model_state, state.opt_state, losses))
        arrays = [leaf if np.ndim(leaf) == 0 else leaf[position] for leaf in jax.tree.leaves(whole)]
        return [np.asarray(array).tobytes() for array in arrays], losses


def largest_difference(losses, reference):
    """The largest difference of two losses of a call, divided by the largest loss."""
    return float(np.max(np.abs(np.subtract(losses, reference))) / np.max(np.abs(reference)))


def compared(grid, execution, reference):
    """The bits of the member, and the largest difference of its losses, for each mesh.

    Args:
        grid: Members of a config.
        execution: Name of the execution.
        reference: Losses of the member by the execution `loop`.

    Returns:
        A list of `[num_members, num_devices, hash, difference from the reference]`.
    """
    found = []
    for num_members, num_devices in MESHES.get(execution, [PAIR]):
        arrays, losses = grid.trained(execution, num_members, num_devices)
        bits = hashlib.sha256(b"".join(arrays)).hexdigest()[:8]
        found.append([num_members, num_devices, bits, largest_difference(losses, reference)])
    return found


def main(config, file):
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["JAX_PLATFORMS"] = "cpu"
    grid = Grid(config)
    _, reference = grid.trained("loop", *PAIR)
    found = {name: compared(grid, name, reference) for name in executions_of(config)}
    pathlib.Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
