"""Four small transformers that predict the next character of a text.

    dist-ens train --config=configs/charlm.py --workdir=runs/charlm

The default text comes with every Python. `--config.data.source=text:FILE` uses another one.

Duration: 6 to 17 min on 2 CPU cores.
Result: on the last tenth of tinyshakespeare, the ensemble's NLL is 1.986 nats per character and its
accuracy 0.407. The mean member's are 2.041 and 0.395.
"""

import pydoc_data.topics

from ml_collections import ConfigDict

from dist_ens.experiment import Experiment


def get_config() -> ConfigDict:
    """Returns the experiment. `--config.FIELD=…` overrides any field."""
    experiment = Experiment.from_dict(
        dict(
            num_members=4,
            steps=600,
            data=dict(
                source=f"text:{pydoc_data.topics.__file__}",
                context_length=128,
                global_batch_size=32,
            ),
            model=dict(name="transformer", num_blocks=2, width=128, num_heads=4, mlp_size=512),
            optimizer=dict(
                name="adam",
                learning_rate=1e-3,
                schedule="cosine",
                schedule_steps=600,
                clip_norm=1.0,
            ),
            evaluation=dict(global_batch_size=64),
        )
    )
    return experiment.to_config_dict()
