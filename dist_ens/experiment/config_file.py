"""Files that describe a run: a config file in Python, and an experiment in JSON."""

import difflib
import pathlib
import runpy
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from ml_collections import ConfigDict

from dist_ens.data import Source, Spec, check_source
from dist_ens.errors import UserError, kind_of
from dist_ens.experiment.experiment import Experiment
from dist_ens.experiment.own_parts import OwnParts
from dist_ens.experiment.part_checks import FUNCTIONS, check_part
from dist_ens.experiment.schema import DataConfig
from dist_ens.experiment.sources import open_source
from dist_ens.file_reading import bytes_in
from dist_ens.json_text import from_json
from dist_ens.losses import Objective
from dist_ens.members import Member, as_member
from dist_ens.methods import LossFunction
from dist_ens.metrics import Metric
from dist_ens.paths import given_path, shortened
from dist_ens.types import Callback, Optimizer, PyTree

EXPERIMENT = "experiment.json"
_Result = TypeVar("_Result")


class ConfigFile:
    """A Python file with `get_config()`, and a function for each part that it makes itself.

    A part that the file makes itself replaces the one that the config names:

        make_member(spec)          the network, anything that `as_member` takes; not `model.name`
        make_objective(spec)       the loss with its predictive distribution; not `loss.name`
        make_loss(spec)            a loss function instead of an objective; not `loss.name`
        make_step(spec)            functions of a step of your own; not the network, the loss and
                                   the optimizer
        make_optimizer(spec)       an optimizer with `init` and `update`; not `optimizer.name`
        make_source(data_config)   the data set; not `data.source`
        make_metrics(spec)         metrics beside those of the objective
        make_callbacks(spec)       callbacks beside those of the command line

    `spec` is the `dist_ens.data.Spec` of the data set, `data_config` the experiment's `DataConfig`.
    `source` and `open_source` call `make_source`, and the other methods call the function of their
    name. Each raises a `UserError` if the function raises an exception, or returns something else.

    Args:
        path: Path of the file, which is run.

    Attributes:
        path: Path of the file, with `~` expanded.

    Raises:
        UserError: If the file is missing or raises an error, misspells one of these functions, or
            makes two parts of which one replaces the other.
    """

    def __init__(self, path: str) -> None:
        file = given_path(path, "--config")
        self.path = str(file)
        if not file.is_file():
            raise UserError(
                f"--config={shortened(path)} is not a file, seen from {pathlib.Path.cwd()}. "
                "Correct the path of the config."
            )
        sys.path.insert(0, str(file.parent))  # `python FILE` does the same.
        self._names = self._run(lambda: runpy.run_path(self.path))
        for name in self._names:
            # Nine tenths tell a slip of the finger from a helper such as make_blocks.
            near = difflib.get_close_matches(name, FUNCTIONS, n=1, cutoff=0.9)
            if near and name not in FUNCTIONS:
                raise UserError(
                    f"{self.path} defines {name}, which is none of the functions of a config file. "
                    f"Did you mean {near[0]!r}? Correct the name, or choose another one."
                )
        if self.defines("make_objective") and self.defines("make_loss"):
            raise UserError(
                f"{self.path} defines make_objective and make_loss, and a run has one loss. Remove "
                "one of the two functions."
            )
        for other in ("make_member", "make_loss", "make_optimizer"):
            if self.defines("make_step") and self.defines(other):
                raise UserError(
                    f"{self.path} defines make_step and {other}, and a step takes the place of the "
                    "network, the loss and the optimizer. Remove one of the two functions."
                )

    def defines(self, function: str) -> bool:
        """Returns whether the file defines a function.

        Args:
            function: Name of the function, such as `make_member`.
        """
        return function in self._names

    def experiment(self) -> Experiment:
        """Returns the experiment that `get_config()` describes.

        Raises:
            UserError: If there is no such function, or it returns something other than a config.
        """
        if not self.defines("get_config"):
            raise UserError(
                f"{self.path} has no function get_config(). Add one that returns a ConfigDict."
            )
        config = self._call("get_config")
        if not isinstance(config, ConfigDict):
            raise UserError(
                f"get_config() in {self.path} returned {kind_of(config)}, not an "
                "ml_collections.ConfigDict. Wrap it: ConfigDict(dict(…))."
            )
        return Experiment.from_dict(config.to_dict())

    def make_member(self, spec: Spec) -> Member | None:
        """Returns the file's own network; None if it has none. It replaces `model.name`."""
        if not self.defines("make_member"):
            return None
        network = self._call("make_member", spec)
        try:
            return self._run(lambda: as_member(network))
        except UserError as error:
            raise UserError(
                f"make_member(spec) in {self.path} returned {kind_of(network)}, of which "
                f"no member can be made. {error}"
            ) from error

    def make_objective(self, spec: Spec) -> Objective | None:
        """Returns the file's own objective; None if it has none."""
        return self._part("make_objective", spec)

    def make_loss(self, spec: Spec) -> LossFunction | None:
        """Returns the file's own loss function; None if it has none."""
        return self._part("make_loss", spec)

    def make_step(self, spec: Spec) -> dict[str, Callable[..., PyTree]] | None:
        """Returns the functions of the file's own step; None if it has none."""
        return self._part("make_step", spec)

    def make_optimizer(self, spec: Spec) -> Optimizer | None:
        """Returns the file's own optimizer; None if it has none. It replaces `optimizer.name`."""
        return self._part("make_optimizer", spec)

    def make_metrics(self, spec: Spec) -> tuple[Metric, ...]:
        """Returns the file's own metrics; empty if it has none."""
        return tuple(self._part("make_metrics", spec) or ())

    def make_callbacks(self, spec: Spec) -> tuple[Callback, ...]:
        """Returns the file's own callbacks; empty if it has none."""
        return tuple(self._part("make_callbacks", spec) or ())

    def source(self, data_config: DataConfig) -> Source | None:
        """Returns the file's own data set; None if it has none.

        Raises:
            UserError: If `make_source` raises an error, or its data set does not fit its spec.
        """
        source = self._part("make_source", data_config)
        if source is not None:
            any_parts = self.defines("make_loss") or self.defines("make_step")
            check_source(source, any_parts=any_parts)
        return source

    def open_source(self, data_config: DataConfig) -> Source:
        """Returns the file's own data set; the one that `data.source` names if it has none."""
        source = self.source(data_config)
        return open_source(data_config) if source is None else source

    def own_parts(self, spec: Spec) -> OwnParts:
        """Returns all parts that the file makes itself, except the data set.

        Args:
            spec: Description of the data set.

        Raises:
            UserError: If a function of the file raises an error, or returns something else.
        """
        return OwnParts(
            member=self.make_member(spec),
            objective=self.make_objective(spec),
            loss=self.make_loss(spec),
            step=self.make_step(spec),
            optimizer=self.make_optimizer(spec),
            metrics=self.make_metrics(spec),
            callbacks=self.make_callbacks(spec),
        )

    def _part(self, function: str, argument: Spec | DataConfig) -> Any:
        """Calls a function of the file and checks what it returns; None without the function."""
        if not self.defines(function):
            return None
        part = self._call(function, argument)
        check_part(function, part, self.path)
        return part

    def _call(self, function: str, *arguments: Spec | DataConfig) -> Any:
        """Calls a function of the file by its name."""
        defined = self._names[function]
        code = getattr(defined, "__code__", None)
        return self._run(lambda: defined(*arguments), code.co_firstlineno if code else "?")

    def _run(self, call: Callable[[], _Result], otherwise: int | str = "?") -> _Result:
        """Runs code of the file. An exception becomes a message with the line number.

        Args:
            call: Code to run.
            otherwise: Line number to report if no line of the file raised the exception.

        Raises:
            UserError: If the code raises an exception.
        """
        try:
            return call()
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # The file may raise anything.
            line = getattr(error, "lineno", None)
            frames = [
                f for f in traceback.extract_tb(error.__traceback__) if f.filename == self.path
            ]
            line = line or (frames[-1].lineno if frames else otherwise)
            raise UserError(
                f"{self.path} raised {type(error).__name__}: {error} (line {line}). Correct the "
                "config file."
            ) from error


class ExperimentFile:
    """An experiment in JSON, such as the one that a run leaves in its folder.

    No code of the file is run, so a file of somebody else can be used without reading it first. All
    parts of the run are those that the experiment names.

    Args:
        path: Path of the file.

    Attributes:
        path: Path of the file, with `~` expanded.

    Raises:
        UserError: If the file cannot be read, or holds no JSON object.
    """

    def __init__(self, path: str) -> None:
        file = given_path(path, "--experiment")
        self.path = str(file)
        try:
            self._values = from_json(bytes_in(file))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise UserError(
                f"--experiment={shortened(path)} cannot be read: {why}. Give a file such as the "
                f"{EXPERIMENT} in the folder of a run."
            ) from error
        if not isinstance(self._values, dict):
            raise UserError(
                f"--experiment={shortened(path)} holds {kind_of(self._values)}, not a JSON object. "
                f"Give a file such as the {EXPERIMENT} in the folder of a run."
            )

    def experiment(self) -> Experiment:
        """Returns the experiment.

        Raises:
            UserError: If a field is unknown, or has a value that it cannot have.
        """
        return Experiment.from_dict(self._values)
