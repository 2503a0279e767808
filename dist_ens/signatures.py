"""Names of functions, and whether they can be called with some arguments, for error messages."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any


def name_of(fn: Callable[..., object]) -> str:
    """Returns the name of a class or function, or that of an object's class.

    >>> name_of(name_of)
    'name_of'
    """
    return getattr(fn, "__qualname__", type(fn).__name__)


def call_error(fn: Any, count: int, named: Sequence[str] = ()) -> str | None:
    """Returns why an object cannot be called with some arguments; None if it can.

    Args:
        fn: Function, or any other object.
        count: Number of positional arguments.
        named: Names of keyword arguments.

    >>> call_error(lambda x: x, 2)
    'too many positional arguments'
    """
    try:
        inspect.signature(fn).bind(*[None] * count, **dict.fromkeys(named))
    except TypeError as error:
        return str(error)
    except ValueError:  # a builtin, of which Python does not know the signature
        return None
    return None
