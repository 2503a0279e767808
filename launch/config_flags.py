"""The flags that describe a run: `--config=FILE` or `--experiment=FILE.json`, and overrides."""

import dataclasses
from collections.abc import Callable

from absl import flags
from ml_collections import ConfigDict, config_flags
from ml_collections.config_dict import placeholder

from dist_ens.experiment import (
    Experiment,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    fields_named,
    leaves,
    loss_options,
    model_options,
    optimizer_options,
)
from dist_ens.experiment.config_file import ConfigFile, stored_experiment
from dist_ens.experiment.named import LOSSES, Options, method_options
from dist_ens.experiment.reading import nearest_field
from dist_ens.ground.errors import UserError
from dist_ens.ground.paths import shortened

_CONFIG, _EXPERIMENT = "config", "experiment"
_OF_NEW_RUN = (
    "Config file, the path of a Python file. --config.FIELD=VALUE overrides one of its fields, "
    "such as --config.optimizer.learning_rate=0.01. The fields are the arguments of the network in "
    "model, those of the optimizer in optimizer, those of the loss and methods in loss, settings "
    "that differ from member to member in hyper, and: "
)
_OF_EXPERIMENT = (
    "Experiment in JSON instead of a config file, such as the experiment.json in the folder of a "
    "run. No code of it is run. --config.FIELD=VALUE overrides one of its fields."
)
_OF_FINISHED_RUN = (
    "Config file of the run. Needed only if it defines a part of the run, such as make_member."
)
_OPTIONS_OF_LOSSES = {option for name in LOSSES for option in loss_options(name)}
_OF_LOSS = ("name", *sorted(_OPTIONS_OF_LOSSES - method_options().keys()))
# Fields that each function of a config file replaces.
_REPLACED = {
    "make_member": ("model",),
    "make_optimizer": ("optimizer",),
    **dict.fromkeys(("make_objective", "make_loss"), tuple(f"loss.{each}" for each in _OF_LOSS)),
    "make_step": ("model", "optimizer"),
    "make_source": ("data.source",),
}
# Sections with options, and the function of a config file that replaces each.
_WITH_OPTIONS: tuple[tuple[str, type, Callable[[str], Options], str], ...]
_WITH_OPTIONS = (
    ("model", ModelConfig, model_options, "make_member"),
    ("optimizer", OptimizerConfig, optimizer_options, "make_optimizer"),
    ("loss", LossConfig, loss_options, "make_objective"),
)


