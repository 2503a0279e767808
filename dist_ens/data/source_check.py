"""Checks of an object that is given as a data set."""

from dist_ens.data.source import Source
from dist_ens.data.splits import example_shapes_of
from dist_ens.ground.errors import UserError, kind_of
from dist_ens.ground.types import PyTree


def check_source(source: object, *, any_parts: bool = False) -> None:
    """Raises a `UserError` unless an object is a source whose `spec` describes its examples.

    With `any_parts`, for a loss function that takes the batch, examples may have any parts.
    """
    if not isinstance(source, Source):
        raise UserError(
            f"source is {kind_of(source)}, not a dist_ens.data.Source. Make one of arrays "
            "with source_of_arrays((inputs, labels), (test_inputs, test_labels))."
        )
    for split in () if any_parts else (source.train, source.test):
        if (found := example_shapes_of(split)) != (described := source.spec.example):
            raise UserError(f"A split yields {found}, and its source.spec describes {described}.")


def check_parts(where: str, examples: PyTree, *, may_have_weights: bool = False) -> None:
    """Raises a `UserError` unless examples are a dict of `inputs` and `labels`, or weights too."""
    names = {*examples} if isinstance(examples, dict) else {kind_of(examples)}
    if names - ({"weights"} if may_have_weights else set()) != {"inputs", "labels"}:
        raise UserError(
            f"{where} yields parts {sorted(names)}, and training uses 'inputs' and 'labels' only. "
            "Leave out the other parts, and examples that do not count."
        )
