"""Flags in the command line of a command that a launcher starts."""

import itertools
from collections.abc import Sequence


def flag(name: str, value: object) -> str:
    """Returns one argument of a command, which is passed on without a shell.

    Args:
        name: Name of the flag, without the dashes.
        value: Value of the flag.

    >>> flag("process_id", 3)
    '--process_id=3'
    """
    return f"--{name}={value}"


def with_flags(arguments: Sequence[str], *added: str) -> list[str]:
    """Returns a command with more flags.

    They stand right after the verb. A flag after `--` would not be read as a flag.

    Args:
        arguments: Verb of dist-ens and its flags.
        *added: Flags to add.

    >>> with_flags(["train", "--workdir=runs/a", "--", "x"], "--process_id=3")
    ['train', '--process_id=3', '--workdir=runs/a', '--', 'x']
    """
    return [*arguments[:1], *added, *arguments[1:]]


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """Returns the value of a flag in a command line; None if the flag is not there.

    Args:
        arguments: Verb of dist-ens and its flags.
        name: Name of the flag, without the dashes. The last of several values counts.

    >>> value_of(["train", "--workdir=a", "-workdir", "b"], "workdir")
    'b'
    """
    values, _ = _taken_out(arguments, name)
    return values[-1] if values else None


def without(arguments: Sequence[str], *names: str) -> list[str]:
    """Returns a command line without some flags that have a value.

    Args:
        arguments: Verb of dist-ens and its flags.
        *names: Names of the flags, without the dashes.

    >>> without(["train", "--workdir", "a", "--config=b", "--", "--config=c"], "workdir", "config")
    ['train', '--', '--config=c']
    """
    rest = list(arguments)
    for name in names:
        _, rest = _taken_out(rest, name)
    return rest


def _taken_out(arguments: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """Returns the values of a flag, and the other arguments. A flag after `--` is no flag."""
    values, rest = list[str](), list[str]()
    words = iter(arguments)
    for word in words:
        if word == "--":
            return values, [*rest, word, *words]
        given, equals, value = word.partition("=")
        if given not in (f"-{name}", f"--{name}"):
            rest.append(word)
        elif equals:
            values.append(value)
        else:
            values += [*itertools.islice(words, 1)]
    return values, rest