class ConfigFlags:
    """The flags `--config=FILE`, `--experiment=FILE` and `--config.FIELD=VALUE` of a command.

    `file` is the config file that `prepare` reads, without a path if none is given.
    """

    def __init__(self, *, overridable: bool = True) -> None:
        # The flag stands here for the list of flags alone. `prepare` reads it, and defines it anew.
        if _CONFIG not in flags.FLAGS:
            fields = ", ".join(_paths(Experiment(steps=1).to_config_dict()))
            meaning = f"{_OF_NEW_RUN}{fields}." if overridable else _OF_FINISHED_RUN
            flags.DEFINE_string(_CONFIG, None, meaning)
        if overridable and _EXPERIMENT not in flags.FLAGS:
            flags.DEFINE_string(_EXPERIMENT, None, _OF_EXPERIMENT)
        self.file = ConfigFile()
        self._overridable = overridable
        self._overrides: flags.FlagHolder | None = None
        self._given: set[str] = set()
        self._defaults: list[str] = []  # Paths of options that the file does not set.

    def prepare(self, argv: list[str]) -> list[str]:
        """Reads the file and defines a flag for each of its fields."""
        if _CONFIG in flags.FLAGS:
            delattr(flags.FLAGS, _CONFIG)
        rest, stored = self._without_files(argv)
        prefix = f"--{_CONFIG}."
        self._given = {
            a.removeprefix(prefix).partition("=")[0] for a in rest if a.startswith(prefix)
        }
        if self._given and not self._overridable:
            raise UserError(f"{prefix}{min(self._given)} cannot be changed in a finished run.")
        described = stored if self.file.path is None else self.file.experiment()
        if described is None:
            if self._given:
                raise UserError(f"{prefix}{min(self._given)} needs a file. Add --config=FILE.")
            return rest
        config = described.to_config_dict()
        for name, cls, options_of, replaced_by in _WITH_OPTIONS:
            if not self.file.defines(replaced_by):
                self._defaults += _complete(config[name], name, cls, options_of, rest)
            elif name == "loss":  # Methods change the file's own loss too.
                methods = _complete(config.loss, name, cls, lambda _: method_options(), rest)
                self._defaults += methods
        for name in sorted(self._given):
            section, _, setting = name.partition(".")
            if section == "hyper" and setting:  # A setting may have any name.
                if setting in config.hyper:
                    del config.hyper[setting]
                config.hyper[setting] = placeholder(str)
        if fault := self._fault(rest, _paths(config)):
            raise UserError(fault)
        self._overrides = config_flags.DEFINE_config_dict("config", config, sys_argv=rest)
        return rest

    def _without_files(self, argv: list[str]) -> tuple[list[str], Experiment | None]:
        """Returns a command line without the flags of files, and the experiment in JSON."""
        rest: list[str] = []
        stored = None
        arguments = iter(argv)
        for argument in arguments:
            argument = "-" + argument if argument.startswith("-config") else argument
            name, equals, value = argument.partition("=")
            if name == "--config":
                self.file = ConfigFile(value if equals else next(arguments, ""))
            elif self._overridable and name.lstrip("-") == _EXPERIMENT and name.startswith("-"):
                stored = stored_experiment(value if equals else next(arguments, ""))
            else:
                rest.append(argument)
        if self.file.path and stored is not None:
            raise UserError("--config and --experiment describe two runs. Leave one of them out.")
        return rest, stored

    def _fault(self, rest: list[str], known: list[str]) -> str:
        """Returns a sentence about a flag whose field is unknown or has no effect, if any is."""
        for name in sorted(self._given):
            for function, fields in _REPLACED.items():
                if self.file.defines(function) and {name, name.partition(".")[0]} & {*fields}:
                    return (
                        f"--config.{name} has no effect, because {self.file.path} defines "
                        f"{function}. Leave the flag out."
                    )
            if name not in known:
                return (
                    f"The config has no field {shortened(name)}.{nearest_field(name, known)} "
                    "--help lists all fields."
                )
        for argument in rest if self._overridable else ():
            name = argument.lstrip("-").partition("=")[0]
            is_flag = not argument.startswith("-") or name in flags.FLAGS or "config." in name
            meant = [] if is_flag else fields_named(name, known)
            if meant:
                return f"--{name} is no flag, but a field: write --config.{meant[0]}=VALUE."
        return ""

    def experiment(self) -> Experiment:
        """Returns the file's experiment with the values of the flags.

        A flag for `steps` replaces the file's `epochs` and the other way round. So do `num_members`
        and `members_per_group`.
        """
        if self._overrides is None:
            raise UserError(
                "--config is missing. Add --config=FILE, such as --config=configs/digits.py."
            )
        values = self._overrides.value.to_dict()
        for path in self._defaults:
            if path not in self._given:
                section, _, option = path.partition(".")
                del values[section][option]
        for pair in (("steps", "epochs"), ("num_members", "members_per_group")):
            for name, other in (pair, pair[::-1]):
                if name in self._given and other not in self._given:
                    values[other] = None
        return Experiment.from_dict(values)


def _complete(
    section: ConfigDict,
    name: str,
    cls: type,
    options_of: Callable[[str], Options],
    arguments: list[str],
) -> list[str]:
    """Adds the options of what the file, or a flag, names to a section of the config."""
    chosen = section.name
    for at, argument in enumerate(arguments):
        flag, equals, value = argument.lstrip("-").partition("=")
        if flag == f"config.{name}.name":
            chosen = value if equals else "".join(arguments[at + 1 : at + 2])
    options = options_of(chosen)
    if chosen != section.name:  # Other options in the file belong to another function.
        fields = {field.name for field in dataclasses.fields(cls)}
        kept = fields | method_options().keys() if name == "loss" else fields
        for option in [option for option in section if option not in kept]:
            del section[option]
    added = []
    for option, (default, kind) in options.items():
        if option not in section:
            section[option] = placeholder(kind) if default is None else default
            added.append(f"{name}.{option}")
    return added


def _paths(config: ConfigDict) -> list[str]:
    return [path for path, _ in leaves(config.to_dict())]
