"""From the name of a source to the source."""

from dist_ens.config import DataConfig, did_you_mean
from dist_ens.data.files import open_digits, open_idx, open_npz
from dist_ens.data.source import Source
from dist_ens.data.text import open_text
from dist_ens.data.tfds import open_tfds
from dist_ens.errors import UserError

_KINDS = ("digits", "idx", "npz", "tfds", "text")


def open_source(config: DataConfig) -> Source:
    """The data set that the config names.

    Args:
        config: `source` is `digits`, `idx:DIR`, `npz:FILE`, `tfds:NAME` or `text:FILE`.

    Returns:
        The source, every split checked.

    Raises:
        UserError: For an unknown name, or data that cannot be used.
    """
    kind, _, place = config.source.partition(":")
    if kind not in _KINDS or bool(place) == (kind == "digits"):
        raise UserError(
            "A data source is digits, idx:DIR, npz:FILE, tfds:NAME or text:FILE. Received: "
            f"{config.source!r}.{did_you_mean(kind, _KINDS)} Correct --config.data.source."
        )
    if kind == "digits":
        return open_digits(config.num_classes)
    if kind == "idx":
        return open_idx(place, config.num_classes)
    if kind == "npz":
        return open_npz(place, config.num_classes)
    if kind == "text":
        return open_text(place, config.context_length)
    return open_tfds(place, config.data_dir, config.num_classes)
