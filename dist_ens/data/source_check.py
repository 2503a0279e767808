"""Checks of an object that is given as a data set."""

from typing import Any

import numpy as np

from dist_ens.data.source import Source, Split
from dist_ens.data.spec import Spec
from dist_ens.errors import UserError, kind_of
from dist_ens.narrowing import held_dtype
from dist_ens.types import PyTree

_PARTS = {"inputs", "labels"}
_WEIGHTS = "weights"


def check_source(source: Any, *, any_parts: bool = False) -> None:
    """Checks that an object is a source, and that its `spec` describes an example of each split.

    Args:
        source: Object that is given as a source.
        any_parts: Whether examples may have any parts, for a loss function that takes the batch.
            True checks no splits. Default: False.

    Raises:
        UserError: If the object is not a source, or its `spec` is not a `Spec`. Also if a split has
            no examples, or returns parts, shapes or types that `spec` does not describe.
    """
    if not isinstance(source, Source):
        raise UserError(
            f"source is {kind_of(source)}, not a dist_ens.data.Source. Make one of arrays "
            "with source_of_arrays((inputs, labels), (test_inputs, test_labels)). Read an iterator "
            "or a loader of batches into arrays first."
        )
    if not isinstance(source.spec, Spec):
        raise UserError(
            f"source.spec is {kind_of(source.spec)}, not a dist_ens.data.Spec. Describe an "
            "example with one."
        )
    if any_parts:
        return
    splits = {"train": source.train, "test": source.test, "valid": source.valid}
    for name, split in splits.items():
        if split is not None:
            _check_split(f"source.{name}", split, source.spec)


def _check_split(where: str, split: Split, spec: Spec) -> None:
    if not len(split):
        raise UserError(f"{where} has no examples. Add one or more.")
    example = split.take(np.zeros(1, np.int64))
    check_parts(where, example)
    expected = {
        "inputs": ((1, *spec.input_shape), spec.input_dtype),
        "labels": ((1, *spec.label_shape), spec.label_dtype),
    }
    for part, (shape, dtype) in expected.items():
        leaf = np.asarray(example[part])
        # A wider type is allowed, because it is narrowed later.
        if leaf.shape != shape or held_dtype(leaf.dtype) != dtype:
            raise UserError(
                f"{where} yields {part} {leaf.dtype}{list(leaf.shape)} for one example, and its "
                f"spec says {dtype}{list(shape)}. Correct one of the two."
            )


def check_parts(where: str, examples: PyTree, *, may_have_weights: bool = False) -> None:
    """Raises a `UserError` unless examples are a dict of `inputs` and `labels` only.

    Args:
        where: Name of the split in error messages.
        examples: Examples that `take` of the split returned.
        may_have_weights: Whether the dict may also hold `weights`. Default: False.
    """
    names = sorted(examples) if isinstance(examples, dict) else None
    expected = _PARTS | {_WEIGHTS} if may_have_weights and names and _WEIGHTS in names else _PARTS
    if names is None or {*names} != expected:
        found = f"{kind_of(examples)}" if names is None else f"parts {names}"
        raise UserError(
            f"{where} yields {found}, and training uses 'inputs' and 'labels' only. Leave out the "
            "other parts. If a part weighs or masks examples, leave out the examples that do not "
            "count."
        )
