"""One of two hosts with four devices each; it trains the same small ensemble on several meshes.

python tests/two_hosts.py train|ROWS|hang|choose|yield|fail_0|fail_1 COORDINATOR PROCESS_ID FOLDER

`hang` trains FOLDER/killed on the last mesh, from data that never come after step 4, and waits to
be killed; `train` goes on with that run, then trains every mesh anew, groups of members, and on the
last mesh from a split that is divided over it. A number of ROWS trains on a mesh of these alone.
`choose` writes to FOLDER/chosen_PROCESS_ID.json what it chose, and what it tried.
`yield` trains on iterators whose batches may not fit together, and writes what `fit` said of each
pair to FOLDER/said_PROCESS_ID.json.
`fail_0` and `fail_1` save two checkpoints in FOLDER, of which that host has no room for the second,
and print what is told.
"""

import dataclasses
import json
import os
import pathlib
import resource
import sys
import time
import types
from typing import Any

import numpy as np

import fast_xla
from dist_ens.experiment.build import build_ensemble

ROWS = [8, 1]
# Free on a device, where a quarter is to hold 1,437 digits of 260 bytes only over eight columns.
FOR_A_DIVIDED_SPLIT = 1_000_000
# Inputs that both hosts predict, which do not divide over eight columns.
INPUTS = np.random.default_rng(0).normal(size=(10, 8, 8)).astype(np.float32)
YIELDED = {"inputs": (4, 3), "labels": (4,)}
# For each pair: the shapes that host 1 yields, where host 0 yields `YIELDED`.
PAIRS = {
    "alike": YIELDED,
    "width": YIELDED | {"inputs": (4, 2)},
    # 3 examples do not divide over the columns, of which only one host knows.
    "length": {"inputs": (3, 3), "labels": (3,)},
    "keys": {"inputs": (4, 3), "targets": (4,)},
    # The second batch of host 1 has labels that are no classes.
    "labels": YIELDED,
    # Both hosts feed the only column of the mesh.
    "shared": YIELDED,
    "different": YIELDED,
}


def experiment(ensemble_axis):
    from dist_ens.experiment import Experiment

    return Experiment.from_dict(
        {
            "num_members": 8,
            "steps": 6,
            "steps_per_call": 2,
            "execution": "vmap",
            "layout": {"ensemble_axis": ensemble_axis},
            "data": {"global_batch_size": 32, "std": (16.0,)},
            "model": {"name": "mlp_bn_dropout", "hidden_sizes": (16,)},
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
            "checkpoint": {"every_steps": 4},
            "evaluation": {"global_batch_size": 100},
            "logging": {"every_steps": 2},
        }
    )


def write_table(folder):
    """A table that is split four times."""
    random = np.random.default_rng(0)
    rows = np.stack([random.permutation(50) for _ in range(4)])
    table = dict(data=random.normal(size=(50, 4)), index_features=np.arange(3), index_target=3)
    np.savez(folder / "table.npz", **table, train_idx=rows[:, :40], test_idx=rows[:, 40:])


def of_groups(folder):
    """Four groups of two members, each with a split of its own of the table in a folder."""
    from dist_ens.experiment import DataConfig, LossConfig

    source = f"uci:{folder / 'table.npz'}"
    data = DataConfig(source=source, examples="splits", global_batch_size=8)
    return dataclasses.replace(experiment(4), data=data, loss=LossConfig(name="gaussian"))


@dataclasses.dataclass(frozen=True)
class HangingSplit:
    """A split of which only some examples ever come."""

    in_memory = False
    split: Any
    come: np.ndarray

    def __len__(self):
        return len(self.split)

    def take(self, indices):
        if not np.isin(indices, self.come).all():
            time.sleep(3600)
        return self.split.take(indices)


