"""Ten LeNet-5s on MNIST."""

from ml_collections import ConfigDict

from dist_ens.config import Experiment


def get_config() -> ConfigDict:
    """The experiment; every field can be overridden with `--config.FIELD=…`."""
    experiment = Experiment.from_dict(
        dict(
            num_members=10,
            steps=7030,  # 15 epochs
            execution="unroll",
            data=dict(source="tfds:mnist", global_batch_size=128, std=(255.0,)),
            model=dict(name="lenet5"),
            optimizer=dict(name="adam", learning_rate=1e-3, schedule="cosine", schedule_steps=7030),
        )
    )
    return experiment.to_config_dict()
