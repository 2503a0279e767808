"""Commands that are printed for a person to paste into a shell."""

import os
import shlex


def command_line(*words: str, **flags: str | os.PathLike[str] | bool | None) -> str:
    """Returns a command that a shell takes apart into exactly these arguments.

    Args:
        words: Words of the command, such as `dist-ens` and a verb.
        flags: Value of each flag. True is the flag alone; None and False leave it out.

    >>> command_line("dist-ens", "predict", workdir="my runs", input="x.npy", shift=True)
    "dist-ens predict --workdir='my runs' --input=x.npy --shift"
    """
    given = [quoted(word) for word in words]
    for name, value in flags.items():
        if value is True:
            given.append(f"--{name}")
        elif value is not None and value is not False:
            given.append(option(name, value))
    return " ".join(given)


def option(name: str, value: str | os.PathLike[str]) -> str:
    """Returns a flag with its value, quoted for a shell.

    >>> option("config", "my config.py")
    "--config='my config.py'"
    """
    return f"--{name}={quoted(value)}"


def quoted(value: str | os.PathLike[str]) -> str:
    r"""Returns a word of a command as a shell reads it, on one line and in printable characters.

    Ordinary names come back as they are. A name with other characters than printable ones is
    written as `$'…'`, which bash, zsh and ksh read.

    >>> quoted("a;b"), quoted("two\nlines")
    ("'a;b'", "$'two\\012lines'")
    """
    text = os.fspath(value)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def _escaped(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    is_byte = "\udc80" <= character <= "\udcff"  # of a name of a file that is no text
    errors = "surrogateescape" if is_byte else "surrogatepass"
    return "".join(f"\\{byte:03o}" for byte in character.encode(errors=errors))
