"""Checks of an object that is given as a data set."""

from typing import Any

import numpy as np

from dist_ens.data.source import Source
from dist_ens.errors import UserError, kind_of
from dist_ens.narrowing import held_dtype
from dist_ens.types import PyTree


def check_source(source: Any, *, any_parts: bool = False) -> None:
    """Checks that an object is a source, and that its `spec` describes an example of each split.

    Args:
        source: Object that is given as a source.
        any_parts: Whether examples may have any parts, for a loss function that takes the batch.
            True checks no splits. Default: False.

    Raises:
        UserError: If the object is not a source. Also if a split returns parts, shapes or types
            that `spec` does not describe.
    """
    if not isinstance(source, Source):
        raise UserError(
            f"source is {kind_of(source)}, not a dist_ens.data.Source. Make one of arrays "
            "with source_of_arrays((inputs, labels), (test_inputs, test_labels)). Read an iterator "
            "or a loader of batches into arrays first."
        )
    if any_parts:
        return
    splits = {"train": source.train, "test": source.test, "valid": source.valid}
    for name, split in splits.items():
        if split is None:
            continue
        where = f"source.{name}"
        example = split.take(np.zeros(1, np.int64))
        check_parts(where, example)
        for part, expected in source.spec.example.items():
            leaf, shape = np.asarray(example[part]), (1, *expected.shape)
            # A wider type is allowed, because it is narrowed later.
            if leaf.shape != shape or held_dtype(leaf.dtype) != expected.dtype:
                raise UserError(
                    f"{where} yields {part} {leaf.dtype}{list(leaf.shape)} for one example, and "
                    f"its spec says {expected.dtype}{list(shape)}. Correct one of the two."
                )


def check_parts(where: str, examples: PyTree, *, may_have_weights: bool = False) -> None:
    """Raises a `UserError` unless examples are a dict of `inputs` and `labels` only.

    Args:
        where: Name of the split in error messages.
        examples: Examples that `take` of the split returned.
        may_have_weights: Whether the dict may also hold `weights`. Default: False.
    """
    names = {*examples} if isinstance(examples, dict) else {kind_of(examples)}
    if names - ({"weights"} if may_have_weights else set()) != {"inputs", "labels"}:
        raise UserError(
            f"{where} yields parts {sorted(names)}, and training uses 'inputs' and 'labels' only. "
            "Leave out the other parts. If a part weighs or masks examples, leave out the examples "
            "that do not count."
        )
