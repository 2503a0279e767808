"""A run that is started from a config: its experiment, and what is known of its data."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import cast

import jax
import numpy as np

from dist_ens.checkpoint import StepRecord, listed
from dist_ens.data import OrderRule, Source, Spec
from dist_ens.ensemble import Ensemble
from dist_ens.evaluation import Evaluator
from dist_ens.experiment.named import chosen_loss
from dist_ens.experiment.reading import leaves
from dist_ens.experiment.schema import Experiment, HyperConfig
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import ExitCode, RunError, UserError
from dist_ens.ground.json_text import Json, JsonDict, fields_from_record
from dist_ens.ground.randomness import KEY_RULE
from dist_ens.metrics import Metric
from dist_ens.sampling import Order
from dist_ens.sampling.hyper import Hyper

# A resumed run may differ from its checkpoint in these fields only. They change how long or how it
# runs, and not what the step of a sound member computes.
MAY_CHANGE_ON_RESUME = (
    "steps",
    "epochs",
    "layout",
    "execution",
    "failures",
    "checkpoint",
    "evaluation.every_steps",
    "evaluation.every_epoch",
    "evaluation.global_batch_size",
    "evaluation.metrics",
    "logging",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is started from a config, with fields beside those of `StepRecord`.

    Attributes:
        experiment: Experiment with the values of all flags.
        spec: Description of the data that the members take.
        num_train_examples: Number of training examples of a group.
        member_file: Path of the config file that defines a part of the run.
        splits: Fingerprints of the examples by the name of their split.
        parts: Names of the parts that a config file or Python gave, by kind.
        record: Record that every run of `fit` has; None before the ensemble is made.
    """

    experiment: Experiment
    spec: Spec
    num_train_examples: int
    member_file: str | None = None
    splits: Mapping[str, str] | None = None
    parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    record: StepRecord | None = None

    def __post_init__(self) -> None:
        loss = chosen_loss(self.experiment.loss, self.spec)
        object.__setattr__(self, "experiment", dataclasses.replace(self.experiment, loss=loss))

    @property
    def saved_record(self) -> StepRecord:
        """Record that is saved with a checkpoint, with the fields of this class."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        record = cast(StepRecord, fields.pop("record"))
        own = {"experiment": self.experiment.to_dict(), "spec": self.spec.to_dict()}
        return dataclasses.replace(record, config={**fields, **own, "parts": dict(self.parts)})

    def to_dict(self) -> JsonDict:
        """Returns the record that is saved with a checkpoint, in types that JSON can hold."""
        return self.saved_record.to_dict()

    @classmethod
    def from_dict(cls, values: Mapping[str, Json]) -> "Run":
        """Returns the run of a record that `to_dict` wrote; a `RunError` if it is damaged."""
        record = StepRecord.from_dict(values)
        try:
            readers = {"experiment": Experiment.from_dict, "spec": Spec.from_dict}
            return cls(**fields_from_record(cls, record.config, readers), record=record)
        except UserError as error:
            raise RunError(
                f"The record of a run cannot be read: {error} Another version of dist_ens wrote "
                "it, or it is damaged: read it with that version.",
                exit_code=ExitCode.DAMAGED,
            ) from error

    def with_members(
        self, member_ids: Sequence[int], hyper: Mapping[str, tuple[float, ...]] | None = None
    ) -> "Run":
        """Returns a run with other members, and with these settings of them."""
        experiment = self.experiment
        if hyper:  # Some of these members may be new to the run.
            plain = dataclasses.replace(experiment, hyper=HyperConfig()).with_members(member_ids)
            given = {n: v for n, v in experiment.hyper.options.items() if not isinstance(v, tuple)}
            drawn = Hyper.of(given, member_ids, experiment.seed)
            # A distribution that has drawn these values has one for each further member too.
            same = [n for n, v in drawn.items() if np.array_equal(v, np.array(hyper[n], v.dtype))]
            options = {**hyper, **{name: given[name] for name in same}}
            experiment = dataclasses.replace(plain, hyper=HyperConfig(options=options))
        else:
            experiment = experiment.with_members(member_ids)
        record = self.record and self.record.with_members(member_ids, hyper)
        return dataclasses.replace(self, experiment=experiment, record=record)

    def batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and types of a batch of the source."""
        return {
            name: jax.ShapeDtypeStruct((batch_size, *leaf.shape), leaf.dtype)
            for name, leaf in self.spec.example.items()
        }

    @property
    def execution(self) -> str:
        """Execution of the members: the one that was chosen, or that of the experiment before."""
        chosen = self.record.execution if self.record else None
        return chosen or self.experiment.execution

    @property
    def has_own_parts(self) -> bool:
        """Whether a config file or Python gave a part of the run."""
        return self.member_file is not None or bool(self.parts)

    @property
    def order_rule(self) -> OrderRule:
        """Rule for which examples a member sees, the argument `order` of `fit`."""
        data = self.experiment.data
        # Examples that are not shuffled have the same order for every member of a group.
        per_member = data.examples in ("permuted", "kfold", *(("splits",) if data.shuffle else ()))
        return OrderRule(data.shuffle, per_member, data.num_folds or 0)

    @property
    def order(self) -> Order:
        """Order of the training examples."""
        batch_size = self.experiment.data.global_batch_size
        return self.order_rule.order(self.num_train_examples, batch_size, self.spec.num_groups)

    @property
    def num_steps(self) -> int:
        """Number of updates of the whole run."""
        experiment = self.experiment
        if experiment.epochs is not None:
            return self.order.num_steps(experiment.epochs)
        return experiment.steps or 0

    @property
    def num_members(self) -> int:
        """Number of members of all groups."""
        return self.experiment.total_members(self.spec.num_groups)

    def evaluator(
        self, ensemble: Ensemble, pooling: str | None = None, metrics: Sequence[Metric | str] = ()
    ) -> Evaluator:
        """Returns the evaluator of an ensemble of this run; metrics are beside the config's."""
        if ensemble.objective is None:
            raise UserError("A loss function says nothing of predictions. Give make_objective.")
        distribution = ensemble.objective.distribution
        if pooling is not None:
            distribution = distribution.with_pooling(pooling)
        asked = self.experiment.evaluation
        metrics = *asked.metrics, *metrics
        return Evaluator(ensemble, asked.global_batch_size, self.spec, distribution, metrics)

    def require_own_keys(self, folder: object) -> None:
        """Raises a `UserError` unless this version of dist_ens draws the run's random numbers."""
        if self.record is None or self.record.key_rule != KEY_RULE:
            raise UserError(f"{quoted(folder)} holds a run of another version of dist_ens. Use it.")

    def require_trained_on(self, source: Source) -> None:
        """Raises a `UserError` unless a source is the one that the run was trained on."""
        count, splits = source.num_train_examples, source.fingerprint
        here = dataclasses.replace(self, spec=source.spec, num_train_examples=count, splits=splits)
        if different := here._differences(self):
            raise UserError(
                f"The data from {self.experiment.data.source} is not what the run was trained on: "
                f"{listed(different)}. Put the data set back. If make_source of a config file "
                "made it, give that file as config."
            )

    def check_resumes(self, saved: Mapping[str, Json], folder: object) -> None:
        """Raises a `UserError` unless this experiment and its data may resume a saved run."""
        # `checkpoint.check_resumes` tells of a run that was made in Python.
        different = self._differences(Run.from_dict(saved)) if "experiment" in saved else []
        if different:
            raise UserError(
                f"{quoted(folder)} holds another run: {listed(different)}. Choose another "
                "--workdir for this one, or resume that one: only "
                f"{', '.join(MAY_CHANGE_ON_RESUME)} may change."
            )

    def _differences(self, there: "Run") -> list[tuple[str, Json, Json]]:
        """Returns in what this run differs from a saved one, with both values."""
        different: list[tuple[str, Json, Json]] = []
        different += differences_on_resume(there.experiment, self.experiment)
        if there.spec != self.spec:
            different.append(("the data", *there.spec.told_apart(self.spec)))
        before, now = there.num_train_examples, self.num_train_examples
        if before != now:
            different.append(("the number of training examples", before, now))
        different += [
            (f"{kind} of the parts", there.parts.get(kind), self.parts.get(kind))
            for kind in sorted({*there.parts, *self.parts})
            if there.parts.get(kind) != self.parts.get(kind)
        ]
        return different or [
            (f"the hash of the {name} examples", there.splits[name][:12], here[:12])
            for name, here in (self.splits or {}).items()
            if there.splits and there.splits.get(name, here) != here
        ]


def differences_on_resume(saved: Experiment, asked: Experiment) -> list[tuple[str, Json, Json]]:
    """Returns the differences that forbid an experiment to resume from another's checkpoint."""
    old, new = dict(leaves(saved.to_dict())), dict(leaves(asked.to_dict()))
    return [
        (path, old.get(path), new.get(path))
        for path in sorted(old.keys() | new.keys())
        if old.get(path) != new.get(path)
        and not any(path == may or path.startswith(may + ".") for may in MAY_CHANGE_ON_RESUME)
    ]
