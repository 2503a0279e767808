"""The description of a data set: shapes, types and units of one example."""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import jax
import numpy as np

from dist_ens.data.class_names import listed
from dist_ens.data.columns import TableRule
from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.json_text import Json, JsonDict, fields_from_record
from dist_ens.ground.narrowing import held_dtype, narrowed
from dist_ens.ground.paths import shortened
from dist_ens.metrics.metric import along

# A number of each group, or of each target of each group.
OfTargets = tuple[float, ...] | tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True)
class Standardization:
    """The means and standard deviations with which a source standardised its inputs and targets.

    A value is standardised by `(value - mean) / std`, in each group with its own numbers.

    Attributes:
        input_mean: Mean of each feature in each group, in the original units, [groups, features].
            [groups, 0] if only the targets are standardised.
        input_std: Standard deviation of each feature in each group, in the original units; 1 for a
            constant feature, [groups, features].
        target_mean: Mean of the targets in each group, in the original unit, [groups], or that of
            each of several targets, [groups, targets].
        target_std: Standard deviation of the targets in each group, in the original unit, in the
            form of `target_mean`.

    >>> scale = Standardization(((3.0,),), ((2.0,),), (0.0,), (1.0,))
    >>> scale.of_inputs(np.array([[7.0], [3.0]])).tolist()  # (7 - 3) / 2 = 2
    [[[2.0], [0.0]]]
    """

    input_mean: tuple[tuple[float, ...], ...]
    input_std: tuple[tuple[float, ...], ...]
    target_mean: OfTargets
    target_std: OfTargets

    def __post_init__(self) -> None:
        means, stds = (
            [*map(np.ravel, (*inputs, targets))]
            for inputs, targets in (
                (self.input_mean, self.target_mean),
                (self.input_std, self.target_std),
            )
        )
        is_whole = [*map(len, means)] == [*map(len, stds)] and len(means) == (
            len(self.target_std) + 1
        )
        numbers, positive = [*itertools.chain(*means, *stds)], [*itertools.chain(*stds)]
        if not (is_whole and np.isfinite(numbers).all() and np.greater(positive, 0).all()):
            raise UserError(
                "A standardization needs a finite mean and a finite, positive deviation for each "
                f"feature and target of each group: got {str(self)[:400]}."
            )

    @property
    def has_inputs(self) -> bool:
        """Whether the inputs are standardised too, and not the targets alone."""
        return bool(self.input_mean[0])

    def of_inputs(self, inputs: np.ndarray) -> np.ndarray:
        """Returns inputs [examples, features] as float32[groups, examples, features].

        They are standardised for each group, or unchanged if only the targets are standardised.
        """
        if not self.has_inputs:
            return np.stack([inputs] * len(self.input_mean))
        mean, std = (np.array(rows)[:, None] for rows in (self.input_mean, self.input_std))
        with np.errstate(over="ignore"):
            standard = (inputs - mean) / std
        return narrowed(standard, np.float32, "inputs, standardised, [group, example, feature]")

    def of_targets(self, targets: np.ndarray) -> np.ndarray:
        """Returns targets [examples, ...] standardised for each group, float32[groups, ...]."""
        targets = np.asarray(targets, np.float64)[None]
        mean, std = (along(np.array(each), targets) for each in (self.target_mean, self.target_std))
        standard = (targets - mean) / std
        return narrowed(standard, np.float32, "labels, standardised, [group, example]")


