"""Files that describe a run: a config file in Python, and an experiment in JSON."""

import dataclasses
import difflib
import pathlib
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ml_collections import ConfigDict

from dist_ens.checkpoint.run_digests import write_run_file
from dist_ens.data import Source, Spec, check_source
from dist_ens.experiment.named import open_source
from dist_ens.experiment.schema import DataConfig, Experiment
from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.json_text import from_json
from dist_ens.ground.paths import given_path, shortened
from dist_ens.ground.types import Callback, Optimizer, PyTree
from dist_ens.losses import Objective
from dist_ens.members import Member, as_member
from dist_ens.methods import LossFunction, Method
from dist_ens.metrics import Metric
from dist_ens.report.files import to_json
from dist_ens.storage import Place, file_at

EXPERIMENT = "experiment.json"
_PREFIX, _SOURCE = "make_", "make_source"
_Result = TypeVar("_Result")


@dataclasses.dataclass(frozen=True)
class OwnParts:
    """The parts that a config file makes itself; see `ConfigFile`.

    `step` has functions by their names in `Ensemble.from_step`: `init`, `step`, and `apply` or
    `eval_loss`. The innermost of `methods` is the first.
    """

    member: Member | None = None
    objective: Objective | None = None
    loss: LossFunction | None = None
    step: Mapping[str, Any] | None = None
    optimizer: Optimizer | None = None
    methods: Sequence[Method] = ()
    metrics: Sequence[Metric] = ()
    callbacks: Sequence[Callback] = ()
    shared: PyTree = ()

    @property
    def has_objective(self) -> bool:
        """Whether an objective scores the run, and not a function."""
        return self.loss is None and "eval_loss" not in (self.step or {})

    @property
    def names(self) -> dict[str, str]:
        """Names of the parts that decide what a training step computes, by kind.

        They belong to the record of a run. Metrics and callbacks may change when it resumes.
        """
        given: dict[str, object] = {
            "network": self.member,
            "objective": self.objective,
            "loss": self.loss,
            "optimizer": self.optimizer,
            "step": self.step and self.step["step"],
            **{f"method {number}": method for number, method in enumerate(self.methods, 1)},
        }
        return {kind: _name_of(part) for kind, part in given.items() if part is not None}


NOTHING = OwnParts()
FUNCTIONS = (*(_PREFIX + field.name for field in dataclasses.fields(OwnParts)), _SOURCE)


def _name_of(part: object) -> str:
    """Returns the `name` of a part, that of a function or class, or that of its class."""
    named = getattr(part, "name", None) or getattr(part, "__qualname__", None)
    return named if isinstance(named, str) else type(part).__qualname__


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
        make_methods(spec)         methods beside those that the config names
        make_metrics(spec)         metrics beside those of the objective
        make_callbacks(spec)       callbacks beside those of the command line
        make_shared(spec)          arrays that all members share; see `Ensemble`

    `spec` is the `dist_ens.data.Spec` of the data set, `data_config` the experiment's `DataConfig`.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path: str | None = None
        self._names: Mapping[str, Any] = {}
        if path is None:
            return
        file = given_path(path, "--config")
        self.path = str(file)
        if not file.is_file():
            raise UserError(f"--config={shortened(path)} is not a file (in {pathlib.Path.cwd()}).")
        sys.path.insert(0, str(file.parent))  # `python FILE` does the same.
        self._names = self._run(lambda: runpy.run_path(str(file)))
        for name in self._names:
            # Nine tenths tell a slip of the finger from a helper such as make_blocks.
            near = difflib.get_close_matches(name, FUNCTIONS, n=1, cutoff=0.9)
            if near and name not in FUNCTIONS:
                raise UserError(f"{self.path} defines {name}. Did you mean {near[0]!r}?")
        for one, other in (
            ("make_objective", "make_loss"),
            ("make_step", "make_member"),
            ("make_step", "make_loss"),
            ("make_step", "make_optimizer"),
        ):
            if self.defines(one) and self.defines(other):
                raise UserError(f"{self.path} defines {one} and {other}. Remove one of them.")

    def defines(self, function: str) -> bool:
        """Returns whether the file defines a function."""
        return function in self._names

    def experiment(self) -> Experiment:
        """Returns the experiment that `get_config()` describes."""
        if not self.defines("get_config"):
            raise UserError(f"{self.path} has no get_config(). Add one that returns a ConfigDict.")
        config = self._call("get_config")
        has_fields = isinstance(config, ConfigDict | dict)
        return Experiment.from_dict(ConfigDict(config).to_dict() if has_fields else config)

    def own_parts(self, spec: Spec) -> OwnParts:
        """Returns all parts that the file makes itself, except the data set."""
        functions = [name for name in FUNCTIONS if self.defines(name) and name != _SOURCE]
        made = {name.removeprefix(_PREFIX): self._call(name, spec) for name in functions}
        if "member" in made:
            made["member"] = self._run(lambda: as_member(made["member"]))
        if "objective" in made and not hasattr(made["objective"], "distribution"):
            raise UserError(
                f"make_objective in {self.path} returned {kind_of(made['objective'])}, not a "
                "dist_ens.losses.Objective."
            )
        return OwnParts(**made)

    def source(self, data_config: DataConfig) -> Source | None:
        """Returns the file's own data set; None if it has none."""
        if not self.defines(_SOURCE):
            return None
        source = self._call(_SOURCE, data_config)
        check_source(source, any_parts=self.defines("make_loss") or self.defines("make_step"))
        has_own = source.valid is not None
        return source if has_own else source.with_validation(data_config.validation)

    def open_source(self, data_config: DataConfig) -> Source:
        """Returns the file's own data set; the one that `data.source` names if it has none."""
        source = self.source(data_config)
        return open_source(data_config) if source is None else source

    def _call(self, function: str, *arguments: Spec | DataConfig) -> Any:
        """Returns the result of a function of the file; raises a `UserError` if it is None."""
        defined = self._names[function]
        code = getattr(defined, "__code__", None)
        made = self._run(lambda: defined(*arguments), code.co_firstlineno if code else "?")
        if made is None:
            raise UserError(f"{function} in {self.path} returned None. Return what it makes.")
        return made

    def _run(self, call: Callable[[], _Result], otherwise: int | str = "?") -> _Result:
        """Runs code of the file; an exception becomes a message with its line, or `otherwise`."""
        try:
            return call()
        except UserError:
            raise
        except (Exception, SystemExit) as error:  # The file may raise anything.
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame.lineno for frame in frames if frame.filename == self.path]
            line = getattr(error, "lineno", None) or (own[-1] if own else otherwise)
            raise UserError(
                f"{self.path} raised {type(error).__name__}: {error} (line {line})."
            ) from error


NO_FILE = ConfigFile()


def stored_experiment(path: str) -> Experiment:
    """Returns an experiment in JSON, such as a run leaves in its folder. No code is run."""
    try:
        place, name = file_at(path, "--experiment")
        values = from_json(place.read(name))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UserError(f"--experiment={shortened(path)} cannot be read: {why}.") from error
    return Experiment.from_dict(values)


def store_experiment(workdir: Place, experiment: Experiment) -> None:
    """Writes an experiment into the folder of its run, for `--experiment=FILE`."""
    write_run_file(workdir, EXPERIMENT, to_json(experiment.to_dict(), indent=2) + "\n")