def choose_executions():
    """What is chosen for a long run on a mesh of one row, and once more."""
    from dist_ens.data.feed import ResidentFeed, put_whole
    from dist_ens.ensemble.select_execution import choose
    from dist_ens.experiment import ModelConfig, open_source
    from dist_ens.experiment.record import Run
    from dist_ens.layout import Layout

    network = ModelConfig(name="mlp", options={"hidden_sizes": (8,)})
    asked = dataclasses.replace(experiment(1), model=network)
    source = open_source(asked.data)
    run = Run(asked, source.spec, len(source.train))
    layout = Layout.make(8, ensemble_axis=1)
    ensemble = build_ensemble(run, layout)
    state = ensemble.init(run.batch(32 // layout.data_axis))
    draws = ResidentFeed(put_whole(source.train, layout), run.order, layout, 0)
    both = (choose(ensemble, state, draws(range(4)), 10**6, may_move=False) for _ in range(2))
    return [[chosen.execution, str(choice)] for chosen, choice in both]


def yield_wrongly(process_id):
    """What `fit` says of each pair of iterators; the batch size or the loss where it trains."""
    import jax
    import optax

    import dist_ens as de
    from dist_ens.ground.errors import RunError, UserError

    said = {}

    def init(key):
        return {"w": jax.random.normal(key, (3, 2))}

    def fit(name, network, loss, data, layout, **options):
        how = {"num_members": layout.num_members, "layout": layout, "execution": "vmap"}
        ensemble = de.Ensemble(network, optax.sgd(0.1), loss, **how, **options)
        begun = types.SimpleNamespace(begin=lambda run: said.update({name: run.batch_size}))
        try:
            return de.fit(ensemble, data, steps=2, log_every=1, progress=False, callbacks=[begun])
        except (UserError, RunError) as error:
            said[name] = str(error)

    dtypes = {"inputs": np.float32, "labels": np.int32, "targets": np.int32}
    for name, of_host_1 in PAIRS.items():
        shapes = (YIELDED, of_host_1)[process_id]
        batch = {key: np.zeros(shape, dtypes[key]) for key, shape in shapes.items()}
        if name == "different":
            batch["inputs"] += process_id
        batches = [batch]
        if name == "labels" and process_id == 1:
            batches.append(batch | {"labels": batch["labels"] - 1})
        layout = de.Layout.make(8, ensemble_axis=8 if name in ("shared", "different") else 1)
        network = init, lambda params, inputs: inputs @ params["w"]
        fit(name, network, de.losses.categorical(2), lambda of=batches: iter(of), layout)

    def loss_fn(params, model_state, batch, key):
        drawn = jax.random.uniform(key) + 0 * params["w"].sum()
        if batch is not None:
            drawn = 0 * drawn + batch["inner"].mean() + 10 * batch["boundary"].mean()
        return drawn, (model_state, {})

    # Rows of both hosts, and points on the boundary that both must yield alike.
    inner = np.full((4, 3), 1 + process_id, np.float32)
    for name, boundary in {"points": 2, "other points": process_id, "nothing": None}.items():
        data, specs = None, "batch"
        if boundary is not None:
            data = [{"inner": inner, "boundary": np.full((3, 3), boundary, np.float32)}]
            specs = {"boundary": "shared"}
        layout = de.Layout.make(2, ensemble_axis=1)
        found = fit(name, de.as_member(init=init), loss_fn, data, layout, batch_specs=specs)
        if found is not None:
            said[name] = found.history[0]["train/loss"]
    return said


def fail_to_save(folder, *, fails):
    """Two saves; a host that fails may write small files only at the second."""
    from dist_ens.checkpoint import Checkpoints
    from dist_ens.ground.errors import RunError
    from dist_ens.layout import Layout
    from saving import snapshot

    state = Layout.make(8).put({"w": np.ones((8, 1000), np.float32)}, "members")
    with Checkpoints(folder, keep=1).open({}) as saves:
        saves.save(snapshot(1, state))
        saves.wait()
        unlimited = resource.RLIM_INFINITY
        if fails:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited))
        saves.save(snapshot(2, state))
        try:
            saves.wait()
        except RunError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, (unlimited, unlimited))
            print(error)


def main(verb, coordinator, process_id, folder):
    os.environ["XLA_FLAGS"] = fast_xla.flags(4)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import dist_ens as de
    from dist_ens.data import feed
    from dist_ens.experiment import open_source
    from dist_ens.experiment.train import train
    from dist_ens.layout import Layout, to_host
    from dist_ens.processes import cluster
    from dist_ens.sampling import Order

    cluster.start(coordinator, 2, int(process_id))
    killed, folder = experiment(1), pathlib.Path(folder)
    if verb == "choose":
        file = folder / f"chosen_{process_id}.json"
        file.write_text(json.dumps(choose_executions()))
        return
    if verb == "yield":
        file = folder / f"said_{process_id}.json"
        file.write_text(json.dumps(yield_wrongly(int(process_id))))
        return
    if verb.startswith("fail"):
        fail_to_save(folder, fails=verb.endswith(process_id))
        return
    if verb == "hang":
        source = open_source(killed.data)
        order = Order(len(source.train), 32)
        come = order.indices(order.cursor(killed.seed, range(4)), np.arange(32))
        come = np.append(come, 0)  # of which the trainer looks at one before it begins
        hanging = dataclasses.replace(source, train=HangingSplit(source.train, come))
        vars(hanging)["fingerprint"] = source.fingerprint
        train(killed, folder / "killed", source=hanging)
    if verb.isdigit():
        train(experiment(int(verb)), folder / f"{verb}x{8 // int(verb)}")
        return
    train(killed, folder / "killed")
    for rows in ROWS:
        train(experiment(rows), folder / f"{rows}x{8 // rows}")
    loaded = de.load(folder / "1x8")
    outputs = loaded.ensemble.apply(loaded.state, INPUTS)
    np.save(folder / f"outputs_{process_id}.npy", to_host(outputs))
    train(of_groups(folder), folder / "groups")
    # As process 0 has room; nothing is streamed, whatever the other one sees.
    Layout.free_bytes = lambda layout: FOR_A_DIVIDED_SPLIT if cluster.is_main() else 0
    feed._streamed = None
    train(experiment(1), folder / "divided")


if __name__ == "__main__":
    main(*sys.argv[1:])
