"""One of two hosts that save by the clock; it writes what it saw to FOLDER/saw_PROCESS_ID.json.

python tests/two_savers.py COORDINATOR PROCESS_ID FOLDER
"""

import json
import os
import pathlib
import shutil
import sys
import time

import numpy as np

import fast_xla

CALLS = 800
RECORD = {
    "member": "MLP",
    "optimizer": "adam",
    "loss": "categorical",
    "methods": [],
    "num_members": 8,
    "member_ids": [*range(8)],
    "seed": 0,
    "batch": "inputs float32[128, 4]",
    "fingerprint": "0" * 64,
    "versions": {"jax": "0.10.2"},
}


def results_of_early_stopping(folder):
    """Step, NLL and parameters' sum of a run that learns by heart, and of it when it has ended."""
    import jax
    import optax

    import dist_ens as de
    from dist_ens.layout import to_host

    random = np.random.default_rng(0)
    train, others = (
        {"inputs": random.normal(size=(16, 20)), "labels": random.integers(0, 2, 16)}
        for _ in range(2)
    )
    network = (
        lambda key: {"w": jax.random.normal(key, (20, 2))},
        lambda params, inputs: inputs @ params["w"],
    )
    objective = de.losses.categorical(2)
    ensemble = de.Ensemble(network, optax.sgd(0.2), objective, num_members=8, execution="vmap")
    results = []
    for _ in range(2):
        result = de.fit(
            ensemble,
            train,
            steps=60,
            eval_data=others,
            eval_every=2,
            steps_per_call=2,
            callbacks=[de.callbacks.EarlyStopping("nll", patience=3)],
            checkpoints=de.Checkpoints(folder, every_secs=None, keep=1),
            progress=False,
        )
        total = float(np.abs(to_host(result.state.params["w"])).sum())
        nll = {at["step"]: at["test/nll"] for at in result.history if "test/nll" in at}
        results.append((result.step, result.scores.ensemble["nll"], total, nll))
    return results


def main(coordinator, process_id, folder):
    os.environ["XLA_FLAGS"] = fast_xla.flags(4)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    from dist_ens.checkpoint import Checkpoints
    from dist_ens.ground.errors import UserError
    from dist_ens.layout import Layout
    from dist_ens.processes import cluster
    from dist_ens.training.cadence import Cadence
    from saving import flip, shapes_of, snapshot

    cluster.start(coordinator, 2, int(process_id))
    folder, clock = pathlib.Path(folder), cluster.clock
    readings, due = [], []

    def counted_clock():
        readings.append(clock())
        return readings[-1]

    cluster.clock = counted_clock
    values = np.random.default_rng(0).normal(size=(8, 400)).astype(np.float32)
    state = Layout.make(8).put({"w": values}, "members")

    def save(checkpoints, step):
        mine = {"position": f"host {process_id} at step {step}".encode()}
        checkpoints.save(snapshot(step, state, host_files=mine))

    checkpoints = Checkpoints(folder / "run", keep=2)
    cadence = Cadence(None, 1.0, 0)
    with checkpoints.open(RECORD) as opened, jax.transfer_guard("disallow"):
        for step in range(1, CALLS + 1):
            time.sleep(0.001 if process_id == "0" else 0.004)  # One host is ahead of the other.
            if cadence.is_due(step):
                due.append(step)
                save(opened, step)
        save(opened, CALLS)
    with checkpoints.open(RECORD) as opened:
        position = opened.restore_host_file("position").decode()
        absent = opened.restore_host_file("absent")
    # A part that host 1 has written changes, and only host 1 reads it.
    if process_id == "0":
        shutil.copytree(folder / "run", folder / "damaged")
        of_host_1 = folder / "damaged" / "checkpoints" / str(CALLS) / "state" / "ocdbt.process_1"
        data = max((of_host_1 / "d").iterdir(), key=lambda path: path.stat().st_size)
        flip(data, data.stat().st_size // 2)
    cluster.as_main_sees(True)
    said, restored = [], None
    with Checkpoints(folder / "damaged").open(RECORD, say=said.append) as damaged:
        while restored is None:
            restored = damaged.restore_state(shapes_of(state))
        resumed_position = damaged.restore_host_file("position").decode()
    try:
        with Checkpoints(folder / "locked").open(RECORD):
            refusal = None
    except UserError as error:
        refusal = str(error)
    saw = {
        "due": due,
        "readings": len(readings),
        "saved_step": opened.saved_step,
        "position": position,
        "absent": absent,
        "refusal": refusal,
        "early_stopping": results_of_early_stopping(folder / "early_stopping"),
        "said": said,
        "resumed_step": damaged.saved_step,
        "resumed_position": resumed_position,
    }
    (folder / f"saw_{process_id}.json").write_text(json.dumps(saw))


if __name__ == "__main__":
    main(*sys.argv[1:])
