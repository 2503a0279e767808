"""Verification of a checkpoint: every byte of it is compared with what was saved."""

import pathlib

from dist_ens.checkpoint.causes import explained
from dist_ens.checkpoint.manifest import MANIFEST, Manifest
from dist_ens.checkpoint.reading import check_arrays, damaged_members, open_arrays, open_step
from dist_ens.checkpoint.writing import STATE
from dist_ens.errors import RunError


def faults_of(path: pathlib.Path) -> list[str]:
    """Returns a clause for each member, leaf and file that differs from what was saved.

    A checkpoint of the first format has no digests. The checksums that it has are compared.

    Args:
        path: Folder of the checkpoint, which is named after its step.

    Returns:
        The faults; empty if the checkpoint is sound.

    Raises:
        RunError: If a newer version has written the checkpoint.
    """
    if not (path / MANIFEST).exists():
        return _faults_of_old(path)
    try:
        manifest = Manifest.read(path)
    except RunError:
        raise
    except Exception as error:  # A damaged file raises many kinds.
        return [explained(error).what]
    return [
        *_faults_of_leaves(path, manifest),
        *manifest.changed_files(path, hashes_data=True),
        *(f"the file {name} does not belong to it" for name in manifest.added_files(path)),
    ]


def _faults_of_leaves(path: pathlib.Path, manifest: Manifest) -> list[str]:
    """Returns a clause for each leaf of a member that differs, in the order of the leaves."""
    try:
        opened = open_arrays(path / STATE)
        check_arrays(opened, manifest)
    except Exception as error:  # TensorStore has no special error type for damage.
        return [f"the arrays cannot be opened: {explained(error).what}"]
    return [
        f"leaf {name} of member {member_id} has changed"
        for name, array in sorted(opened.items())
        for member_id in damaged_members(array, name, manifest, range(array.shape[0]))
    ]


def _faults_of_old(path: pathlib.Path) -> list[str]:
    """Returns the first fault of a checkpoint of the first format, in a list."""
    try:
        for array in open_step(path).open_arrays().values():
            array.read().result()
    except Exception as error:  # TensorStore has no special error type for damage.
        return [explained(error).what]
    return []
