"""Verification of a checkpoint: every byte of it is compared with what was saved."""

import pathlib
from collections.abc import Iterator

from dist_ens.checkpoint.causes import NO_DAMAGE, explained
from dist_ens.checkpoint.manifest import MANIFEST, Manifest, files_in
from dist_ens.checkpoint.reading import is_gone, open_saved
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import RunError


def faults_of(path: pathlib.Path) -> list[str]:
    """Returns a clause for each member, leaf and file that differs from what was saved.

    A `RunError` says that a newer version wrote it, or that it cannot be read for now.
    """
    faults: list[str] = []
    try:
        manifest = Manifest.read(path)
        there = {*files_in(path)} - {MANIFEST}
        faults += _of_leaves(path, manifest)
        faults += _of_files(path, manifest, there)
        faults += [
            f"the file {name} does not belong to it"
            for name in sorted(there - manifest.files.keys())
        ]
    except RunError:
        raise
    except Exception as error:  # A damaged file raises many kinds.
        faults.append(_fault(error))
    if faults and is_gone(path):
        raise RunError(
            f"The checkpoint {quoted(path)} does not exist any more: a run that is training has "
            "replaced it. Verify the steps that are saved now."
        )
    return faults


def _of_leaves(path: pathlib.Path, manifest: Manifest) -> Iterator[str]:
    """Compares each leaf of each member, in the order of the leaves."""
    try:
        for name, array in sorted(open_saved(path, manifest).items()):
            for member_id in array.damaged_members():
                yield f"leaf {name} of member {member_id} has changed"
    except Exception as error:  # TensorStore has no special error type for damage.
        yield f"the arrays cannot be read: {_fault(error)}"


def _of_files(path: pathlib.Path, manifest: Manifest, there: set[str]) -> Iterator[str]:
    """Compares each file."""
    for name in sorted(manifest.files):
        try:
            fault = manifest.fault_of_file(path, name, there, hashes_data=True)
        except OSError as error:
            fault = f"the file {name} cannot be read: {_fault(error)}"
        if fault is not None:
            yield fault


def _fault(error: Exception) -> str:
    """Returns an error of reading as a clause, unless it says nothing about the content."""
    why = explained(error)
    if why.code in NO_DAMAGE:
        raise RunError(
            f"The checkpoint cannot be verified: {why.what}. {why.remedy}, then run the same "
            "command again."
        ) from error
    return why.what
