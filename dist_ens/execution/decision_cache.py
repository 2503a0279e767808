"""Cache of chosen executions, kept between runs of the same program."""

import json
import logging
import os
import pathlib

from dist_ens.ground.file_reading import bytes_in
from dist_ens.ground.file_writing import replace_file
from dist_ens.ground.json_text import JsonDict, from_json
from dist_ens.processes.compile_cache import cache_folder

CHOICES = "executions.json"


def kept_execution(program: str, folder: pathlib.Path | None = None) -> str | None:
    """Returns the execution that was chosen before for a program, by its fingerprint, or None."""
    execution = _kept(folder or cache_folder()).get(program)
    return execution if isinstance(execution, str) else None


def keep_execution(program: str, execution: str, folder: pathlib.Path | None = None) -> None:
    """Keeps a choice for the next run of the same program, unless the user has no home folder."""
    folder = folder or cache_folder()
    if folder is None:
        return
    kept = _kept(folder) | {program: execution}
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Several runs may write at the same time, so each writes a file of its process.
        text = json.dumps(kept, indent=1)
        replace_file(folder / CHOICES, text, beside=str(os.getpid()))
    except OSError as error:
        logging.warning(
            "Could not write the chosen execution in %s: %s. The next run will time again.",
            folder,
            error.strerror,
        )


def _kept(folder: pathlib.Path | None) -> JsonDict:
    """Returns the choices in a folder; an empty dict if there are none, or the file is damaged."""
    try:
        kept = from_json(bytes_in(folder / CHOICES)) if folder else {}
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}
