"""Eight MLPs 784-512-512-10 on MNIST, trained as in JAX's own tutorial: three epochs of SGD.

    dist-ens train --config=configs/mnist_mlp.py --workdir=runs/mnist_mlp \\
        --config.data.source=idx:DIR

Inputs are not scaled (0 to 255) and keep the order of the file. Weights and biases are initialised
with 0.01 N(0, 1). The loss is also averaged over the ten classes, so the learning rate 0.01 is
0.001 for a loss in nats. All batches have 128 examples. The tutorial's last batch of an epoch has
96; here it is filled with examples of the next epoch.

Duration: 60 to 100 s on 2 CPU cores.
Result: the members' accuracies are 0.943 to 0.947 (published: 0.9468), and the ensemble's is 0.949.
Its NLL is 0.178; the mean member's is 0.186.

Source: https://docs.jax.dev/en/latest/notebooks/Neural_Network_and_Data_Loading.html
"""

from ml_collections import ConfigDict

from dist_ens.experiment import Experiment


def get_config() -> ConfigDict:
    """Returns the experiment. `--config.FIELD=…` overrides any field."""
    experiment = Experiment.from_dict(
        dict(
            num_members=8,
            epochs=3.0,
            steps_per_call=16,
            loss=dict(name="class_mean_categorical"),
            data=dict(source="tfds:mnist", global_batch_size=128, shuffle=False),
            model=dict(name="mlp", hidden_sizes=(512, 512), init="normal", init_stddev=0.01),
            optimizer=dict(name="sgd", learning_rate=0.01),
        )
    )
    return experiment.to_config_dict()
