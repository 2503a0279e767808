"""Opening of the source that a config names.

The name `npz:FILE` calls `open_npz(FILE)` of the module `dist_ens.data.npz`: a kind of source is a
module of `dist_ens.data` with such a function, and needs no other entry. The fields of `DataConfig`
of the same name are its other arguments.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import Any

from dist_ens import data
from dist_ens.data import Source, Spec, Split
from dist_ens.data.idx import open_idx_test
from dist_ens.data.source import num_held_out
from dist_ens.experiment.reading import words_of_a_config
from dist_ens.experiment.schema import DataConfig
from dist_ens.ground.errors import UserError, did_you_mean
from dist_ens.ground.paths import shortened

_OPEN, _DESCRIBE = "open_", "describe_"
_PLACES = {"idx": "DIR", "tfds": "NAME", "digits": ""}  # Others are files.
_MODULES = {
    found.name: importlib.import_module(f"{data.__name__}.{found.name}")
    for found in pkgutil.iter_modules(data.__path__)
}
_KINDS = [name for name, module in _MODULES.items() if hasattr(module, _OPEN + name)]
_KNOWN = ", ".join(f"{each}:{_PLACES.get(each, 'FILE')}".rstrip(":") for each in _KINDS)


def open_source(config: DataConfig) -> Source:
    """Opens the data set that a config names.

    It has a validation split if `config.validation` is above 0. Its `source` is `digits`,
    `idx:DIR`, `npz:FILE`, `tfds:NAME`, `text:FILE` or `uci:FILE`. Examples in memory have been
    checked. A TFDS source checks them when it reads them.
    """
    return _call(_OPEN, config).with_validation(config.validation)


def open_test(config: DataConfig) -> Split:
    """Opens the test split of the data set that a config names, without a training split."""
    kind, place = _parse(config.source)
    return open_idx_test(place) if kind == "idx" else _call(_OPEN, config).test


def describe_source(config: DataConfig) -> tuple[Spec, int | None]:
    """Describes the examples of a data set, reading little, with the number of training examples.

    The number is None if TFDS has not prepared the data set.
    """
    if hasattr(_MODULES[kind := _parse(config.source)[0]], _DESCRIBE + kind):
        spec, count = _call(_DESCRIBE, config)
    else:
        source = _call(_OPEN, config)
        spec, count = source.spec, source.num_train_examples
    return spec, count and count - num_held_out(config.validation, count)


def comes_in_memory(config: DataConfig) -> bool:
    """Returns whether opening the data set that a config names reads its examples into memory."""
    return _parse(config.source)[0] != "tfds"


@words_of_a_config()
def _call(verb: str, config: DataConfig) -> Any:
    """Calls the function of a kind of source with its arguments from a config."""
    kind, place = _parse(config.source)
    function: Callable[..., Any] = getattr(_MODULES[kind], verb + kind)
    names = [*inspect.signature(function).parameters][bool(place) :]
    arguments = {name: getattr(config, name) for name in names if hasattr(config, name)}
    return function(*([place] if place else []), **arguments)


def _parse(source: str) -> tuple[str, str]:
    """Splits the name of a source into its kind and its path or name."""
    kind, _, place = source.partition(":")
    if kind not in _KINDS or bool(place) == (_PLACES.get(kind) == ""):
        meant = "" if kind in _KINDS else did_you_mean(kind, _KINDS)
        raise UserError(
            f"data.source={shortened(source)} is not a data source.{meant} Choose one of {_KNOWN}."
        )
    return kind, place
