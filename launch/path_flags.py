"""Flags whose value is the path or the address of a file or a folder."""

import os
from collections.abc import Callable

from absl import flags

from dist_ens.ground.paths import given_path
from dist_ens.storage import file_at, place_of

flags.disclaim_key_flags()  # A flag belongs to the module that calls these functions.


class _Parser(flags.ArgumentParser):
    def __init__(self, name: str, parsed: Callable[[str, str], object]) -> None:
        self._name, self._parsed = name, parsed

    def parse(self, argument: str) -> object:
        return self._parsed(argument, f"--{self._name}")


def define_path(name: str, default: str | None, meaning: str) -> flags.FlagHolder:
    """Defines a flag whose value is a `pathlib.Path`."""
    return _defined(name, default, meaning, given_path)


def define_file(name: str, default: str | None, meaning: str) -> flags.FlagHolder:
    """Defines a flag whose value is the path or the address of a file that is written."""
    return _defined(name, default, meaning, _checked_file)


def define_folder(name: str, default: str | None, meaning: str) -> flags.FlagHolder:
    """Defines a flag whose value is a `Place`: a folder on a disk or in a bucket."""
    return _defined(name, default, meaning, place_of)


def _checked_file(text: str, name: str) -> str:
    file_at(text, name)
    return os.fspath(text)


def _defined(
    name: str, default: str | None, meaning: str, parsed: Callable[[str, str], object]
) -> flags.FlagHolder:
    serializer: flags.ArgumentSerializer = flags.ArgumentSerializer()
    return flags.DEFINE(_Parser(name, parsed), name, default, meaning, serializer=serializer)
