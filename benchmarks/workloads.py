"""The workloads that the benchmarks train, with dist_ens and in other ways.

The data are random arrays of the real sizes and types, made from a seed, so nothing is downloaded.
The times do not depend on their values.
"""

import dataclasses
from collections.abc import Callable

import flax.linen as nn
import jax
import numpy as np

from dist_ens.experiment import OptimizerConfig
from dist_ens.losses import Loss, Objective, categorical, gaussian
from dist_ens.members import Member, from_linen, with_normalized_inputs
from dist_ens.models.convolutional import resnet8
from dist_ens.models.mlp import mlp
from dist_ens.models.transformer import transformer

_SEED = 0
_ADAM = OptimizerConfig(name="adam", learning_rate=1e-3)
_TEN_CLASSES = categorical(10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """An ensemble, and the data to train it on.

    Attributes:
        name: Name of the workload, such as `W1`.
        title: Short description of the workload.
        num_members: Number of members.
        batch_size: Number of examples per member and step.
        own_batches: Whether each member has its own order of the examples. If not, all members see
            the same batch.
        inputs: Inputs of all examples, [examples, ...], as the files hold them.
        labels: Labels of all examples, [examples, ...].
        network: Kind of network: `mlp`, `convolutional`, `resnet8` or `transformer`. It selects
            the network in PyTorch.
        mean: Mean that is subtracted from the inputs: one number, or one per channel.
        std: Standard deviation by which the inputs are then divided: one number, or one per
            channel.
        bare_member: Network of inputs that are already scaled.
        objective: Objective of the members.
        steps_per_call: Number of steps in one call of dist_ens's update.
        optimizer: Optimizer of one member.
    """

    name: str
    title: str
    num_members: int
    batch_size: int
    own_batches: bool = False
    inputs: np.ndarray
    labels: np.ndarray
    network: str
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    bare_member: Member
    objective: Objective = _TEN_CLASSES
    steps_per_call: int = 1
    optimizer: OptimizerConfig = _ADAM

    @property
    def member(self) -> Member:
        """Network of inputs that are not yet scaled."""
        return with_normalized_inputs(self.bare_member, self.mean, self.std)

    @property
    def loss(self) -> Loss:
        """Loss of each example, a function of outputs and labels."""
        return self.objective.example_loss

    @property
    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of a batch, leaves [batch, ...]."""
        return {
            name: jax.ShapeDtypeStruct((self.batch_size, *leaf.shape[1:]), leaf.dtype)
            for name, leaf in (("inputs", self.inputs), ("labels", self.labels))
        }


class _ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x[..., None]
        for features in (32, 64):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
            x = nn.max_pool(x, (2, 2), strides=(2, 2))
        x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
        return nn.Dense(10)(x)


def _regression(name: str, num_members: int) -> Workload:
    """Returns a regression workload of the size of a small UCI data set."""
    random = np.random.default_rng(_SEED)
    return Workload(
        name=name,
        title=f"{num_members} x MLP 13-50-2, own batches",
        num_members=num_members,
        batch_size=100,
        own_batches=True,
        inputs=random.normal(size=(455, 13)).astype(np.float32),
        labels=random.normal(size=455).astype(np.float32),
        network="mlp",
        bare_member=mlp((13,), 2, hidden_sizes=(50,)),
        objective=gaussian(),
        steps_per_call=50,
        optimizer=OptimizerConfig(name="adam", learning_rate=0.01),
    )


def _images(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(_SEED)
    inputs = random.integers(0, 256, shape, dtype=np.uint8)
    return inputs, random.integers(0, 10, shape[0], dtype=np.int32)


def _mlp() -> Workload:
    inputs, labels = _images(60_000, 28, 28)
    return Workload(
        name="W3",
        title="8 x MLP 784-512-512-10",
        num_members=8,
        batch_size=128,
        inputs=inputs,
        labels=labels,
        network="mlp",
        std=(255.0,),
        bare_member=mlp((28, 28), 10, hidden_sizes=(512, 512)),
        steps_per_call=20,
    )


def _convolutional(name: str, num_members: int) -> Workload:
    inputs, labels = _images(60_000, 28, 28)
    return Workload(
        name=name,
        title=f"{num_members} x CNN on 28x28",
        num_members=num_members,
        batch_size=64,
        inputs=inputs,
        labels=labels,
        network="convolutional",
        std=(255.0,),
        bare_member=from_linen(_ConvNet()),
    )


def _resnet8() -> Workload:
    inputs, labels = _images(10_000, 32, 32, 3)
    return Workload(
        name="W5",
        title="4 x ResNet-8 on 32x32x3",
        num_members=4,
        batch_size=64,
        inputs=inputs,
        labels=labels,
        network="resnet8",
        mean=(125.3, 123.0, 113.9),
        std=(63.0, 62.1, 66.7),
        bare_member=resnet8((32, 32, 3), 10),
        optimizer=OptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9, weight_decay=1e-4),
    )


def _transformer() -> Workload:
    random = np.random.default_rng(_SEED)
    characters = random.integers(0, 65, (8_000, 129), dtype=np.int32)
    return Workload(
        name="W6",
        title="4 x transformer, 128 characters",
        num_members=4,
        batch_size=32,
        inputs=np.ascontiguousarray(characters[:, :-1]),
        labels=np.ascontiguousarray(characters[:, 1:]),
        network="transformer",
        bare_member=transformer((128,), 65, num_blocks=2, width=128, num_heads=4, mlp_size=512),
        objective=categorical(65),
    )


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "W1": lambda: _regression("W1", 100),
    "W2": lambda: _regression("W2", 5),
    "W3": _mlp,
    "W4": lambda: _convolutional("W4", 4),
    "W4x16": lambda: _convolutional("W4x16", 16),
    "W5": _resnet8,
    "W6": _transformer,
}
