"""One of two hosts with four devices each; it trains the same small ensemble on several meshes.

python tests/two_hosts.py COORDINATOR PROCESS_ID FOLDER
"""

import os
import pathlib
import sys

MESHES = [(8, 1), (4, 2), (2, 4), (1, 8)]


def experiment(ensemble_axis):
    from dist_ens.config import Experiment

    return Experiment.from_dict(
        {
            "num_members": 8,
            "steps": 6,
            "steps_per_call": 2,
            "layout": {"ensemble_axis": ensemble_axis},
            "data": {"global_batch_size": 32, "std": (16.0,)},
            "model": {"name": "mlp", "hidden_sizes": (16,)},
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
            "checkpoint": {"every_steps": 4},
            "evaluation": {"global_batch_size": 100},
            "logging": {"every_steps": 2},
        }
    )


def main(coordinator, process_id, folder):
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
    )
    os.environ["JAX_PLATFORMS"] = "cpu"
    from dist_ens import cluster
    from dist_ens.train import train

    cluster.start(coordinator, 2, int(process_id))
    for rows, columns in MESHES:
        train(experiment(rows), pathlib.Path(folder) / f"{rows}x{columns}")


if __name__ == "__main__":
    main(*sys.argv[1:])
