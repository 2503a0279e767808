"""Verification of a checkpoint: every byte of it is compared with what was saved."""

import pathlib

from dist_ens.checkpoint.causes import NO_DAMAGE, explained
from dist_ens.checkpoint.host_files import check_host_file, host_files_in
from dist_ens.checkpoint.manifest import MANIFEST, Manifest
from dist_ens.checkpoint.reading import (
    check_arrays,
    damaged_members,
    is_of_first_format,
    open_arrays,
    open_step,
)
from dist_ens.checkpoint.store import is_gone
from dist_ens.checkpoint.writing import STATE
from dist_ens.commands import quoted
from dist_ens.errors import RunError


def faults_of(path: pathlib.Path) -> list[str]:
    """Returns a clause for each member, leaf and file that differs from what was saved.

    A checkpoint of the first format has no digests. The checksums that it has are compared. A
    folder that was added and has no file is passed over.

    Args:
        path: Folder of the checkpoint, which is named after its step.

    Returns:
        The faults; empty if the checkpoint is sound.

    Raises:
        RunError: If a newer version has written the checkpoint, or a run has replaced it meanwhile.
            Also if all that was read is sound, and the rest cannot be read for a reason that is no
            damage, such as a missing permission.
    """
    found = _Findings()
    try:
        if is_of_first_format(path):
            _find_in_old(path, found)
        else:
            manifest = Manifest.read(path)
            _find_in_leaves(path, manifest, found)
            _find_in_files(path, manifest, found)
    except RunError:
        raise
    except FileNotFoundError:
        found.faults.append(f"it has no {MANIFEST}")
    except Exception as error:  # A damaged file raises many kinds.
        found.add_error("", error)
    if (found.faults or found.unread) and is_gone(path):
        raise RunError(
            f"The checkpoint {quoted(path)} does not exist any more: a run that is training has "
            "replaced it. Verify the steps that are saved now."
        )
    if found.unread and not found.faults:
        raise RunError(
            f"The checkpoint {quoted(path)} cannot be verified: {found.unread[0]}. Remove the "
            "cause, then run the same command again."
        )
    return found.faults + found.unread


class _Findings:
    """The findings of a verification.

    Attributes:
        faults: Clauses on what differs from what was saved.
        unread: Clauses on what cannot be read for a reason that is no damage.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.unread: list[str] = []

    def add_error(self, what: str, error: Exception) -> None:
        """Adds an error of reading.

        Args:
            what: Start of the clause, such as `the file a cannot be read`; empty for none.
            error: Error of reading.
        """
        why = explained(error)
        clauses = self.unread if why.code in NO_DAMAGE else self.faults
        clauses.append(f"{what}: {why.what}" if what else why.what)


def _find_in_leaves(path: pathlib.Path, manifest: Manifest, found: _Findings) -> None:
    """Compares each leaf of each member, in the order of the leaves."""
    try:
        opened = open_arrays(path / STATE)
        check_arrays(opened, manifest)
    except Exception as error:  # TensorStore has no special error type for damage.
        found.add_error("the arrays cannot be opened", error)
        return
    for name, array in sorted(opened.items()):
        try:
            damaged = damaged_members(array, name, manifest, range(array.shape[0]))
        except Exception as error:
            found.add_error(f"leaf {name} cannot be read", error)
        else:
            found.faults += [f"leaf {name} of member {each} has changed" for each in damaged]


def _find_in_files(path: pathlib.Path, manifest: Manifest, found: _Findings) -> None:
    """Compares each file."""
    found.faults += manifest.linked_folders(path)
    for name in sorted(manifest.files):
        try:
            fault = manifest.fault_of_file(path, name, hashes_data=True)
        except OSError as error:
            found.add_error(f"the file {name} cannot be read", error)
        else:
            found.faults += [] if fault is None else [fault]
    added = manifest.added_files(path)
    found.faults += [f"the file {name} does not belong to it" for name in added]


def _find_in_old(path: pathlib.Path, found: _Findings) -> None:
    """Compares the checksums of a checkpoint of the first format: record, arrays and host files."""
    try:
        open_step(path)
    except Exception as error:
        found.add_error("", error)
    try:
        opened = open_arrays(path / STATE)
    except Exception as error:  # TensorStore has no special error type for damage.
        found.add_error("the arrays cannot be opened", error)
        opened = {}
    for name, array in sorted(opened.items()):
        try:
            array.read().result()
        except Exception as error:
            found.add_error(f"leaf {name} cannot be read", error)
    for file in host_files_in(path):
        try:
            check_host_file(path / file)
        except ValueError:
            found.faults.append(f"the file {file} does not match its checksum")
        except OSError as error:
            found.add_error(f"the file {file} cannot be read", error)
