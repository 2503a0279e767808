"""One of two processes with two devices each, which train losses of the whole batch.

python tests/two_divided.py COORDINATOR PROCESS_ID FOLDER

It writes parameters, model state and metrics of each arrangement to FOLDER/NAME PROCESS_ID.npz.
"""

import os
import pathlib
import sys

import numpy as np

import fast_xla

# Rows and model axis of the mesh, the order of the four devices, of which process 0 has the first
# two, and the execution of a device's members.
ARRANGEMENTS = {
    "within a process": (2, 1, [0, 1, 2, 3], "vmap"),
    "across both": (2, 1, [0, 2, 1, 3], "map"),
    "one row": (1, 1, [0, 1, 2, 3], "loop"),
    "shared in a process": (2, 2, [0, 1, 2, 3], "loop"),
    "shared by both": (1, 4, [0, 1, 2, 3], "loop"),
}


def main(coordinator, process_id, folder):
    os.environ["XLA_FLAGS"] = fast_xla.flags(2)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import optax

    import batch_programs
    import dist_ens as de
    from dist_ens.layout import to_host
    from dist_ens.processes import cluster

    cluster.start(coordinator, 2, int(process_id))
    init, loss = batch_programs.network_and_loss(batch_programs.FEW)
    for name, (rows, model_axis, order, execution) in ARRANGEMENTS.items():
        devices = [jax.devices()[i] for i in order]
        layout = de.Layout.make(2, ensemble_axis=rows, model_axis=model_axis, devices=devices)
        ensemble = de.Ensemble(
            de.as_member(init=init),
            optax.sgd(batch_programs.RATE),
            loss,
            num_members=2,
            seed=batch_programs.SEED,
            layout=layout,
            execution=execution,
        )
        own = layout.host_rows(batch_programs.BATCH)
        state, metrics = None, []
        for batch in batch_programs.batches():
            of_host = {key: leaf[own] for key, leaf in batch.items()}
            state = ensemble.init(batch) if state is None else state
            state, of_step = ensemble.update(state, of_host)
            # With a hundred calls in flight, the collectives of CPUs may hang.
            metrics.append(to_host(of_step))
            del metrics[-1]["loss"]  # The sum of all losses is no program's.
        stacked = jax.tree.map(lambda *values: np.stack(values), *metrics)
        found = batch_programs.Trained(*to_host((state.params, state.model_state)), stacked)
        saved = de.Checkpoints(f"{folder}/saved {name}")
        saved.save(batch_programs.STEPS, state)
        _, restored = saved.restore(layout, state)
        jax.tree.map(np.testing.assert_array_equal, *map(to_host, (restored.params, state.params)))
        file = pathlib.Path(folder) / f"{name} {process_id}.npz"
        np.savez(file, *jax.tree.leaves(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
