"""Data sources, and the batches of one host, which are NumPy arrays. No device is used here."""

from dist_ens.data.arrays import source_of_arrays
from dist_ens.data.conversion import convert_inputs
from dist_ens.data.digits import open_digits
from dist_ens.data.idx import open_idx
from dist_ens.data.npz import open_npz
from dist_ens.data.order_rule import OrderRule, kfold, permuted, shared
from dist_ens.data.pipeline import calls, evaluation_batches, training_batches
from dist_ens.data.source import Source
from dist_ens.data.source_check import check_source
from dist_ens.data.spec import Spec, Standardization
from dist_ens.data.splits import (
    ArraySplit,
    LabelScaledSplit,
    PartOfSplit,
    Split,
    TreeSplit,
    example_bytes_of,
    example_shapes_of,
)
from dist_ens.data.text import open_text
from dist_ens.data.tfds import describe_tfds, open_tfds
from dist_ens.data.uci import open_uci

__all__ = [
    "ArraySplit",
    "LabelScaledSplit",
    "OrderRule",
    "PartOfSplit",
    "Source",
    "Spec",
    "Split",
    "Standardization",
    "TreeSplit",
    "calls",
    "check_source",
    "convert_inputs",
    "describe_tfds",
    "evaluation_batches",
    "example_bytes_of",
    "example_shapes_of",
    "kfold",
    "open_digits",
    "open_idx",
    "open_npz",
    "open_text",
    "open_tfds",
    "open_uci",
    "permuted",
    "shared",
    "source_of_arrays",
    "training_batches",
]
