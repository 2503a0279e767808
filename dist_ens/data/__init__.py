"""Data sources, and the batches of one host, which are NumPy arrays. No device is used here."""

from dist_ens.data.arrays import source_of_arrays
from dist_ens.data.conversion import convert_inputs
from dist_ens.data.open import comes_in_memory, describe_source, open_source, open_test
from dist_ens.data.pipeline import calls, evaluation_batches, training_batches
from dist_ens.data.source import ArraySplit, PartOfSplit, Source, Split
from dist_ens.data.source_check import check_source
from dist_ens.data.spec import Spec, Standardization
from dist_ens.data.tree import LabelScaledSplit, TreeSplit, example_bytes_of, example_shapes_of

__all__ = [
    "ArraySplit",
    "LabelScaledSplit",
    "PartOfSplit",
    "Source",
    "Spec",
    "Split",
    "Standardization",
    "TreeSplit",
    "calls",
    "check_source",
    "comes_in_memory",
    "convert_inputs",
    "describe_source",
    "evaluation_batches",
    "example_bytes_of",
    "example_shapes_of",
    "open_source",
    "open_test",
    "source_of_arrays",
    "training_batches",
]
