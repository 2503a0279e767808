"""Config files: read from `--config=FILE`, overridden by `--config.FIELD=VALUE`."""

import pathlib
import runpy
import sys
import traceback
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_dict import placeholder

from dist_ens.config import Experiment, did_you_mean
from dist_ens.data import Spec
from dist_ens.errors import UserError
from dist_ens.members import Member
from dist_ens.models import model_options
from dist_ens.paths import given_path, shortened


class ConfigFile:
    """A Python file with `get_config()`, and `make_member(spec)` if it brings its own network.

    Args:
        path: Path of the file, which is run.

    Attributes:
        path: The same path with `~` expanded.

    Raises:
        UserError: If the file is missing or raises.
    """

    def __init__(self, path: str) -> None:
        file = given_path(path, "--config")
        self.path = str(file)
        if not file.is_file():
            raise UserError(
                f"--config={shortened(path)} is no file, seen from {pathlib.Path.cwd()}. Correct "
                "the path of the config."
            )
        sys.path.insert(0, str(file.parent))  # as `python FILE` does
        self._names = self._run(lambda: runpy.run_path(self.path))

    def experiment(self) -> Experiment:
        """What `get_config()` describes."""
        if "get_config" not in self._names:
            raise UserError(
                "A config file has a function get_config() that returns a ConfigDict. Received: "
                f"{self.path} without one. Add it."
            )
        config = self._run(self._names["get_config"])
        if not isinstance(config, ConfigDict):
            raise UserError(
                "get_config() returns an ml_collections.ConfigDict. Received, from "
                f"{self.path}: a {type(config).__name__}. Wrap it: ConfigDict(dict(…))."
            )
        return Experiment.from_dict(config.to_dict())

    @property
    def brings_member(self) -> bool:
        """Whether the file has a network of its own."""
        return "make_member" in self._names

    def make_member(self, spec: Spec) -> Member | None:
        """The file's own network for examples of this kind; None if it has none."""
        if not self.brings_member:
            return None
        member = self._run(lambda: self._names["make_member"](spec))
        if not isinstance(member, Member):
            raise UserError(
                f"make_member(spec) returns a dist_ens.members.Member. Received, from {self.path}: "
                f"a {type(member).__name__}. Use one of the adapters in dist_ens.members."
            )
        return member

    def _run(self, call: Any) -> Any:
        try:
            return call()
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # the file is somebody's program
            line = getattr(error, "lineno", None)
            frames = [
                f for f in traceback.extract_tb(error.__traceback__) if f.filename == self.path
            ]
            line = line or (frames[-1].lineno if frames else "?")
            raise UserError(
                f"A config file runs without an error. Received, from {self.path}: "
                f"{type(error).__name__}: {error} (line {line}). Correct the file."
            ) from error


class ConfigFlags:
    """`--config=FILE` and `--config.FIELD=VALUE` on the command line of one process.

    Args:
        overridable: Whether fields may be overridden; not where a finished run says them.
    """

    def __init__(self, *, overridable: bool = True) -> None:
        self.file: ConfigFile | None = None
        self._overridable = overridable
        self._overrides: Any = None
        self._given: set[str] = set()
        self._model_options: list[str] = []  # that the file does not set

    def prepare(self, argv: list[str]) -> list[str]:
        """Reads the file and defines a flag for each of its fields; returns the other arguments.

        Raises:
            UserError: If the file cannot be used, or a flag names a field that does not exist.
        """
        rest: list[str] = []
        arguments = iter(argv)
        for argument in arguments:
            argument = "-" + argument if argument.startswith("-config") else argument
            name, equals, value = argument.partition("=")
            if name == "--config":
                self.file = ConfigFile(value if equals else next(arguments, ""))
            else:
                rest.append(argument)
        overrides = [a.lstrip("-").partition("=")[0] for a in rest if a.startswith("--config.")]
        self._given = {name.removeprefix("config.") for name in overrides}
        if overrides and not self._overridable:
            raise UserError(
                "A run's own experiment says its fields, in its newest checkpoint. Received: "
                f"--{overrides[0]}. Leave it out; train takes it."
            )
        if self.file is None:
            if overrides:
                raise UserError(
                    "Fields are overridden in a config file. Received: "
                    f"--{overrides[0]} without a file. Add --config=FILE."
                )
            return rest
        config = self.file.experiment().to_config_dict()
        if not self.file.brings_member:
            self._model_options = _complete_model(config.model, rest)
        known = _paths(config)
        for name in sorted(self._given):
            if name not in known:
                raise UserError(
                    f"The config has no field {shortened(name)}.{did_you_mean(name, known)} The "
                    f"fields are: {', '.join(known)}."
                )
        for argument in rest:
            name = argument.lstrip("-").partition("=")[0]
            is_field = argument.startswith("-") and name in known and name not in flags.FLAGS
            if is_field and self._overridable:
                raise UserError(
                    "What a config says is overridden by --config.FIELD=VALUE. Received: "
                    f"--{name}. Write --config.{name}=…."
                )
        self._overrides = config_flags.DEFINE_config_dict("config", config, sys_argv=rest)
        return rest

    def experiment(self) -> Experiment:
        """The file's experiment, with what the flags say instead.

        Of `steps` and `epochs`, and of `num_members` and `members_per_group`, one given on the
        command line replaces the other.

        Raises:
            UserError: If there is no file, or a value is wrong.
        """
        if self.file is None:
            raise UserError(
                "A config says what is trained. Received: none. Add --config=FILE, such as "
                "--config=configs/digits.py."
            )
        values = self._overrides.value.to_dict()
        for option in self._model_options:
            if f"model.{option}" not in self._given:
                del values["model"][option]
        for pair in (("steps", "epochs"), ("num_members", "members_per_group")):
            for name, other in (pair, pair[::-1]):
                if name in self._given and other not in self._given:
                    values[other] = None
        return Experiment.from_dict(values)

    def make_member(self, spec: Spec) -> Member | None:
        """The file's own network for examples of this kind; None without one."""
        return None if self.file is None else self.file.make_member(spec)


def _complete_model(model: ConfigDict, arguments: list[str]) -> list[str]:
    """Adds the options of the network that the file, or a flag, names; returns which were added."""
    name = model.name
    for at, argument in enumerate(arguments):
        flag, equals, value = argument.lstrip("-").partition("=")
        if flag == "config.model.name":
            name = value if equals else "".join(arguments[at + 1 : at + 2])
    if name != model.name:
        for option in [option for option in model if option != "name"]:
            del model[option]  # of another network
    added = []
    for option, (default, kind) in model_options(name).items():
        if option not in model:
            model[option] = placeholder(kind) if default is None else default
            added.append(option)
    return added


def _paths(config: ConfigDict, prefix: str = "") -> list[str]:
    """Names of all fields, such as `data.source`."""
    names: list[str] = []
    for name in config:
        value = config[name]
        if isinstance(value, ConfigDict):
            names += _paths(value, f"{prefix}{name}.")
        else:
            names.append(prefix + name)
    return names
