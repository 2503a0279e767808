"""The description of a data set: what one example is like, and in which units."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from dist_ens.config import fields_from_record, whole_number
from dist_ens.errors import UserError
from dist_ens.narrowing import held_dtype, narrowed
from dist_ens.paths import shortened


@dataclasses.dataclass(frozen=True)
class Standardization:
    """What a source took off its inputs and targets, and then divided them by, group by group.

    Attributes:
        input_mean: For each group a number for each feature, in the inputs' own units.
        input_std: Likewise; 1 for a feature that is constant.
        target_mean: For each group, in the targets' own unit.
        target_std: Likewise.
    """

    input_mean: tuple[tuple[float, ...], ...]
    input_std: tuple[tuple[float, ...], ...]
    target_mean: tuple[float, ...]
    target_std: tuple[float, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Standardization":
        """Reads back `dataclasses.asdict`, also through JSON.

        Raises:
            UserError: If a field is absent, unknown, or of another type.
        """
        return cls(**fields_from_record(cls, values))

    def __post_init__(self) -> None:
        groups = {len(getattr(self, field.name)) for field in dataclasses.fields(self)}
        features = {len(row) for row in (*self.input_mean, *self.input_std)}
        if len(groups) > 1 or len(features) > 1:
            raise UserError(
                f"A standardization is of {sorted(groups)} groups and {sorted(features)} features. "
                "Give a mean and a standard deviation for each group, and for each of its features."
            )
        for name in ("input_mean", "target_mean", "input_std", "target_std"):
            values = np.ravel(np.array(getattr(self, name), np.float64))
            bad = ~np.isfinite(values) | ((values <= 0) if name.endswith("std") else False)
            if bad.any():
                raise UserError(
                    f"{name} of a standardization holds {values[bad][0]}. Means are finite, and "
                    "standard deviations positive too."
                )

    def of_inputs(self, inputs: np.ndarray) -> np.ndarray:
        """Returns inputs standardised as every group's members take them.

        Args:
            inputs: Inputs in their own units, [examples, features].

        Returns:
            float32[groups, examples, features].

        Raises:
            UserError: If a standardised input does not fit in float32.
        """
        mean, std = (np.array(rows)[:, None] for rows in (self.input_mean, self.input_std))
        with np.errstate(over="ignore"):
            standard = (inputs - mean) / std
        return narrowed(standard, np.float32, "inputs, standardised, [group, example, feature]")

    def of_targets(self, targets: np.ndarray) -> np.ndarray:
        """Returns targets standardised as every group's members learn them.

        Args:
            targets: Targets in their own unit, [examples, ...].

        Returns:
            float32[groups, examples, ...].

        Raises:
            UserError: If a standardised target does not fit in float32.
        """
        axes = (1,) * np.ndim(targets)
        mean, std = (
            np.array(numbers).reshape(-1, *axes) for numbers in (self.target_mean, self.target_std)
        )
        standard = (np.asarray(targets, np.float64) - mean) / std
        return narrowed(standard, np.float32, "labels, standardised, [group, example]")


@dataclasses.dataclass(frozen=True)
class Spec:
    """A data set, described: one example, and how many sets it is.

    Attributes:
        input_shape: Without the batch.
        input_dtype: Name of the NumPy type in which JAX holds the inputs. A wider type becomes that
            of the same kind with 32 bits: `int64` becomes `int32`.
        label_shape: `()` for one label per example; `(length,)` for one per position.
        num_classes: Labels lie in [0, num_classes); None where they are real targets, float32.
        num_groups: Of members: each has a training and a test set of its own in the splits.
        standardization: What the source did to inputs and targets; None: nothing.
    """

    input_shape: tuple[int, ...]
    input_dtype: str
    label_shape: tuple[int, ...]
    num_classes: int | None
    num_groups: int = 1
    standardization: Standardization | None = None

    def __post_init__(self) -> None:
        for name in ("input_shape", "label_shape"):
            lengths = [whole_number(f"A length in {name}", n, least=1) for n in getattr(self, name)]
            object.__setattr__(self, name, tuple(lengths))
        names = ["num_groups"] if self.num_classes is None else ["num_groups", "num_classes"]
        for name in names:
            object.__setattr__(self, name, whole_number(name, getattr(self, name), least=1))
        if self.standardization and len(self.standardization.target_mean) != self.num_groups:
            raise UserError(
                f"A standardization is of {len(self.standardization.target_mean)} groups, and the "
                f"data of {self.num_groups}. Give one for each group."
            )
        object.__setattr__(self, "input_dtype", _held_dtype(self.input_dtype))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Spec":
        """Reads back `to_dict`, also through JSON.

        Raises:
            UserError: If a field is absent, unknown, of another type, or out of range.
        """

        def standardization(values: Any) -> Standardization | None:
            return None if values is None else Standardization.from_dict(values)

        return cls(**fields_from_record(cls, values, {"standardization": standardization}))

    def to_dict(self) -> dict[str, Any]:
        """Plain data that JSON can hold."""
        return dataclasses.asdict(self)

    @property
    def label_dtype(self) -> str:
        """Name of the NumPy type of the labels."""
        return "float32" if self.num_classes is None else "int32"

    @property
    def example(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of one example."""
        return {
            "inputs": jax.ShapeDtypeStruct(self.input_shape, self.input_dtype),
            "labels": jax.ShapeDtypeStruct(self.label_shape, self.label_dtype),
        }

    @property
    def example_bytes(self) -> int:
        """Of an example's input and label."""
        label = 4 * math.prod(self.label_shape)
        return math.prod(self.input_shape) * np.dtype(self.input_dtype).itemsize + label

    def told_apart(self, other: "Spec") -> tuple[str, str]:
        """This one and another that is not equal, in words in which they differ."""
        if str(self) != str(other) or not (self.standardization and other.standardization):
            return str(self), str(other)
        for field in dataclasses.fields(Standardization):
            pair = (getattr(spec.standardization, field.name) for spec in (self, other))
            for a, b in zip(*map(np.ravel, pair), strict=True):
                if a != b:
                    name = field.name.replace("_", " ")
                    return f"{self}, a training {name} {a}", f"{other}, a training {name} {b}"
        return str(self), str(other)

    def __str__(self) -> str:
        real = self.num_classes is None
        labels = "with real targets" if real else f"in {self.num_classes} classes"
        groups = f", {self.num_groups} groups" if self.num_groups > 1 else ""
        return f"{self.input_dtype}{list(self.input_shape)} {labels}{groups}"


def _held_dtype(name: str) -> str:
    """Returns the name of the type in which JAX holds inputs of a type."""
    try:
        held = held_dtype(name)
    except TypeError as error:
        raise UserError(
            f"input_dtype is {shortened(str(name))}, which is not the name of a NumPy type. Try "
            "'float32'."
        ) from error
    if held.kind not in "biuf":
        raise UserError(
            f"input_dtype is {held.name}, which holds no real numbers. Convert the inputs to "
            "floats or integers."
        )
    return held.name
