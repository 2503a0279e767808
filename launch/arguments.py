"""Flags in the command line of a command that a launcher starts."""

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
    value = None
    words = iter(arguments)
    for word in words:
        if word == "--":
            break
        given, equals, rest = word.partition("=")
        if given in (f"-{name}", f"--{name}"):
            value = rest if equals else next(words, None)
    return value
