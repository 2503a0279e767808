"""TensorFlow Datasets as a source, read without TensorFlow."""

import dataclasses
import importlib.util
from typing import Any, ClassVar

import numpy as np

from dist_ens.data.checks import check_finite, check_labels, count_classes
from dist_ens.data.source import Source
from dist_ens.data.spec import Spec
from dist_ens.errors import UserError, first_line
from dist_ens.narrowing import held_dtype, narrowed
from dist_ens.paths import given_path, shortened

# Read at a time where all are: undecoded, they are as large as their files.
_RECORDS = 1024
_LONGEST_REASON = 500  # characters of what TFDS says


@dataclasses.dataclass(frozen=True)
class TfdsSplit:
    """A prepared split, read record by record.

    Attributes:
        records: What `tfds.data_source` returns: random access to dicts of arrays.
        keys: Names of the features that are input and label.
        where: What an error calls the split.
        num_classes: Labels lie in [0, num_classes).
    """

    in_memory: ClassVar[bool] = False
    records: Any
    keys: tuple[str, str]
    where: str
    num_classes: int

    def __len__(self) -> int:
        return len(self.records)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """See `Split.take`."""
        records = _read(self.records, indices.ravel().tolist(), self.where)
        inputs, labels = (np.stack([record[key] for record in records]) for key in self.keys)
        check_finite(self.where, inputs)
        check_labels(self.where, labels, self.num_classes)
        inputs = narrowed(inputs, held_dtype(inputs.dtype), f"{self.where}, {self.keys[0]}")
        labels = narrowed(labels, np.int32, f"{self.where}, {self.keys[1]}")
        return {
            "inputs": inputs.reshape(indices.shape + inputs.shape[1:]),
            "labels": labels.reshape(indices.shape),
        }


def open_tfds(name: str, data_dir: str | None, num_classes: int | None) -> Source:
    """A data set of TFDS: splits `train` and `test`, its two supervised features.

    Args:
        name: As TFDS has it: `mnist`, `cifar10:3.0.2`, …
        data_dir: Where it is, or will be, prepared; None for TFDS's default.
        num_classes: Where the label feature does not say; default: counted in the training split.

    Returns:
        The source.

    Raises:
        UserError: For a data set that is unknown, cannot be prepared here, or does not fit.
    """
    import tensorflow_datasets as tfds

    builder = _prepared_builder(tfds, name, data_dir)
    where = f"tfds:{name} in {builder.data_dir}"
    absent = {"train", "test"} - set(builder.info.splits)
    if absent:
        raise UserError(
            f"A data set has the splits train and test. Received: {where} with "
            f"{', '.join(builder.info.splits) or 'none'}. Choose another data set, or write its "
            "arrays to an npz source."
        )
    input_key, label_key = _supervised_keys(builder, where)
    spec, num_classes = _spec(tfds, builder, (input_key, label_key), num_classes, where)
    splits = {split: builder.as_data_source(split=split) for split in ("train", "test")}
    for split, records in splits.items():
        if len(records) == 0:
            raise UserError(
                f"A split holds at least one example. Received: none ({where}, split {split}). "
                "Prepare the data set again."
            )
    train, test = (
        TfdsSplit(records, (input_key, label_key), f"{where}, split {split}", num_classes)
        for split, records in splits.items()
    )
    return Source(spec, train=train, test=test)


def describe_tfds(
    name: str, data_dir: str | None, num_classes: int | None
) -> tuple[Spec, int | None]:
    """What `open_tfds` would yield, and how many for training; nothing is prepared.

    Args:
        name: See `open_tfds`, like the others.
        data_dir: Where it may be prepared.
        num_classes: Where the label feature does not say; default: counted, in a prepared set.

    Returns:
        The description, and the number of training examples; None for a set that is not prepared.

    Raises:
        UserError: For a data set that is unknown, does not fit, or says too little unprepared.
    """
    import tensorflow_datasets as tfds

    builder = _builder(tfds, name, data_dir)
    where = f"tfds:{name} in {builder.data_dir}"
    spec, _ = _spec(tfds, builder, _supervised_keys(builder, where), num_classes, where)
    is_prepared = builder.is_prepared()
    return spec, builder.info.splits["train"].num_examples if is_prepared else None


