"""Flags whose value is the path of a file or a folder."""

import pathlib

from absl import flags

from dist_ens.ground.paths import given_path

flags.disclaim_key_flags()  # A flag belongs to the module that calls `define_path`.


class _PathParser(flags.ArgumentParser):
    def __init__(self, name: str) -> None:
        self._name = name

    def parse(self, argument: str | pathlib.Path) -> pathlib.Path:
        return given_path(argument, f"--{self._name}")


def define_path(name: str, default: str | None, meaning: str) -> flags.FlagHolder:
    """Defines a flag whose value is a `pathlib.Path`."""
    serializer: flags.ArgumentSerializer = flags.ArgumentSerializer()
    return flags.DEFINE(_PathParser(name), name, default, meaning, serializer=serializer)
