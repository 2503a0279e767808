"""A run that is started from a config: its experiment, and what is known of its data."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

import jax

from dist_ens.checkpoint import StepRecord
from dist_ens.data import OrderRule, Spec, kfold, shared
from dist_ens.ensemble import Ensemble
from dist_ens.experiment.experiment import MAY_CHANGE_ON_RESUME, Experiment, differences_on_resume
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import ExitCode, RunError, UserError
from dist_ens.ground.json_text import Json, JsonDict
from dist_ens.ground.records import fields_from_record
from dist_ens.sampling import Order


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

    @property
    def config(self) -> JsonDict:
        """Fields of this class in types that JSON can hold."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del fields["record"]
        own = {"experiment": self.experiment.to_dict(), "spec": self.spec.to_dict()}
        return {**fields, **own, "parts": dict(self.parts)}

    @property
    def saved_record(self) -> StepRecord:
        """Record that is saved with a checkpoint, with the fields of this class."""
        if self.record is None:
            raise RuntimeError("A run has a record only after its ensemble was made.")
        return dataclasses.replace(self.record, config=self.config)

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

    def trained_with(self, ensemble: Ensemble) -> "Run":
        """Returns the run with the execution and the mesh of an ensemble."""
        steps, size = self.experiment.steps_per_call, ensemble.layout.mesh.size
        record = self.record and self.record.chosen(ensemble.execution, size, steps)
        return dataclasses.replace(self, record=record)

    def with_members(self, member_ids: Sequence[int]) -> "Run":
        """Returns a run with other members."""
        return dataclasses.replace(
            self,
            experiment=self.experiment.with_members(member_ids),
            record=self.record and self.record.with_members(member_ids),
        )

    def with_dropout_samples(self, samples: int | None) -> "Run":
        """Returns a run that predicts with another number of samples with dropout."""
        evaluation = dataclasses.replace(self.experiment.evaluation, dropout_samples=samples)
        experiment = dataclasses.replace(self.experiment, evaluation=evaluation)
        return dataclasses.replace(self, experiment=experiment)

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
        if data.examples == "kfold":
            return kfold(data.num_folds or 0)
        if data.examples in ("permuted", "splits") or self.spec.num_groups > 1:
            return OrderRule(shuffle=data.shuffle, per_member=True)
        return shared(shuffle=data.shuffle)

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
    def per_member(self) -> bool:
        """Whether each member has different batches from the others."""
        return self.order_rule.per_member

    @property
    def num_members(self) -> int:
        """Number of members of all groups."""
        return self.experiment.total_members(self.spec.num_groups)

    def check_resumes(self, saved: Mapping[str, Json], folder: str | os.PathLike[str]) -> None:
        """Raises a `UserError` unless this experiment and its data may resume a saved run."""
        # `checkpoint.check_resumes` tells of a run that was made in Python.
        different = self._differences(Run.from_dict(saved)) if "experiment" in saved else []
        if different:
            listed = "; ".join(f"{name} is {a!r} there and {b!r} here" for name, a, b in different)
            raise UserError(
                f"{quoted(folder)} holds another run: {listed}. Choose another --workdir for this "
                f"one, or resume that one: only {', '.join(MAY_CHANGE_ON_RESUME)} may change."
            )

    def _differences(self, there: "Run") -> list[tuple[str, object, object]]:
        """Returns in what this run differs from a saved one, with both values."""
        different: list[tuple[str, object, object]] = []
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