def _spec(
    tfds: Any, builder: Any, keys: tuple[str, str], num_classes: int | None, where: str
) -> tuple[Spec, int]:
    """What TFDS says of the two features, and how many classes there are."""
    inputs, labels = (builder.info.features[key] for key in keys)
    shape, kinds = inputs.shape, [np.dtype(each.np_dtype).kind for each in (inputs, labels)]
    if (
        shape is None
        or None in shape
        or kinds[0] not in "biuf"
        or labels.shape != ()
        or kinds[1] not in "iu"
    ):
        raise UserError(
            "A data set has numbers of one shape as inputs, and the number of a class as label. "
            f"Received: {where}, feature {keys[0]}: {inputs!r}, feature {keys[1]}: {labels!r}. "
            "Choose another data set, or write its arrays to an npz source."
        )
    classes = num_classes or getattr(labels, "num_classes", None)
    if classes is None and not builder.is_prepared():
        raise UserError(
            "A network has an output for each class. Received: "
            f"{where}, which does not say how many there are. Prepare the data set, or set "
            "--config.data.num_classes."
        )
    classes = classes or _num_classes(tfds, builder, keys[1], where)
    return Spec(tuple(shape), np.dtype(inputs.np_dtype).name, (), classes), classes


def _supervised_keys(builder: Any, where: str) -> tuple[str, str]:
    """Names of the features that are input and label."""
    features = builder.info.features
    keys = builder.info.supervised_keys or ("image", "label")
    if len(keys) != 2 or not all(isinstance(key, str) and key in features for key in keys):
        raise UserError(
            f"A data set has one input and one label feature. Received: {where} with "
            f"{', '.join(features)}. Choose another data set, or write its arrays to an npz source."
        )
    return keys


def _num_classes(tfds: Any, builder: Any, label_key: str, where: str) -> int:
    """How many classes the training labels of a prepared set name."""
    undecoded = {
        key: tfds.decode.SkipDecoding() for key in builder.info.features if key != label_key
    }
    where = f"{where}, split train"
    label_only = builder.as_data_source(split="train", decoders=undecoded)
    labels = [
        record[label_key]
        for first in range(0, len(label_only), _RECORDS)
        for record in _read(
            label_only, list(range(first, min(first + _RECORDS, len(label_only)))), where
        )
    ]
    return count_classes(where, np.array(labels))


def _read(records: Any, indices: list[int], where: str) -> list[dict[str, Any]]:
    try:
        return records.__getitems__(indices)
    except (OSError, RuntimeError, ValueError) as error:  # the reader has none of its own
        raise UserError(
            f"A prepared data set can be read. Received: {where}: {first_line(error)} Prepare it "
            "again."
        ) from error


def _builder(tfds: Any, name: str, data_dir: str | None) -> Any:
    from google.protobuf.json_format import ParseError  # TFDS raises it for a damaged description

    if data_dir is not None and "://" not in data_dir:  # else a bucket's address
        data_dir = str(given_path(data_dir, "--config.data.data_dir"))
    try:
        return tfds.builder(name, data_dir=data_dir, try_gcs=False)
    # TFDS raises errors of other kinds for a version or a variant that it does not have.
    except (
        tfds.core.DatasetNotFoundError,
        AssertionError,
        OSError,
        ParseError,
        ValueError,
    ) as error:
        raise UserError(
            f"TFDS cannot open {shortened(f'tfds:{name}')} with data_dir={data_dir}: "
            f"{first_line(error)[:_LONGEST_REASON]} Correct the name, or --config.data.data_dir."
        ) from error


def _prepared_builder(tfds: Any, name: str, data_dir: str | None) -> Any:
    builder = _builder(tfds, name, data_dir)
    if not builder.is_prepared():
        if importlib.util.find_spec("tensorflow") is None:
            raise UserError(
                f"A data set is read without TensorFlow, but prepared with it. Received: "
                f"tfds:{name}, which is not prepared in {builder.data_dir}. Install the extra, "
                "pip install 'dist-ens[tfds-prepare]', and run the same command again; or set "
                "--config.data.data_dir to a folder where it is prepared."
            )
        builder.download_and_prepare(file_format="array_record")
    if builder.info.file_format.value != "array_record":
        raise UserError(
            "A data set is read without TensorFlow from array_record files. Received: "
            f"tfds:{name}, prepared as {builder.info.file_format.value} in {builder.data_dir}. "
            "Prepare it again with file_format='array_record', in another data folder."
        )
    return builder
