"""MNIST in plain JAX, by the recipe of JAX's own tutorial: 784-512-512-10, SGD, three epochs."""

from ml_collections import ConfigDict

from dist_ens.config import Experiment


def get_config() -> ConfigDict:
    """The experiment; every field can be overridden with `--config.FIELD=…`."""
    experiment = Experiment.from_dict(
        dict(
            num_members=8,
            epochs=3.0,
            steps_per_call=16,
            loss="class_mean_cross_entropy",
            data=dict(source="tfds:mnist", global_batch_size=128, shuffle=False),
            model=dict(name="mlp", hidden_sizes=(512, 512), init_stddev=0.01),
            optimizer=dict(name="sgd", learning_rate=0.01),
        )
    )
    return experiment.to_config_dict()
