"""Opening of the source that a config names."""

from dist_ens.config import DataConfig, did_you_mean
from dist_ens.data.digits import open_digits
from dist_ens.data.idx import open_idx, open_idx_test
from dist_ens.data.npz import open_npz
from dist_ens.data.source import Source, num_held_out
from dist_ens.data.spec import Spec
from dist_ens.data.splits import Split
from dist_ens.data.text import open_text
from dist_ens.data.tfds import describe_tfds, open_tfds
from dist_ens.data.uci import open_uci
from dist_ens.errors import UserError
from dist_ens.paths import shortened

_KINDS = ("digits", "idx", "npz", "tfds", "text", "uci")


def open_source(config: DataConfig) -> Source:
    """Opens the data set that a config names.

    Args:
        config: Description of the data set. Its `source` is `digits`, `idx:DIR`, `npz:FILE`,
            `tfds:NAME`, `text:FILE` or `uci:FILE`.

    Returns:
        The source, with a validation split if `config.validation` is above 0. Examples in memory
        have been checked. A TFDS source checks them when it reads them.

    Raises:
        UserError: If the name is unknown, or the data cannot be used.
    """
    return _open(config).with_validation(config.validation)


def _open(config: DataConfig) -> Source:
    kind, place = _parse(config.source)
    if kind == "digits":
        return open_digits(config.num_classes)
    if kind == "idx":
        return open_idx(place, config.num_classes)
    if kind == "npz":
        return open_npz(place, config.num_classes)
    if kind == "text":
        return open_text(place, config.context_length)
    if kind == "uci":
        if config.num_classes is not None:
            raise UserError(
                f"data.num_classes={config.num_classes} was given for a table, whose targets are "
                "real numbers. Leave it out."
            )
        return open_uci(place)
    return open_tfds(place, config.data_dir, config.num_classes)


def open_test(config: DataConfig) -> Split:
    """Opens the test split of the data set that a config names.

    A folder of IDX files then needs no training split.

    Args:
        config: Description of the data set.

    Raises:
        UserError: If the name is unknown, or the data cannot be used.
    """
    kind, place = _parse(config.source)
    return open_idx_test(place) if kind == "idx" else _open(config).test


def describe_source(config: DataConfig) -> tuple[Spec, int | None]:
    """Describes the examples of a data set.

    For `tfds` only the metadata are read, and the training labels if nothing else states the number
    of classes. All other data sets are opened.

    Args:
        config: Description of the data set.

    Returns:
        Description of the examples, and the number of training examples of a group. The number is
        None if TFDS has not prepared the data set.

    Raises:
        UserError: If the name is unknown, or the data are missing or cannot be used.
    """
    spec, count = _describe(config)
    return spec, count and count - num_held_out(config.validation, count)


def _describe(config: DataConfig) -> tuple[Spec, int | None]:
    kind, place = _parse(config.source)
    if kind == "tfds":
        return describe_tfds(place, config.data_dir, config.num_classes)
    source = _open(config)
    return source.spec, source.num_train_examples


def comes_in_memory(config: DataConfig) -> bool:
    """Returns whether opening the data set that a config names reads its examples into memory.

    Args:
        config: Description of the data set.

    Raises:
        UserError: If the name is unknown.
    """
    return _parse(config.source)[0] != "tfds"


def _parse(source: str) -> tuple[str, str]:
    """Splits the name of a source into its kind and its path or name."""
    kind, _, place = source.partition(":")
    if kind not in _KINDS or bool(place) == (kind == "digits"):
        meant = "" if kind in _KINDS else did_you_mean(kind, _KINDS)
        raise UserError(
            f"data.source={shortened(source)} is not a data source.{meant} Choose "
            "digits, idx:DIR, npz:FILE, tfds:NAME, text:FILE or uci:FILE."
        )
    return kind, place
