"""Regression on a UCI table: an ensemble of five small MLPs for each split of the file.

    dist-ens train --config=configs/uci.py --workdir=runs/yacht --config.data.source=uci:FILE

The protocol is that of Lakshminarayanan et al. (2017), Table 1, without adversarial training. The
network has one hidden layer and predicts the mean and variance of a normal distribution. It is
trained for 40 epochs with batches of 100. Two settings need attention:

- The protein table needs 100 hidden units: `--config.model.hidden_sizes="(100,)"`.
- Adam's learning rate is 0.01, and 0.003 for the naval table. With the paper's 0.1 it does not
  train well.

Scores are means over the splits, in the unit of the target.

Duration: 10 to 35 s on 2 CPU cores.
Result: RMSE and NLL (published values in brackets): yacht 1.01, 1.26 (1.58, 1.18); bostonHousing
3.11, 2.39 (3.28, 2.41); concrete 5.59, 3.00 (6.03, 3.06); energy 2.05, 1.44 (2.09, 1.38); kin8nm
0.079, -1.23 (0.09, -1.20); naval-propulsion-plant 0.0011, -5.55 (0.00, -5.63);
protein-tertiary-structure 4.51, 2.83 (4.71, 2.83).

Source: https://arxiv.org/abs/1612.01474.
"""

from ml_collections import ConfigDict

from dist_ens.experiment import Experiment


def get_config() -> ConfigDict:
    """Returns the experiment. `--config.FIELD=…` overrides any field."""
    experiment = Experiment.from_dict(
        dict(
            num_members=None,
            members_per_group=5,
            epochs=40.0,
            steps_per_call=50,
            loss=dict(name="gaussian"),
            data=dict(source="uci:FILE", global_batch_size=100, examples="splits"),
            model=dict(name="mlp", hidden_sizes=(50,), init="fan_in_uniform"),
            optimizer=dict(name="adam", learning_rate=0.01),
        )
    )
    return experiment.to_config_dict()
