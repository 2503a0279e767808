"""A source of TensorFlow Datasets (TFDS), which are read without TensorFlow."""

import dataclasses
import importlib.util
from typing import Any, ClassVar, TypeAlias

import numpy as np

from dist_ens.data.checks import check_labels, count_classes
from dist_ens.data.source import Source
from dist_ens.data.spec import Spec
from dist_ens.ground.errors import UserError, first_line
from dist_ens.ground.extras import imported
from dist_ens.ground.narrowing import check_finite, held_dtype, narrowed
from dist_ens.ground.paths import given_path, shortened

# Number of records that are read at once to count the classes. Together they may need much memory,
# because an undecoded record is as large as its part of the files.
_RECORDS = 1024
_LONGEST_REASON = 500  # Largest number of characters of a message of TFDS that is shown.
# A builder or a data source of TFDS, which is imported only when it is needed.
_OfTfds: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class TfdsSplit:
    """A prepared split of TFDS, whose records are read on demand, from `tfds.data_source`.

    `keys` are the names of the input feature and of the label feature.
    """

    in_memory: ClassVar[bool] = False
    records: _OfTfds
    keys: tuple[str, str]
    where: str
    spec: Spec

    def __len__(self) -> int:
        return len(self.records)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Reads the examples at some positions, int64[...], and checks their values."""
        records = self.records.__getitems__(indices.ravel().tolist())
        inputs, labels = (np.stack([record[key] for record in records]) for key in self.keys)
        check_finite(self.where, inputs)
        check_labels(self.where, labels, self.spec.num_classes or 0)
        inputs = narrowed(inputs, held_dtype(inputs.dtype), f"{self.where}, {self.keys[0]}")
        labels = narrowed(labels, np.int32, f"{self.where}, {self.keys[1]}")
        return {
            "inputs": inputs.reshape(indices.shape + inputs.shape[1:]),
            "labels": labels.reshape(indices.shape),
        }


def open_tfds(name: str, data_dir: str | None, num_classes: int | None) -> Source:
    """Opens the splits `train` and `test` of a TFDS data set, with its two supervised features.

    A data set that is not prepared yet is prepared, which needs TensorFlow. The number of classes
    is taken from the label feature, or the training labels are counted if it states none.
    """
    builder = _builder(name, data_dir)
    if not builder.is_prepared():
        if importlib.util.find_spec("tensorflow") is None:
            raise UserError(
                f"tfds:{name} is not prepared in {builder.data_dir}, which needs TensorFlow. "
                "Install it, pip install 'dist-ens[tfds-prepare]', or set data_dir to a folder "
                "where the data set is prepared."
            )
        builder.download_and_prepare(file_format="array_record")
    where = f"tfds:{name} in {builder.data_dir}"
    keys, spec = _described(builder, num_classes, where)
    train, test = (
        TfdsSplit(builder.as_data_source(split=split), keys, f"{where}, split {split}", spec)
        for split in ("train", "test")
    )
    return Source(spec, train=train, test=test)


def describe_tfds(
    name: str, data_dir: str | None, num_classes: int | None
) -> tuple[Spec, int | None]:
    """Describes the source that `open_tfds` returns, without preparing it.

    Also returns the number of training examples, which is None if the data set is not prepared.
    """
    builder = _builder(name, data_dir)
    _, spec = _described(builder, num_classes, f"tfds:{name} in {builder.data_dir}")
    return spec, builder.info.splits["train"].num_examples if builder.is_prepared() else None


def _builder(name: str, data_dir: str | None) -> _OfTfds:
    tfds = imported("tensorflow_datasets", "tfds")

    if data_dir is not None and "://" not in data_dir:  # A bucket has an address, not a path.
        data_dir = str(given_path(data_dir, "data_dir"))
    try:
        return tfds.builder(name, data_dir=data_dir, try_gcs=False)
    # TFDS raises the other errors for a version or a variant that it does not have.
    except (tfds.core.DatasetNotFoundError, AssertionError, OSError, ValueError) as error:
        raise UserError(
            f"TFDS cannot open {shortened(f'tfds:{name}')} with data_dir={data_dir}: "
            f"{first_line(error)[:_LONGEST_REASON]} Correct the name, or data_dir."
        ) from error


def _described(
    builder: _OfTfds, num_classes: int | None, where: str
) -> tuple[tuple[str, str], Spec]:
    """Returns the names of the input feature and of the label feature, and their description."""
    features = builder.info.features
    keys = builder.info.supervised_keys or ("image", "label")
    given = [features[key] for key in keys if isinstance(key, str) and key in features]
    shapes = [each.shape for each in given]
    kinds = [np.dtype(each.np_dtype).kind for each in given if each.shape is not None]
    have_one_shape = len(kinds) == 2 and None not in shapes[0] and shapes[1] == ()
    if not have_one_shape or kinds[0] not in "biuf" or kinds[1] not in "iu":
        raise UserError(
            f"{where} does not have numbers of one shape as inputs and class numbers as labels: "
            f"its features are {dict(features.items())}. Write its arrays to an npz source."
        )
    inputs, labels = given
    classes = num_classes or getattr(labels, "num_classes", None)
    classes = classes or _num_classes(builder, keys[1], f"{where}, split train")
    return keys, Spec(tuple(inputs.shape), np.dtype(inputs.np_dtype).name, (), classes)


def _num_classes(builder: _OfTfds, label_key: str, where: str) -> int:
    """Counts the classes of the training labels of a prepared data set."""
    tfds = imported("tensorflow_datasets", "tfds")

    undecoded = {
        key: tfds.decode.SkipDecoding() for key in builder.info.features if key != label_key
    }
    records = builder.as_data_source(split="train", decoders=undecoded)
    labels = [
        record[label_key]
        for part in np.split(np.arange(len(records)), range(_RECORDS, len(records), _RECORDS))
        for record in records.__getitems__(part.tolist())
    ]
    return count_classes(where, np.array(labels))
