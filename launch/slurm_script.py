"""The script by which Slurm runs a command, and starts it again after a preemption."""

import pathlib
import posixpath
import re
from collections.abc import Sequence
from typing import Any

from dist_ens.ground.errors import RESTARTED, UserError
from dist_ens.ground.paths import shortened
from launch.rendered import filled
from launch.started_command import value_of

# Flags whose values stand in #SBATCH lines, where sbatch ends a value at these characters.
_IN_DIRECTIVES = ("name", "partition", "account", "time", "log")
_SPECIAL = re.compile(r"""[\s"'\\#]""")
# Flags with a file that a command writes. Each task of a sweep writes a file of its own.
_OUTPUTS = ("output", "json")


def render(command: Sequence[str], python: str, **options: Any) -> str:
    """Returns the script of a job for sbatch."""
    for flag in _IN_DIRECTIVES:
        value = options[flag]
        if value is not None and (not value.isprintable() or _SPECIAL.search(value)):
            raise UserError(
                f"--{flag} cannot be {shortened(value)}: sbatch reads no space, quote, backslash, "
                "# or line break there."
            )
    gpus, processes = options["gpus_per_node"], options["tasks_per_node"]
    if gpus and processes not in (None, 1, gpus):
        raise UserError(
            f"--tasks_per_node={processes} does not fit --gpus_per_node={gpus}: use {gpus} or 1."
        )
    verb, *arguments = command
    return filled(
        "slurm.sh",
        options,
        python=python,
        verb=verb,
        arguments=arguments,
        tasks=_tasks(command, options["configs"]),
        setup=options["setup"] and options["setup"].absolute(),
        restarted=RESTARTED,
    )


def _tasks(command: Sequence[str], configs: Sequence[str]) -> list[list[str]]:
    """Returns the last flags of each task of a sweep, which replace those of the command."""
    workdir = value_of(command, "workdir")
    names = [pathlib.PurePath(config).stem for config in configs]
    if configs and (workdir is None or len({*names}) < len(names)):
        raise UserError(
            "Each config of a sweep gets the folder WORKDIR/NAME. Add --workdir=WORKDIR after --, "
            f"and use files with different names: got {shortened(','.join(configs))}."
        )
    outputs = {flag: file for flag in _OUTPUTS if (file := value_of(command, flag))}
    tasks = []
    for config, name in zip(configs, names, strict=True):
        own: dict[str, object] = {
            "config": config,
            "workdir": posixpath.join(workdir or "", name),
        }
        own |= {flag: _of_task(file, name) for flag, file in outputs.items()}
        tasks.append([f"--{flag}={value}" for flag, value in own.items()])
    return tasks


def _of_task(file: str, name: str) -> str:
    root, suffix = posixpath.splitext(file)
    return f"{root}_{name}{suffix}"
