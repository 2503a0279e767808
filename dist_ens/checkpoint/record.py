"""The record of a run, and the check that it may resume a saved run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Self

from dist_ens.ground.commands import command_line, quoted
from dist_ens.ground.errors import ExitCode, RunError, UserError
from dist_ens.ground.json_text import Json, JsonDict, fields_from_record

STRICT = "strict"
RESUMES = ("same", "anyway", STRICT)
# Key that only the record of a run from a config has.
_OF_CONFIG = "experiment"
_OF_LOOP = "own_loop"
# Record of the members of a user's own loop, which describes nothing.
LOOP_RECORD: Mapping[str, Json] = {_OF_LOOP: True}
_NAMED_PARTS = {
    "member": "the member",
    "optimizer": "the optimizer",
    "loss": "the loss",
    "methods": "the methods",
    "num_members": "num_members",
    "member_ids": "member_ids",
    "seed": "the seed",
    "hyper": "hyper",
    "shared": "the digest of the shared arrays",
    "batch": "the batch",
}
_DATA = {
    "num_examples": "the number of training examples",
    "num_groups": "num_groups of the data",
    "validation": "validation",
    "class_names": "the names of the classes",
}
_EXAMPLES = "the hash of the training examples"
_OF_DATA = {*_DATA.values(), _EXAMPLES}
_STEP = "the hash of the training step"
_DIGITS = 12  # Number of digits of a hash that a message shows.


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """The record of a run: its ensemble, its training data, and how it was trained.

    Two runs are the same if their first eight fields, `hyper` and `shared` are equal, and the facts
    of their training data that both know. If the same versions traced both steps, their
    fingerprints must be equal too. The execution, the number of devices and the steps per call are
    not compared. They say how the run was trained, so that it resumes in the same way. The record
    of a run from a config has the config beside these fields, in plain data, among them the key
    `experiment`.

    Attributes:
        member: Name of the network, or of the user's own step, which has no optimizer and no loss.
        batch: Shapes and types of the global batch, as a string.
        fingerprint: Hash of the traced step of one member on the global batch; None if the step
            could not be traced.
        num_examples: Number of training examples; None for an iterable of batches. The other facts
            of the data are not known then either.
        validation: Share of the examples that `fit` held out; None if it held out none.
        examples: Hash of the training examples; None if they change each time they are read.
        leaves: Hash of the names, types and shapes of the state's leaves; None if not known.
        key_rule: Version of the rules in `dist_ens.ground.randomness`.
        hyper: Values of the settings that differ from member to member, by the ids of the members;
            None without any.
        shared: SHA-256 of the arrays that all members share; None without any.
        shared_path: File that they were read from; None if the run holds them.
        table_spec: Description of the table of a run that was made in Python, as `Spec.to_dict`
            returns it; None for other runs.
        config: Config of the run and what belongs to it, by key; empty for a run made in Python.
    """

    member: str
    optimizer: str
    loss: str
    methods: tuple[str, ...]
    num_members: int
    member_ids: tuple[int, ...]
    seed: int
    batch: str
    fingerprint: str | None
    versions: Mapping[str, str]
    execution: str | None = None
    num_devices: int | None = None
    steps_per_call: int | None = None
    num_examples: int | None = None
    num_groups: int | None = None
    validation: float | None = None
    examples: str | None = None
    leaves: str | None = None
    class_names: tuple[str, ...] | None = None
    key_rule: int | None = None
    hyper: Mapping[str, Mapping[str, float]] | None = None
    shared: str | None = None
    shared_path: str | None = None
    table_spec: Mapping[str, Json] | None = None
    config: Mapping[str, Json] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> JsonDict:
        """Returns the fields by name, in types that JSON can hold."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {
            **fields.pop("config"),
            **fields,
            "methods": list(self.methods),
            "member_ids": list(self.member_ids),
            "class_names": self.class_names and list(self.class_names),
            "versions": dict(self.versions),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Json]) -> Self:
        """Returns the record that `to_dict` wrote, also after a round trip through JSON."""
        if _OF_LOOP in values:
            raise UserError(
                "These members were saved by a loop of your own, and not by fit. Read them with "
                "Checkpoints(folder).restore(layout, like)."
            )
        names = {field.name for field in dataclasses.fields(cls)}
        beside = {n: v for n, v in values.items() if n not in names and _OF_CONFIG in values}
        try:
            own = {name: value for name, value in values.items() if name not in beside}
            return cls(**fields_from_record(cls, own), config=beside)
        except UserError as error:
            raise RunError(
                f"The record of a run cannot be read: {error} It is damaged, or another version of "
                "dist_ens wrote it. Read it with that version, or choose another folder.",
                exit_code=ExitCode.DAMAGED,
            ) from error

    def chosen(self, execution: str | None, num_devices: int, steps_per_call: int) -> Self:
        """Returns the record with what was chosen when the run began."""
        return dataclasses.replace(
            self, execution=execution, num_devices=num_devices, steps_per_call=steps_per_call
        )

    def with_members(
        self, member_ids: Sequence[int], hyper: Mapping[str, Sequence[float]] | None = None
    ) -> Self:
        """Returns the record of a run with other members, and with these settings of them."""
        ids, keys = tuple(member_ids), list(map(str, member_ids))
        if hyper:
            of = {n: dict(zip(keys, values, strict=True)) for n, values in hyper.items()}
        else:
            of = {n: {k: v[k] for k in keys if k in v} for n, v in (self.hyper or {}).items()}
        return dataclasses.replace(
            self, num_members=len(ids), member_ids=ids, leaves=None, hyper=of or None
        )

    def differences(self, saved: "StepRecord") -> list[tuple[str, Json, Json]]:
        """Returns `(what, value in saved, value here)` for each difference from a saved run.

        Fingerprints are compared only if all else is equal and the same versions made both.
        """
        different = [
            (what, getattr(saved, name), getattr(self, name))
            for name, what in _NAMED_PARTS.items()
            if getattr(saved, name) != getattr(self, name)
        ]
        different += self._other_data(saved)
        if different or saved.fingerprint is None or self.fingerprint is None:
            return different
        if saved.versions == self.versions and saved.fingerprint != self.fingerprint:
            different.append((_STEP, saved.fingerprint[:_DIGITS], self.fingerprint[:_DIGITS]))
        return different

    def _other_data(self, saved: "StepRecord") -> list[tuple[str, object, object]]:
        """Returns the differences in the facts of the training data; see `differences`."""
        if saved.num_examples is None or self.num_examples is None:
            return []
        different = [
            (what, getattr(saved, name), getattr(self, name))
            for name, what in _DATA.items()
            if getattr(saved, name) != getattr(self, name)
        ]
        if different or saved.examples is None or self.examples is None:
            return different
        if saved.examples == self.examples:
            return []
        return [(_EXAMPLES, saved.examples[:_DIGITS], self.examples[:_DIGITS])]


