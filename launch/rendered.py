"""Files that a launcher renders, and the commands that a person types next."""

import pathlib
import posixpath
import re
import sys
from collections.abc import Iterable, Sequence

from absl import flags

from dist_ens.errors import UserError
from dist_ens.paths import shortened
from launch import cli
from launch.arguments import value_of

# Names of Kubernetes and of Google Cloud.
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def deliver(
    text: str, output: flags.FlagHolder, next_commands: Iterable[str], *, dry_run: bool
) -> None:
    """Writes or prints a rendered file, and prints the next commands.

    Without `output`, and in a dry run, the file is printed on standard output and the next commands
    on standard error, so that a pipe gets the file alone.

    Args:
        text: Content of the file.
        output: Flag that names the file.
        next_commands: Lines to print below "Next:".
        dry_run: Whether to write nothing.
    """
    is_printed = dry_run or output.value is None
    if is_printed:
        print(text, end="")
    else:
        cli.check_outputs(output)
        cli.write_file(output, lambda path: _write(path, text))
    lines = "\n".join(f"  {line}" for line in next_commands)
    print(f"Next:\n{lines}", file=sys.stderr if is_printed else sys.stdout)


def _write(path: pathlib.Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def given(flag: flags.FlagHolder, example: str) -> str:
    """Returns the text of a flag that must be given.

    Args:
        flag: The flag.
        example: Value for the error message.

    Raises:
        UserError: If the flag was not given.
    """
    if not flag.value:
        raise UserError(f"--{flag.name} is missing. Add it, such as --{flag.name}={example}.")
    return flag.value


def check_name(name: str, longest: int) -> None:
    """Raises a `UserError` if a name cannot be that of a resource.

    Args:
        name: Value of the flag `--name`.
        longest: Largest number of characters.
    """
    if not _NAME.fullmatch(name) or len(name) > longest:
        raise UserError(
            f"--name={shortened(name)} cannot be used. Use at most {longest} lower-case letters, "
            "digits and dashes, with a letter at the start and no dash at the end."
        )


def check_workdir(arguments: Sequence[str], storage: flags.FlagHolder, mount_path: str) -> None:
    """Raises a `UserError` if the checkpoints of a command would be lost with its machine.

    Args:
        arguments: Verb of dist-ens and its flags.
        storage: Flag that names the storage.
        mount_path: Folder where the machines see the storage.
    """
    workdir = value_of(arguments, "workdir")
    if workdir is None:
        return
    if storage.value is None:
        raise UserError(
            f"--workdir={shortened(workdir)} would be lost with the machine, because "
            f"--{storage.name} names no storage. Add --{storage.name}."
        )
    folder = posixpath.normpath(mount_path)
    if not posixpath.normpath(workdir).startswith(f"{folder}/"):
        raise UserError(
            f"--workdir={shortened(workdir)} is not inside {folder}, where the machines see the "
            f"storage. Use a --workdir such as {posixpath.join(folder, 'digits')}, or change "
            "--mount_path."
        )
