"""Numbers as the text of a report page."""

import math
from collections.abc import Mapping

from dist_ens.ground.json_text import Json
from dist_ens.metrics.catalogue import has_unit

DASH = "—"


def is_finite(value: Json) -> bool:
    """Returns whether a value is a finite number."""
    return isinstance(value, int | float) and math.isfinite(value)


def number(value: Json, scores: Mapping[str, Json]) -> str:
    """Returns a number as text, or a dash if it is not finite.

    A score has four decimals, or four significant digits if it has the targets' unit.

    >>> number(0.25, {"nll": 0.25}), number(123.456, {"rmse": 5.0}), number(None, {})
    ('0.2500', '123.5', '—')
    """
    if not is_finite(value):
        return DASH
    if scores and not has_unit(scores) and abs(value) < 1e4:
        return f"{value:.4f}"
    return f"{value:#.4g}".removesuffix(".")


def interval(intervals: Mapping[str, Json] | None, name: str, scores: Mapping[str, Json]) -> str:
    """Returns the two ends of a score's interval, or an empty string without an interval."""
    ends = (intervals or {}).get(name)
    return " to ".join(number(end, scores) for end in ends) if ends else ""
