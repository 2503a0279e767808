"""The record of a run that was started from a config, which is saved with each checkpoint."""

import dataclasses
import os
from collections.abc import Mapping, Sequence

import jax

from dist_ens.checkpoint import differing_versions
from dist_ens.commands import quoted
from dist_ens.data import Spec
from dist_ens.errors import RunError, UserError
from dist_ens.execution.spec import Execution
from dist_ens.exit_codes import ExitCode
from dist_ens.experiment.experiment import MAY_CHANGE_ON_RESUME, Experiment, differences_on_resume
from dist_ens.ground.numbers import whole_number
from dist_ens.ground.records import fields_from_record
from dist_ens.json_text import Json, JsonDict
from dist_ens.sampling import Order


@dataclasses.dataclass(frozen=True)
class Run:
    """The record of a run that was started from a config.

    Attributes:
        experiment: Experiment with the values of all flags.
        spec: Description of the data that the members take.
        num_train_examples: Number of training examples. Their order depends on it.
        member_file: Path of the config file that defines a part of the run; None without one.
        execution: Execution that was chosen; None before the choice.
        num_devices: Number of devices of the training mesh; None before the choice.
        network: Name of the network that a config file or Python gave; None if `model.name` names
            the network.
        step: Fingerprint of the training step; None if all parts come from the experiment.
        versions: Versions of the packages that traced the step, by name; None if all parts come
            from the experiment.
        examples: Fingerprints of the examples by the name of their split; None if not known.
        parts: Names of the other parts that were given, such as the loss, by kind; None if there
            are none.
        key_rule: Version of the rules in `dist_ens.randomness`; None if an older version wrote the
            record.

    Raises:
        UserError: If a number is out of its range, or the execution is unknown.
    """

    experiment: Experiment
    spec: Spec
    num_train_examples: int
    member_file: str | None = None
    execution: str | None = None
    num_devices: int | None = None
    network: str | None = None
    step: str | None = None
    versions: Mapping[str, str] | None = None
    examples: Mapping[str, str] | None = None
    parts: Mapping[str, str] | None = None
    key_rule: int | None = None

    def __post_init__(self) -> None:
        whole_number("num_train_examples", self.num_train_examples, least=0)
        if self.execution is not None:
            Execution.parse(self.execution)
        if self.num_devices is not None:
            whole_number("num_devices", self.num_devices, least=1)

    def to_dict(self) -> JsonDict:
        """Returns plain data that JSON can hold."""
        return {
            "experiment": self.experiment.to_dict(),
            "spec": self.spec.to_dict(),
            "num_train_examples": self.num_train_examples,
            "member_file": self.member_file,
            "execution": self.execution,
            "num_devices": self.num_devices,
            "network": self.network,
            "step": self.step,
            "versions": self.versions and dict(self.versions),
            "examples": self.examples and dict(self.examples),
            "parts": self.parts and dict(self.parts),
            "key_rule": self.key_rule,
        }

    @classmethod
    def from_dict(cls, values: JsonDict) -> "Run":
        """Returns the record that `to_dict` wrote, also after a round trip through JSON.

        Args:
            values: Fields by name. The type and the range of each is checked. A field that an older
                version did not write has its default.

        Raises:
            RunError: If a field is absent, unknown, or has a value that it cannot have.
        """
        try:
            readers = {"experiment": Experiment.from_dict, "spec": Spec.from_dict}
            return cls(**fields_from_record(cls, values, readers))
        except UserError as error:
            raise RunError(
                f"The record of a run cannot be read: {error} It is damaged, or another version of "
                "dist_ens wrote it: read it with that version, or train anew in another folder.",
                exit_code=ExitCode.DAMAGED,
            ) from error

    def with_members(self, member_ids: Sequence[int]) -> "Run":
        """Returns the record of a run with other members.

        Args:
            member_ids: Ids of the members.
        """
        return dataclasses.replace(self, experiment=self.experiment.with_members(member_ids))

    def chosen(self, execution: str | None, num_devices: int, steps_per_call: int) -> "Run":
        """Returns the run with what was chosen when it began.

        Args:
            execution: Execution that was chosen; None if no step was left to train.
            num_devices: Number of devices of the mesh.
            steps_per_call: Number of steps in one call of the update. It is not stored here,
                because the experiment has it.
        """
        return dataclasses.replace(self, execution=execution, num_devices=num_devices)

    def batch(self, batch_size: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes and types of a batch of the source.

        Args:
            batch_size: Number of examples in the batch.
        """
        spec = self.spec
        return {
            "inputs": jax.ShapeDtypeStruct((batch_size, *spec.input_shape), spec.input_dtype),
            "labels": jax.ShapeDtypeStruct((batch_size, *spec.label_shape), spec.label_dtype),
        }

    @property
    def has_own_parts(self) -> bool:
        """Whether a config file or Python gave a part of the run."""
        return self.network is not None or self.member_file is not None or bool(self.parts)

    @property
    def names_of_own_parts(self) -> str:
        """Names of the parts that a config file or Python gave, as a text."""
        return ", ".join([*([self.network] if self.network else []), *(self.parts or {}).values()])

    @property
    def order(self) -> Order:
        """Order of the training examples.

        Raises:
            UserError: If `data.examples` is `bootstrap` and there is only one training example.
        """
        data = self.experiment.data
        if data.examples == "bootstrap" and self.num_train_examples == 1:
            raise UserError(
                "data.examples='bootstrap' needs several training examples, and there is one. Add "
                "data, or set --config.data.examples=shared."
            )
        return Order(
            self.num_train_examples,
            data.global_batch_size,
            shuffle=data.shuffle,
            per_member=self.per_member,
            num_groups=self.spec.num_groups,
            num_folds=data.num_folds or 0,
        )

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
        examples = self.experiment.data.examples
        return examples not in ("shared", "bootstrap") or self.spec.num_groups > 1

    @property
    def num_members(self) -> int:
        """Number of members of all groups."""
        return self.experiment.total_members(self.spec.num_groups)

    def _other_examples(self, saved: "Run") -> list[tuple[str, str, str]]:
        """Returns the splits whose examples differ from those of another run.

        Returns:
            `(what, fingerprint in saved, fingerprint in this)` for each split that differs.
        """
        if saved.examples is None or self.examples is None:
            return []
        return [
            (f"the {name} examples' fingerprint", _digits(saved.examples[name]), _digits(here))
            for name, here in self.examples.items()
            if saved.examples.get(name, here) != here
        ]

    def _other_network(self, saved: "Run") -> list[tuple[str, Json, Json]]:
        """Returns the difference between the parts of another run and of this one.

        Returns:
            `(what, part in saved, part in this)` for the first difference; empty if all are equal.
            The training steps are compared only if the same versions traced both.
        """
        if saved.examples is None:  # An older version did not record the network.
            there, here = saved.member_file, self.member_file
            other = (there is None) != (here is None)
            return [("the network's file", there, here)] if other else []
        by_name = f"{self.experiment.model.name} (model.name)"
        there, here = (run.network or by_name for run in (saved, self))
        if (saved.network is None) != (self.network is None):
            return [("the network", there, here)]
        parts_there, parts_here = saved.parts or {}, self.parts or {}
        for kind in sorted(parts_there.keys() | parts_here.keys()):
            if parts_there.get(kind) != parts_here.get(kind):
                return [(f"the {kind}", parts_there.get(kind), parts_here.get(kind))]
        if saved.step is None or self.step is None:
            return []
        if saved.versions != self.versions:  # `other_versions` reports it.
            return []
        if saved.step == self.step:
            return []
        return [
            (
                "the training step of the network",
                f"{there}, {_digits(saved.step)}",
                f"{here}, {_digits(self.step)}",
            )
        ]

    def other_versions(self, saved: "Run") -> str | None:
        """Returns a sentence about versions that differ; None if the training steps are comparable.

        Args:
            saved: Run in the newest checkpoint.
        """
        if saved.versions is None or self.versions is None or saved.versions == self.versions:
            return None
        listed = differing_versions(saved.versions, self.versions)
        return (
            f"The run was begun with {listed}, so that its training step cannot be compared with "
            f"the one here. Its network was {saved.network}, and here it is {self.network}. The "
            "run resumes as if both were the same."
        )

    def check_resumes(self, saved: "Run", folder: str | os.PathLike[str]) -> None:
        """Checks that this run may resume another.

        Args:
            saved: Run in the folder's newest checkpoint.
            folder: Folder of the run.

        Raises:
            UserError: If the two runs differ in a field, a part or the data that decides what a
                step computes. The message names both values.
        """
        different = differences_on_resume(saved.experiment, self.experiment)
        for name in ("spec", "num_train_examples"):
            a, b = getattr(saved, name), getattr(self, name)
            if a != b:
                told = a.told_apart(b) if name == "spec" else (str(a), str(b))
                different.append((f"the data's {name}", *told))
        if not different:
            different += self._other_examples(saved) + self._other_network(saved)
        if different:
            listed = "; ".join(f"{name} is {a!r} there and {b!r} here" for name, a, b in different)
            raise UserError(
                f"{quoted(folder)} holds another run: {listed}. Choose another --workdir for this "
                f"one, or resume that one: only {', '.join(MAY_CHANGE_ON_RESUME)} may change."
            )


def _digits(fingerprint: str) -> str:
    """Returns the first digits of a fingerprint, for messages."""
    return fingerprint[:12]
