"""Verification of a checkpoint: every byte of it is compared with what was saved."""

from collections.abc import Iterator

from dist_ens.checkpoint.manifest import MANIFEST, MARKS, Manifest
from dist_ens.checkpoint.reading import error_of_reading, open_saved
from dist_ens.ground.causes import explained
from dist_ens.ground.errors import ExitCode, RunError
from dist_ens.storage import Place


def faults_of(checkpoint: Place) -> list[str]:
    """Returns a clause for each member, leaf and file that differs from what was saved.

    A `RunError` says that a newer version wrote it, that it cannot be read for now, or that a run
    has replaced it.
    """
    try:
        manifest = Manifest.read(checkpoint)
        data = manifest.data_in(checkpoint)
        there = {*data.names()} - {MANIFEST, *MARKS}
    except RunError:
        raise
    except Exception as error:  # A damaged file raises many kinds.
        return [_fault(checkpoint, error)]
    others = sorted(there - manifest.files.keys())
    of_others = [f"the file {name} does not belong to it" for name in others]
    return [*_of_leaves(checkpoint, manifest), *_of_files(checkpoint, manifest, there), *of_others]


def _of_leaves(checkpoint: Place, manifest: Manifest) -> Iterator[str]:
    """Compares each leaf of each member, in the order of the leaves."""
    try:
        for name, array in sorted(open_saved(manifest.data_in(checkpoint), manifest).items()):
            for member_id in array.damaged_members():
                yield f"leaf {name} of member {member_id} has changed"
    except Exception as error:  # TensorStore has no special error type for damage.
        yield f"the arrays cannot be read: {_fault(checkpoint, error)}"


def _of_files(checkpoint: Place, manifest: Manifest, there: set[str]) -> Iterator[str]:
    """Compares each file. One that is gone with the whole folder is no fault."""
    data = manifest.data_in(checkpoint)
    for name in sorted(manifest.files):
        try:
            fault = manifest.fault_of_file(data, name, there, hashes_data=True)
        except OSError as error:
            fault = f"the file {name} cannot be read: {_fault(checkpoint, error)}"
        if fault is not None:
            yield fault


def _fault(checkpoint: Place, error: Exception) -> str:
    """Returns an error of reading as a clause, unless it says nothing about the content."""
    told = error_of_reading(checkpoint, error)
    if told.exit_code != ExitCode.DAMAGED:
        raise told from error
    return explained(error).what
