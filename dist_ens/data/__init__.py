"""Data sources, and their batches on the way to the devices of one host."""

from dist_ens.data.arrays import source_of_arrays
from dist_ens.data.columns import Column, TableRule
from dist_ens.data.digits import open_digits
from dist_ens.data.hugging_face import hugging_face
from dist_ens.data.idx import open_idx
from dist_ens.data.npz import open_npz
from dist_ens.data.order_rule import OrderRule, kfold, permuted, shared
from dist_ens.data.pictures import open_folder
from dist_ens.data.source import Source
from dist_ens.data.spec import Spec, Standardization
from dist_ens.data.splits import ArraySplit, Split, TreeSplit
from dist_ens.data.tables import table
from dist_ens.data.text import open_text
from dist_ens.data.uci import open_uci

# isort: split
# The other rooms of the package import these names, which users do not need.
from dist_ens.data.checks import check_source as check_source
from dist_ens.data.checks import convert_inputs as convert_inputs
from dist_ens.data.pipeline import calls as calls
from dist_ens.data.pipeline import evaluation_batches as evaluation_batches
from dist_ens.data.pipeline import training_batches as training_batches
from dist_ens.data.splits import LabelScaledSplit as LabelScaledSplit
from dist_ens.data.splits import PartOfSplit as PartOfSplit
from dist_ens.data.splits import batch_shapes_of as batch_shapes_of
from dist_ens.data.splits import example_bytes_of as example_bytes_of
from dist_ens.data.splits import example_shapes_of as example_shapes_of
from dist_ens.data.splits import parts_of as parts_of

__all__ = [
    "ArraySplit",
    "Column",
    "OrderRule",
    "Source",
    "Spec",
    "Split",
    "Standardization",
    "TableRule",
    "TreeSplit",
    "hugging_face",
    "kfold",
    "open_digits",
    "open_folder",
    "open_idx",
    "open_npz",
    "open_text",
    "open_uci",
    "permuted",
    "shared",
    "source_of_arrays",
    "table",
]
