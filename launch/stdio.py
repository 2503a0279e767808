"""The standard streams of a command, which never stop its work.

If the reader closes its pipe, the command continues without output and succeeds. If writing fails
for another reason, such as a full disk, the command finishes its work. At its end it reports that
output was lost.
"""

import io
import os
import sys
from typing import NoReturn, TextIO

from typing_extensions import Buffer

from dist_ens.ground.commands import printable
from dist_ens.ground.paths import shortened

_LONGEST_ARGUMENT = 200  # Largest number of characters of an argument in a message.


class Output(io.FileIO):
    """A file descriptor whose writes never raise."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.error: OSError | None = None

    def write(self, data: Buffer) -> int:
        """Writes bytes, or drops them if the system cannot write them."""
        try:
            return super().write(data)
        except BrokenPipeError:
            pass
        except OSError as error:
            self.error = self.error or error
        return memoryview(data).nbytes


def begin() -> None:
    """Replaces the standard streams by streams that cannot fail.

    A descriptor that is closed is opened on the null device. Otherwise the next file that is opened
    would be given its number, and messages of C++ libraries would end up in that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # It takes the lowest free number, which is this one.
            os.set_inheritable(descriptor, True)
    sys.stdout = _stream(1, sys.stdout)
    sys.stderr = _stream(2, sys.stderr)


def _stream(descriptor: int, before: TextIO | None) -> TextIO:
    """Returns a text stream for a descriptor, with the settings of the stream before it."""
    like = before if isinstance(before, io.TextIOWrapper) else None
    return io.TextIOWrapper(
        io.BufferedWriter(Output(descriptor)),
        encoding=like.encoding if like else "utf-8",
        errors="backslashreplace",  # File names may hold bytes that are not text.
        line_buffering=bool(like and like.line_buffering),
        write_through=bool(like and like.write_through),
    )


def show_and_exit(text: str) -> NoReturn:
    """Prints a help text and ends the process with 0, or with 2 if the text cannot be written."""
    print(text)
    sys.exit(exit_code(0, if_unwritten=2))


def exit_code(code: int, if_unwritten: int = 1) -> int:
    """Returns the exit code of a command, and says on standard error if output was lost."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, Output) or raw.error is None:
        return code
    why, raw.error = raw.error.strerror, None
    say(
        f"error: Some of the output could not be written: {why}. Files that the command wrote are "
        "complete. Send the output elsewhere, or free some space, and run the command again."
    )
    return code or if_unwritten


def fail(code: int, message: str) -> NoReturn:
    """Prints an error message and ends the process."""
    say(message)
    sys.exit(code)


def say(message: str) -> None:
    """Prints a message on standard error, in which long arguments of the command are cut."""
    for argument in sys.argv[1:]:
        for text in (argument, argument.partition("=")[2]):
            if len(text) > _LONGEST_ARGUMENT:
                message = message.replace(repr(text), text).replace(text, shortened(text))
    print(printable(message), file=sys.stderr, flush=True)
