"""Files that a launcher renders, and the commands that a person types next."""

import math
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

# Kubernetes and Google Cloud allow 63 characters for the names that have this one in them.
LONGEST_NAME = 40
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def written_file(output: flags.FlagHolder, *, dry_run: bool) -> pathlib.Path | None:
    """Returns the file that `deliver` writes; None if it prints the file.

    Args:
        output: Flag that names the file.
        dry_run: Whether to write nothing.
    """
    return None if dry_run else output.value


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
    is_printed = written_file(output, dry_run=dry_run) is None
    if is_printed:
        print(text, end="")
    else:
        cli.check_outputs(output)
        cli.write_file(output, lambda path: _write(path, text))
    lines = "\n".join(f"  {line}" for line in next_commands)
    print(f"Next:\n{lines}", file=sys.stderr if is_printed else sys.stdout)


def _write(path: pathlib.Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def check_name(name: str) -> None:
    """Raises a `UserError` if a name cannot be that of a resource.

    Args:
        name: Value of the flag `--name`.
    """
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise UserError(
            f"--name={shortened(name)} cannot be used. Use at most {LONGEST_NAME} lower-case "
            "letters, digits and dashes, with a letter at the start and no dash at the end."
        )


def chips_of(topology: str) -> int:
    """Returns the number of chips of a TPU slice.

    Args:
        topology: Value of the flag `--tpu_topology`: chips along each axis, such as `4x4`.

    Raises:
        UserError: If the text has another form.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*){1,2}", topology):
        raise UserError(
            f"--tpu_topology={shortened(topology)} is not a topology of a TPU slice. Use the "
            "number of chips along each axis, such as 4x4 or 4x4x8."
        )
    return math.prod(map(int, topology.split("x")))


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
