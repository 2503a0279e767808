"""One of two hosts whose iterators may yield batches that do not fit together.

python tests/two_iterators.py COORDINATOR PROCESS_ID FOLDER

It writes to FOLDER/said_PROCESS_ID.json what `fit` said of each pair of iterators, or the batch
size where it trained.
"""

import json
import os
import pathlib
import sys

import numpy as np

import fast_xla

ALIKE = ({"inputs": (4, 3), "labels": (4,)}, {"inputs": (4, 3), "labels": (4,)})
# For each pair: the shapes that host 0 and host 1 yield.
PAIRS = {
    "alike": ALIKE,
    "width": ({"inputs": (4, 3), "labels": (4,)}, {"inputs": (4, 2), "labels": (4,)}),
    # 3 examples do not divide over the columns, of which only one host knows.
    "length": ({"inputs": (4, 3), "labels": (4,)}, {"inputs": (3, 3), "labels": (3,)}),
    # The second batch of host 1 has labels that are no classes.
    "labels": ALIKE,
    "keys": ({"inputs": (4, 3), "labels": (4,)}, {"inputs": (4, 3), "targets": (4,)}),
    # Both hosts feed the only column of the mesh.
    "shared": ALIKE,
    "different": ALIKE,
}
IN_ONE_COLUMN = ("shared", "different")


def main(coordinator, process_id, folder):
    os.environ["XLA_FLAGS"] = fast_xla.flags(4)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import optax

    import dist_ens as de
    from dist_ens.ground.errors import RunError, UserError
    from dist_ens.processes import cluster

    cluster.start(coordinator, 2, int(process_id))
    network = (
        lambda key: {"w": jax.random.normal(key, (3, 2))},
        lambda params, inputs: inputs @ params["w"],
    )
    said = {}

    class Remembers:
        def begin(self, run):
            said[name] = {"batch_size": run.batch_size}

    for name, of_hosts in PAIRS.items():
        rows = 8 if name in IN_ONE_COLUMN else 1
        layout = de.Layout.make(8, ensemble_axis=rows)
        types = {"inputs": np.float32, "labels": np.int32, "targets": np.int32}
        shapes = of_hosts[int(process_id)]
        batch = {key: np.zeros(shape, types[key]) for key, shape in shapes.items()}
        if name == "different":
            batch["inputs"] += int(process_id)
        objective = de.losses.categorical(2)
        ensemble = de.Ensemble(
            network, optax.sgd(0.1), objective, num_members=8, layout=layout, execution="vmap"
        )
        batches = [batch]
        if name == "labels" and process_id == "1":
            batches.append(batch | {"labels": batch["labels"] - 1})
        try:
            data, callbacks = (lambda batches=batches: iter(batches)), [Remembers()]
            de.fit(ensemble, data, steps=2, progress=False, callbacks=callbacks)
        except (UserError, RunError) as error:
            said[name] = str(error)

    def loss_fn(params, model_state, batch, key):
        drawn = jax.random.uniform(key) + 0 * params["w"].sum()
        if batch is not None:
            drawn = 0 * drawn + batch["inner"].mean() + 10 * batch["boundary"].mean()
        return drawn, (model_state, {})

    # Rows of both hosts, and points on the boundary that both must yield alike.
    inner = np.full((4, 3), 1 + int(process_id), np.float32)
    for name, boundary in {"points": 2, "other points": int(process_id), "nothing": None}.items():
        data = None
        if boundary is not None:
            data = [{"inner": inner, "boundary": np.full((3, 3), boundary, np.float32)}]
        ensemble = de.Ensemble(
            de.as_member(init=network[0]),
            optax.sgd(0.1),
            loss_fn,
            num_members=2,
            layout=de.Layout.make(2, ensemble_axis=1),
            execution="vmap",
            batch_specs="batch" if data is None else {"boundary": "shared"},
        )
        try:
            result = de.fit(ensemble, data, steps=1, log_every=1, progress=False)
            said[name] = result.history[0]["train/loss"]
        except UserError as error:
            said[name] = str(error)
    (pathlib.Path(folder) / f"said_{process_id}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
