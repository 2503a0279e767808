"""Archives of NumPy arrays, opened with what is wrong told in a sentence."""

import contextlib
import pathlib
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dist_ens.errors import UserError


@contextlib.contextmanager
def opened_npz(path: pathlib.Path, keys: Sequence[str]) -> Iterator[Any]:
    """An `.npz` file that holds some arrays, open for the time of a block.

    Args:
        path: Of the file.
        keys: Names of the arrays.

    Yields:
        NumPy's archive: an array is read when it is asked for.

    Raises:
        UserError: For a file that cannot be read, then or inside the block, or lacks one of them.
    """
    try:
        # NumPy takes what is no archive for a pickle, and says how to load that.
        if path.is_file() and not zipfile.is_zipfile(path):
            raise ValueError("it is no archive of arrays")
        with np.load(path, allow_pickle=False) as archive:
            missing = [key for key in keys if key not in archive]
            if missing:
                raise UserError(
                    f"A file of this kind holds {', '.join(keys)}. Received: {path} with "
                    f"{', '.join(archive.files)}. Save it again with {', '.join(missing)}."
                )
            yield archive
    except UserError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(
            "An npz file is written by numpy.savez, without pickled objects. Received: "
            f"{path}: {error}. Correct the path, or write the file again."
        ) from error