@dataclasses.dataclass(frozen=True)
class Spec:
    """The description of one example of a data set, and of its groups.

    Attributes:
        input_shape: Shape of one input, without the batch.
        input_dtype: Name of the NumPy type in which JAX holds the inputs. A type wider than 32 bits
            is replaced: `int64` becomes `int32`.
        label_shape: Shape of the labels of one example: `()` for one label, `(length,)` for one at
            each position, `(num_targets,)` for several targets.
        num_classes: Number of classes. Labels are integers in [0, num_classes). None for real
            targets, float32. It is 2 for several labels that are each 0 or 1.
        num_groups: Number of groups of members. Each group has its own training and test set in the
            splits.
        standardization: Means and standard deviations with which the source standardised its inputs
            and targets. None if it did not.
        class_names: Names of the classes, in the order of their numbers. None if they have none.
        table: Rule by which the rows of a table became inputs and labels. None for other data.
        num_targets: Number of targets of one example: real numbers, or labels that are 0 or 1. None
            if it has one label, or one at each position.

    >>> spec = Spec((8, 8), "float64", (), 10)
    >>> spec.input_dtype, spec.example_bytes  # 8 * 8 * 4 bytes and a label of 4
    ('float32', 260)
    """

    input_shape: tuple[int, ...]
    input_dtype: str
    label_shape: tuple[int, ...]
    num_classes: int | None
    num_groups: int = 1
    standardization: Standardization | None = None
    class_names: tuple[str, ...] | None = None
    table: TableRule | None = None
    num_targets: int | None = None

    def __post_init__(self) -> None:
        for name in ("input_shape", "label_shape"):
            object.__setattr__(self, name, tuple(map(int, getattr(self, name))))
        object.__setattr__(self, "input_dtype", held_dtype(self.input_dtype).name)
        if self.class_names is not None:
            object.__setattr__(self, "class_names", tuple(self.class_names))
            if len(self.class_names) != self.num_classes:
                raise UserError(
                    f"num_classes={self.num_classes}, and there are {len(self.class_names)} names "
                    f"of classes: {listed(self.class_names)}. Give each class one name."
                )

    @classmethod
    def from_dict(cls, values: Mapping[str, Json]) -> "Spec":
        """Returns the spec of a dict that `to_dict` made, which may have been stored as JSON."""

        def standardization(values: Json) -> Standardization | None:
            return values and Standardization(**fields_from_record(Standardization, values))

        def table(values: Json) -> TableRule | None:
            return values and TableRule.from_dict(values)

        readers = {"standardization": standardization, "table": table}
        return cls(**fields_from_record(cls, values, readers))

    def to_dict(self) -> JsonDict:
        """Returns the fields by name, in types that JSON can hold."""
        return dataclasses.asdict(self)

    @property
    def label_dtype(self) -> str:
        """Name of the NumPy type of the labels."""
        return "float32" if self.num_classes is None else "int32"

    @property
    def example(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes and types of one example, by the names `inputs` and `labels`."""
        return {
            "inputs": jax.ShapeDtypeStruct(self.input_shape, self.input_dtype),
            "labels": jax.ShapeDtypeStruct(self.label_shape, self.label_dtype),
        }

    @property
    def example_bytes(self) -> int:
        """Number of bytes of one example, input and label."""
        return sum(
            math.prod(part.shape) * np.dtype(part.dtype).itemsize for part in self.example.values()
        )

    def told_apart(self, other: "Spec") -> tuple[str, str]:
        """Returns descriptions of this spec and of another one, which differ."""
        if str(self) != str(other):
            return str(self), str(other)
        names = ("table", "class_names", "standardization")
        name = next(each for each in names if getattr(self, each) != getattr(other, each))
        here, there = (f"{name}={shortened(str(getattr(spec, name)))}" for spec in (self, other))
        return here, there

    def __str__(self) -> str:
        classes, targets = self.num_classes, self.num_targets
        labels = "with real targets" if classes is None else f"in {counted(classes, 'class')}"
        if targets is not None:
            kind = "real target" if classes is None else "label"
            labels = f"with {counted(targets, kind)} each"
        groups = f", {self.num_groups} groups" if self.num_groups > 1 else ""
        columns = f" of a table: {self.table}" if self.table else ""
        return f"{self.input_dtype}{list(self.input_shape)} {labels}{groups}{columns}"


def in_tuples(numbers: np.ndarray) -> OfTargets:
    """Returns numbers, [groups] or [groups, targets], as tuples."""
    if numbers.ndim == 1:
        return tuple(numbers.tolist())
    return tuple(map(tuple, numbers.tolist()))
