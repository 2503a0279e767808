"""A PyTorch `DataLoader` that feeds an ensemble, in your own loop around `Ensemble.update`.

The loader returns NumPy arrays (`collate_fn`). Its sampler draws the order of an epoch from a JAX
key. The order depends on (key, epoch) alone, so a run can be resumed at any epoch. Leave
`num_workers` at 0, or start workers with `multiprocessing_context="spawn"`, because a process that
runs JAX must not be forked.

    pip install 'dist-ens[torch]' && python examples/torch_dataloader.py
"""

import jax
import numpy as np
import optax

from dist_ens import Ensemble, evaluate, losses
from dist_ens.experiment import DataConfig, ModelConfig, make_model, open_source
from dist_ens.members import with_normalized_inputs

try:
    from torch.utils.data import DataLoader, Dataset, Sampler
except ImportError as error:
    raise SystemExit(
        "This example needs PyTorch. Install the extra: pip install 'dist-ens[torch]'."
    ) from error

NUM_MEMBERS, EPOCHS, BATCH_SIZE = 4, 15, 128


class Digits(Dataset):
    """A data set that returns one example at a time."""

    def __init__(self, split):
        self.split = split

    def __len__(self):
        return len(self.split)

    def __getitem__(self, index):
        example = self.split.take(np.array(index))
        return example["inputs"], example["labels"]


class KeySampler(Sampler):
    """A sampler of every example once, in an order that depends on (key, epoch) alone."""

    def __init__(self, num_examples, key):
        self.num_examples, self.key, self.epoch = num_examples, key, 0

    def __len__(self):
        return self.num_examples

    def __iter__(self):
        key = jax.random.fold_in(self.key, self.epoch)
        return iter(np.asarray(jax.random.permutation(key, self.num_examples)).tolist())


def numpy_collate(examples):
    """Returns the batch that `update` takes, as NumPy arrays. No torch tensor is made."""
    inputs, labels = zip(*examples, strict=True)
    return {"inputs": np.stack(inputs), "labels": np.array(labels, np.int32)}


def main():
    source = open_source(DataConfig(source="digits"))
    sampler = KeySampler(len(source.train), jax.random.key(0))
    loader = DataLoader(
        Digits(source.train),
        batch_size=BATCH_SIZE,
        sampler=sampler,
        collate_fn=numpy_collate,
        drop_last=True,  # A smaller last batch would need its own compiled program.
    )

    mlp = make_model(ModelConfig(name="mlp"), source.spec.input_shape, source.spec.num_classes)
    network = with_normalized_inputs(mlp, 0.0, 16.0)
    ensemble = Ensemble(network, optax.adam(1e-3), losses.categorical(10), num_members=NUM_MEMBERS)
    state = ensemble.init(next(iter(loader)))

    training_losses = []
    for epoch in range(EPOCHS):
        sampler.epoch = epoch
        for batch in loader:
            state, metrics = ensemble.update(state, batch)
            training_losses.append(np.asarray(metrics["loss"]).mean())

    scores = evaluate(ensemble, state, source)
    print(
        f"{len(training_losses)} batches of a DataLoader: loss {training_losses[0]:.3f} to "
        f"{training_losses[-1]:.3f}, test accuracy {scores.ensemble['accuracy']:.4f}, NLL "
        f"{scores.ensemble['nll']:.4f} (mean member {scores.mean_member['nll']:.4f})"
    )
    return {"steps": np.asarray(state.step), "losses": training_losses, "scores": scores}


if __name__ == "__main__":
    main()
