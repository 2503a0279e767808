"""Commands that are printed for a person to paste into a shell."""

import shlex


def command_line(*words: str, **flags: object) -> str:
    """Returns a command line that a shell splits into exactly these arguments.

    True writes a flag without a value. None and False omit it.

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


def option(name: str, value: object) -> str:
    """Returns a flag with its value, quoted for a shell."""
    return f"--{name}={quoted(value)}"


def quoted(value: object) -> str:
    r"""Returns a word or a path quoted for a shell, on one line and in printable characters.

    >>> quoted("a;b"), quoted("two\nlines")
    ("'a;b'", "$'two\\012lines'")
    """
    text = str(value)
    if text.isprintable():
        return shlex.quote(text)
    return "$'" + "".join(map(_escaped, text)) + "'"


def printable(text: str) -> str:
    r"""Returns a text that is safe to show on a terminal: what cannot be printed is escaped.

    >>> printable("no folder \x1b[31mruns")
    'no folder \\x1b[31mruns'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def _escaped(character: str) -> str:
    if character in "\\'":
        return "\\" + character
    if character.isprintable():
        return character
    # Python holds a byte of a file name that is not UTF-8 as one of these surrogates.
    is_byte = "\udc80" <= character <= "\udcff"
    errors = "surrogateescape" if is_byte else "surrogatepass"
    return "".join(f"\\{byte:03o}" for byte in character.encode(errors=errors))
