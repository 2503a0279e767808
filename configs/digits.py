"""Eight small MLPs on scikit-learn's digits: the first thing to run.

dist-ens train --config=configs/digits.py --workdir=runs/digits
"""

from ml_collections import ConfigDict, config_dict


def get_config() -> ConfigDict:
    """The experiment; every field can be overridden with `--config.FIELD=…`."""
    return ConfigDict(
        dict(
            num_members=8,
            seed=0,
            steps=500,
            epochs=config_dict.placeholder(float),
            steps_per_call=10,
            execution="vmap",
            layout=dict(ensemble_axis=config_dict.placeholder(int)),
            data=dict(source="digits", global_batch_size=128, std=(16.0,)),
            model=dict(name="mlp", hidden_sizes=(256, 256)),
            optimizer=dict(name="adam", learning_rate=1e-3),
            checkpoint=dict(every_steps=250),
        )
    )
