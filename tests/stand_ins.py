"""Programs that stand in for others, and record the arguments that they get."""

import os
import pathlib

# Each argument has a null byte after it. The file appears when it is complete.
RECORD = "#!/bin/bash\nprintf '%s\\0' \"$@\" > {file}.new\nmv {file}.new {file}\n"
# Arguments that a shell would change if they were not quoted.
HOSTILE = ["", "a b", "it's", '"', "$(touch x)", "`touch x`", "a;touch x", "two\nlines", "\\", "~"]


def executable(path: pathlib.Path, script: str) -> None:
    """Writes a program."""
    path.write_text(script)
    path.chmod(0o755)


def arguments_in(file: pathlib.Path) -> list[str]:
    """The arguments that a stand-in has recorded, with bytes that are not UTF-8 as surrogates."""
    return os.fsdecode(file.read_bytes()).split("\0")[:-1]
