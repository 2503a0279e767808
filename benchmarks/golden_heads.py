"""Writes `tests/heads_by_torch.npz`: weights, inputs and outputs of networks with heads, by others.

Install the reference packages and run, in one command:

    pip install torch==2.13.0 numpy einops tabm==0.0.3 &&
    pip install --no-deps torch-uncertainty==0.13.0 && python benchmarks/golden_heads.py

Run with Python 3.11, torch 2.13.0 (CPU), torch-uncertainty 0.13.0, tabm 0.0.3,
einops 0.8.2 and numpy 2.4.6.

Each network maps inputs [8, 5] through two hidden layers of width 16 with ReLU to
4 heads of output width 3 (one kind has width 4), without dropout, in evaluation
mode. All arrays are float32. For each kind the file holds `<kind>/inputs`,
`<kind>/outputs` ([heads, batch, width]) and `<kind>/weights/<state_dict name>`.
`tests/test_heads.py` gives the mathematics of each kind.
"""

import importlib.util
import pathlib
import sys
import types
from collections.abc import Sequence

import numpy as np
import torch
from tabm import TabM

BATCH, FEATURES, WIDTH, OUTPUTS, HEADS = 8, 5, 16, 3, 4
HIDDEN = [WIDTH, WIDTH]
# Last part of the state_dict names of the vectors that multiply activations.
SCALES = ("r_group", "s_group", "r", "s")


def skip_package_init(name: str) -> None:
    """Makes the modules of a package importable without running its `__init__`.

    The __init__ files of torch_uncertainty import Lightning and torchvision, which
    the layers used here do not need.
    """
    package = types.ModuleType(name)
    found = importlib.util.find_spec(name)
    if found is not None and found.submodule_search_locations is not None:
        package.__path__ = [*found.submodule_search_locations]
    sys.modules[name] = package


skip_package_init("torch_uncertainty")
skip_package_init("torch_uncertainty.models")

PackedLinear = importlib.import_module("torch_uncertainty.layers").PackedLinear
mlp = importlib.import_module("torch_uncertainty.models.mlp")


def tabm(arch_type: str) -> torch.nn.Module:
    """Returns TabM on numeric features only, without embeddings."""
    sizes = {"n_num_features": FEATURES, "d_out": OUTPUTS, "d_block": WIDTH}
    return TabM.make(**sizes, n_blocks=2, k=HEADS, dropout=0.0, arch_type=arch_type)


def packed(gamma: int = 1, outputs: int = OUTPUTS) -> torch.nn.Module:
    """Returns a packed ensemble: the first layer is dense, the last one splits into heads."""
    return mlp.packed_mlp(FEATURES, outputs, HIDDEN, HEADS, alpha=2, gamma=gamma)


def packed_gamma2() -> torch.nn.Module:
    """Returns a packed ensemble with gamma=2 in the hidden layer and gamma=1 in the last layer.

    packed_mlp passes gamma to the last layer too, which raises an error here: the
    4 * 3 outputs do not split into 4 * 2 groups. packed_resnet of the same package
    keeps gamma=1 in the last layer; this network does the same.
    """
    model = packed()
    model.layers[1] = PackedLinear(WIDTH, WIDTH, alpha=2, num_estimators=HEADS, gamma=2)
    return model


# batched_mlp repeats the batch itself with "b ... -> (m b) ...": the whole batch for
# head 0, then the whole batch for head 1, and so on. Each BatchLinear then computes
#     y = ((x * r_group[m]) @ linear.weight.T) * s_group[m] + bias[m]
# for the rows of head m, so the outputs come with the head as the slow index.
MODELS = {
    "batch_ensemble": lambda: mlp.batched_mlp(FEATURES, OUTPUTS, HIDDEN, HEADS),
    "tabm": lambda: tabm("tabm"),
    "tabm_mini": lambda: tabm("tabm-mini"),
    "tabm_packed": lambda: tabm("tabm-packed"),
    "packed": packed,
    "packed_gamma2": packed_gamma2,
    "packed_gamma2_out4": lambda: packed(gamma=2, outputs=4),
}


def random_weights(name: str, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Returns random values far from 0 and 1 for scale vectors, normal values for the rest."""
    if name.rsplit(".", 1)[-1] in SCALES or name == "backbone.affine.weight":
        sizes = 1 + rng.choice([-1, 1], shape) * rng.uniform(0.1, 0.5, shape)
        return rng.choice([-1, 1], shape) * sizes
    return rng.normal(0.0, 0.4, shape)


arrays = {}
for seed, (kind, make_model) in enumerate(MODELS.items()):
    rng = np.random.default_rng(seed)
    model = make_model().eval()
    weights = {
        name: torch.from_numpy(np.float32(random_weights(name, value.shape, rng)))
        for name, value in model.state_dict().items()
    }
    model.load_state_dict(weights)
    inputs = torch.from_numpy(np.float32(rng.normal(size=(BATCH, FEATURES))))
    with torch.no_grad():
        outputs = model(inputs)
    if kind.startswith("tabm"):  # [batch, heads, width]
        outputs = outputs.transpose(0, 1)
    else:  # [heads * batch, width], with the head as the slow index
        outputs = outputs.reshape(HEADS, BATCH, -1)
    arrays[f"{kind}/inputs"] = inputs.numpy()
    arrays[f"{kind}/outputs"] = np.ascontiguousarray(outputs.numpy())
    for name, value in weights.items():
        arrays[f"{kind}/weights/{name}"] = value.numpy()

np.savez(pathlib.Path(__file__).parent.parent / "tests" / "heads_by_torch.npz", **arrays)
