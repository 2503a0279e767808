"""Eight small MLPs on scikit-learn's digits. Run this config first.

    dist-ens train --config=configs/digits.py --workdir=runs/digits

Duration: 9 s on 2 CPU cores.
Result: the ensemble's accuracy is 0.986 and its NLL 0.065. The mean member's are 0.982 and 0.073.
"""

from ml_collections import ConfigDict

from dist_ens.experiment import Experiment


def get_config() -> ConfigDict:
    """Returns the experiment. `--config.FIELD=…` overrides any field."""
    experiment = Experiment.from_dict(
        dict(
            num_members=8,
            steps=500,
            steps_per_call=10,
            data=dict(source="digits", global_batch_size=128, std=(16.0,)),
            model=dict(name="mlp", hidden_sizes=(256, 256)),
            optimizer=dict(name="adam", learning_rate=1e-3),
            checkpoint=dict(every_steps=250),
        )
    )
    return experiment.to_config_dict()
