"""Eight small MLPs on a table of your own: a CSV or Parquet file with a column of labels.

    dist-ens train --config=configs/table.py --workdir=runs/price \\
        --config.data.source=csv:houses.csv --config.data.target=price

Numbers are standardised, and text becomes categories. The target decides whether classes or real
targets are predicted. `dist-ens data` with the same flags shows what the networks are fed, and
`dist-ens predict --workdir=runs/price --input=new.csv --output=predictions.csv` predicts new rows.

Duration: 2,000 steps take seconds on 2 CPU cores. A table of more than some ten thousand rows needs
more: set `steps` and `optimizer.schedule_steps`.
Result: on a made-up table, price = 3000 size + 100,000 with noise of 5,000, the ensemble's RMSE is
4,833 on 120 test rows.
"""

from ml_collections import ConfigDict

from dist_ens.experiment import Experiment


def get_config() -> ConfigDict:
    """Returns the experiment. `--config.FIELD=…` overrides any field."""
    experiment = Experiment.from_dict(
        dict(
            num_members=8,
            steps=2000,
            loss=dict(name="auto"),
            data=dict(source="csv:FILE", global_batch_size=64, examples="permuted"),
            model=dict(name="mlp", hidden_sizes=(64, 64)),
            optimizer=dict(
                name="adamw",
                learning_rate=3e-3,
                weight_decay=1e-2,
                schedule="cosine",
                schedule_steps=2000,
                clip_norm=1.0,
            ),
        )
    )
    return experiment.to_config_dict()
