"""Checks of the values of fields. Their messages say what is wrong, and then what to do."""

import difflib
import math
import operator
from collections.abc import Iterable
from typing import Any

from dist_ens.errors import UserError

# Steps, members and their ids are counted in int32.
MOST = 2**31 - 1
MOST_STEPS = 2**62  # Largest number of steps of a run.
MOST_SEED = 2**32 - 1
MOST_DROPOUT_SAMPLES = 2**16
# Names of fields elsewhere, and the fields that mean the same in a config.
_ELSEWHERE = {
    "batch": "global_batch_size",
    "batch_size": "global_batch_size",
    "bs": "global_batch_size",
    "clip": "clip_norm",
    "data.name": "data.source",
    "dataset": "source",
    "ensemble_size": "num_members",
    "eval_every": "evaluation.every_steps",
    "grad_clip": "clip_norm",
    "hidden": "hidden_sizes",
    "iterations": "steps",
    "l2": "weight_decay",
    "layers": "hidden_sizes",
    "log_every": "logging.every_steps",
    "lr": "learning_rate",
    "members": "num_members",
    "n_estimators": "num_members",
    "precision": "dtype",
    "random_state": "seed",
    "wd": "weight_decay",
}


def require(holds: bool, message: str) -> None:
    """Raises a `UserError` with a message unless a condition holds."""
    if not holds:
        raise UserError(message)


def require_one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    """Raises a `UserError` unless a field's value is one of the known values."""
    if value not in known:
        raise UserError(
            f"{field}={value!r} is unknown.{did_you_mean(value, known)} Choose one of "
            f"{', '.join(known)}."
        )


def require_positive(field: str, value: int | float | None, most: int = MOST) -> None:
    """Raises a `UserError` unless a field's value is None, or positive and finite.

    Args:
        field: Name of the field.
        value: Value of the field.
        most: Largest allowed integer. Floats have no such bound.
    """
    if value is None:
        return
    shown = str(value)[:200]
    if not value > 0 or (isinstance(value, float) and not math.isfinite(value)):
        number = "an integer of 1 or more" if isinstance(value, int) else "a positive number"
        raise UserError(f"{field} must be positive: got {shown}. Set --config.{field} to {number}.")
    if isinstance(value, int) and value > most:
        raise UserError(f"{field} must be at most {most:,}: got {shown}. Lower it.")


def require_coefficient(field: str, value: float, hint: str) -> None:
    """Raises a `UserError` unless a coefficient is positive and finite.

    Args:
        field: Name of the coefficient.
        value: Value of the coefficient.
        hint: Sentence that says what to do.
    """
    if not 0 < _number(field, value) < math.inf:
        raise UserError(f"{field} must be positive and finite: got {str(value)[:200]}. {hint}")


def require_fraction(field: str, value: float, hint: str) -> None:
    """Raises a `UserError` unless a value lies in [0, 1).

    Args:
        field: Name of the value.
        value: Value to check.
        hint: Sentence that says what to do.
    """
    if not 0 <= _number(field, value) < 1:
        raise UserError(f"{field} must lie in [0, 1): got {str(value)[:200]}. {hint}")


def refuse_mixed_bootstrap(mixup: str | None, bootstrap: str | None, hint: str) -> None:
    """Raises a `UserError` if members are trained on mixed examples of a bootstrap sample.

    Args:
        mixup: Text that says how examples are mixed; None if they are not.
        bootstrap: Text that says how samples are drawn; None if they are not.
        hint: Sentence that says what to do.
    """
    if mixup is not None and bootstrap is not None:
        raise UserError(
            f"{mixup} would mix out-of-bag examples into those of the member, which {bootstrap} "
            f"draws. {hint}"
        )


def _number(field: str, value: Any) -> int | float:
    """Returns a value as a Python number.

    Raises:
        UserError: If the value is not a number.
    """
    if isinstance(value, int | float):
        return value
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise UserError(f"{field} is {repr(value)[:200]}. Give a number.") from None


def whole_number(field: str, value: Any, *, least: int, most: int = MOST) -> int:
    """Returns a field's value as an int. NumPy's integers are converted.

    Args:
        field: Name of the field.
        value: Value of the field.
        least: Smallest allowed integer.
        most: Largest allowed integer.

    Raises:
        UserError: If the value is not an integer in [least, most].
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise UserError(
            f"{field} is {repr(value)[:200]}. Give a whole number from {least:,} to {most:,}."
        )
    return number


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns a question with the nearest known name, or the empty string.

    Args:
        name: Name that is unknown.
        known: Names that are known. Those with dots are paths of fields.

    >>> did_you_mean("learnig_rate", ["learning_rate", "momentum"])
    " Did you mean 'learning_rate'?"
    >>> did_you_mean("optimizer.lr", ["optimizer.b2", "optimizer.learning_rate"])
    " Did you mean 'optimizer.learning_rate'?"
    """
    known = list(known)
    near = fields_named(name, known)
    if not near:  # A field is compared with its own section, because a long prefix fits any.
        section, dot, field = name.rpartition(".")
        prefix = section + dot
        within = {path.removeprefix(prefix): path for path in known if path.startswith(prefix)}
        fields = within or dict(zip(known, known, strict=True))
        found = difflib.get_close_matches(field if within else name, fields, n=1)
        near = [fields[each] for each in found]
    return f" Did you mean {near[0]!r}?" if near else ""


def fields_named(name: str, known: Iterable[str]) -> list[str]:
    """Returns the paths of the fields that a name stands for in any section, the nearest first.

    Args:
        name: Name or path of a field, or its name in another library.
        known: Paths of the fields.

    >>> fields_named("lr", ["epochs", "optimizer.learning_rate", "optimizer.name"])
    ['optimizer.learning_rate']
    """
    section, dot, field = name.rpartition(".")
    named_by_section = f"{name}.name"
    field = _ELSEWHERE.get(named_by_section) or _ELSEWHERE.get(name) or _ELSEWHERE.get(field, field)
    ends = (f".{field}", f".{named_by_section}")
    named = [path for path in known if f".{path}".endswith(ends)]
    return difflib.get_close_matches(section + dot + field, named, n=len(named) or 1, cutoff=0.0)