def notes_on_resuming(
    record: Mapping[str, Json],
    saved_record: Mapping[str, Json],
    folder: object,
    resume: str = "same",
) -> list[str]:
    """Returns notes on differences between a run and a saved one that it may resume.

    It raises a `UserError` if the folder holds another run. "anyway" accepts one of other parts.
    """
    if (_OF_LOOP in record) != (_OF_LOOP in saved_record):
        kind = "members of a loop of your own" if _OF_LOOP in saved_record else "a run of fit"
        raise UserError(f"{quoted(folder)} holds {kind}. Choose another folder.")
    if _OF_LOOP in record:
        return []
    if _OF_CONFIG in record:
        require_config_record(saved_record, folder)
    elif _OF_CONFIG in saved_record:
        command = command_line("dist-ens", "train", workdir=folder)
        raise UserError(
            f"{quoted(folder)} holds a run that was started from a config. Resume it with "
            f"`{command}` and its --config, or choose another folder for this run."
        )
    if record.get("key_rule") != saved_record.get("key_rule") and resume != "anyway":
        raise UserError(
            f"{quoted(folder)} holds a run of another version of dist_ens, whose members draw "
            "other random numbers. Resume it with that version, or choose another folder."
        )
    here, there = StepRecord.from_dict(record), StepRecord.from_dict(saved_record)
    different = here.differences(there)
    if different and resume != "anyway":
        what = f"{quoted(folder)} holds another run"
        parts, _, _ = zip(*different, strict=True)
        if _OF_DATA.issuperset(parts):
            what = f"The training data differs from that of the run in {quoted(folder)}"
        raise UserError(f"{what}: {listed(different)}. {_way_out(here, there)}")
    notes = []
    if versions := differing_versions(there.versions, here.versions):
        notes.append(
            f"The saved run was made with {versions}. Its training step was not compared with the "
            "one here, because another version may trace the same step differently."
        )
    if different:
        notes.append(f"Resuming another run, as resume='anyway' says: {listed(different)}.")
    return notes


def _way_out(here: StepRecord, there: StepRecord) -> str:
    """Returns what to do about a folder that holds a run of other parts."""
    if None not in (here.leaves, there.leaves) and here.leaves != there.leaves:
        return (
            "The saved state has other arrays than a state of these parts, so they cannot resume "
            "it. Choose another folder for this run, or give the parts of the saved run."
        )
    if here.config:  # The command line has no such option.
        return (
            "Choose another folder for this run, or give the parts of the saved run to resume it."
        )
    return (
        "Choose another folder for this run, give the parts of the saved run to resume it, or set "
        "resume='anyway' to resume it with these parts."
    )


def seed_of(record: Mapping[str, Json]) -> int | None:
    """Returns the seed of a run; None if its record has none, as that of a user's own loop."""
    return record.get("seed")


def require_config_record(saved_record: Mapping[str, Json], folder: object) -> None:
    """Raises a `UserError` if a folder holds a run that was made in Python."""
    if _OF_CONFIG not in saved_record and _OF_LOOP not in saved_record:
        raise UserError(
            f"{quoted(folder)} holds a run that was started in Python, of the member "
            f"{_short(saved_record.get('member'))}. Resume it in Python with "
            f"fit(…, checkpoints=Checkpoints({str(folder)!r})), or choose another --workdir for "
            "this run."
        )


def listed(differences: list[tuple[str, Json, Json]]) -> str:
    """Returns the differences from `StepRecord.differences` as a text, with long values cut."""
    if [what for what, _, _ in differences] == [_STEP]:
        [(_, there, here)] = differences
        return (
            "all parts have the same names, and the training step computes something else, because "
            "the network, the loss, a method or a hyperparameter was changed (its hash is "
            f"{there} there and {here} here)"
        )
    return "; ".join(
        f"{what} is {_short(there)} there and {_short(here)} here"
        for what, there, here in differences
    )


def _short(value: Json) -> str:
    """Returns the repr of a value, with the middle of a long one left out."""
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:150]}…{text[-150:]}"


def differing_versions(saved: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Returns the libraries whose versions differ, as a text; empty if all are equal.

    >>> differing_versions({"jax": "0.10.1"}, {"jax": "0.10.2", "flax": "0.12"})
    'flax absent (here 0.12), jax 0.10.1 (here 0.10.2)'
    """
    pairs = [(name, saved.get(name), here.get(name)) for name in sorted(saved.keys() | here.keys())]
    return ", ".join(
        f"{name} {there or 'absent'} (here {now or 'absent'})"
        for name, there, now in pairs
        if there != now
    )
