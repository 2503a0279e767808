"""Files that each hold one network: its arrays by name, as safetensors, NumPy or Orbax store them.

A name has the keys of the nested dicts, joined by dots, such as `Dense_0.kernel`. Parameters have
no further prefix, and neither has other state of the network, such as
`batch_stats.BatchNorm_0.mean`.
"""

import collections
import contextlib
import glob
import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
import safetensors
import safetensors.numpy

from dist_ens.array_files import names_in_npz, opened_npz
from dist_ens.checkpoint import Lineage
from dist_ens.checkpoint.leaves import named_leaves
from dist_ens.checkpoint.reading import SavedArray, open_arrays
from dist_ens.commands import quoted
from dist_ens.errors import RunError, UserError, code_of_write, counted, first_line
from dist_ens.file_reading import require_readable
from dist_ens.file_writing import replaced_file
from dist_ens.json_text import Json
from dist_ens.paths import given_path, shortened
from dist_ens.types import ModelState, Params, PyTree

SUFFIXES = (".safetensors", ".npz")
_ROOTS = ("params", "model_state")  # Fields of a state that belong to the network.
_PARAMS = "params."
# Files by which a folder is known as a checkpoint of Orbax.
_OF_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA")
_MOST_NAMED = 5
NetworkArray = np.ndarray | SavedArray


def write_network(
    path: pathlib.Path, leaves: Mapping[str, np.ndarray], lineage: Lineage, step: int
) -> None:
    """Writes the network of one member as a safetensors file.

    Args:
        path: Path of the file, which is replaced as a whole.
        leaves: Leaves of the member's state by name. Only the parameters and the other state of the
            network are written.
        lineage: Lineage of the member, which stands in the metadata of the file.
        step: Number of updates that the member has seen.

    Raises:
        UserError: If safetensors has no such type, or two arrays have the same name. Also if there
            are no parameters, as in a checkpoint of a user's own loop.
        RunError: If the system cannot write the file.
    """
    named = [
        (_name_of(name), np.ascontiguousarray(leaf).reshape(leaf.shape))
        for name, leaf in leaves.items()
        if name.partition(".")[0] in _ROOTS
    ]
    if not named:
        raise UserError(
            "The checkpoint has no parameters of networks: a loop of your own saved it. Read it "
            "with Checkpoints(folder).restore(layout, like)."
        )
    _require_different(name for name, _ in named)
    arrays = dict(named)
    metadata = {
        "format": "dist_ens",
        "step": str(step),
        "member_id": str(lineage.member_id),
        "lineage": json.dumps(lineage.to_dict()),
    }
    try:
        content = safetensors.numpy.save(arrays, metadata)
    except Exception as error:  # Its Rust part raises classes of its own.
        raise UserError(
            f"Member {lineage.member_id} cannot be written as safetensors: {first_line(error)} "
            "Read it in Python with dist_ens.load, and write it in another format."
        ) from error
    try:
        with replaced_file(path) as file:
            file.write(content)
    except OSError as error:
        raise RunError(
            f"{quoted(path)} could not be written: {error.strerror}. Remove the cause, and run the "
            "same command again.",
            exit_code=code_of_write(error),
        ) from error


def require_no_other_networks(
    folder: pathlib.Path, lineages: Mapping[pathlib.Path, Lineage]
) -> None:
    """Raises a `UserError` if a folder holds other networks than an older export of some members.

    Args:
        folder: Folder, which need not exist.
        lineages: Lineage of each member that is about to be exported, by the path of its file.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_own = path in lineages and _lineage_in(path) == lineages[path].to_dict()
        if _is_network(path) and not is_own:
            raise UserError(
                f"{quoted(path)} is a network that would be mixed with those to export: it is "
                "none of them, or was exported from another run. Give a new folder, or move it "
                "away."
            )


def network_paths(given: Sequence[str]) -> list[pathlib.Path]:
    """Returns the paths of networks, in the order of their members.

    Args:
        given: Paths of files, folders of files, and patterns such as `nets/*.npz`. The files of a
            folder or a pattern are sorted by their names, with numbers by their values.

    Raises:
        UserError: If no path is given, a path does not exist, or there is no network in it.
    """
    if not given:
        raise UserError(
            "No network to import is given. Give one path for each member, such as nets/a.npz, a "
            "folder of networks, or a pattern."
        )
    found: list[pathlib.Path] = []
    for text in given:
        path = given_path(text, "FILE")
        if path.is_dir() and not _is_orbax(path):
            inside = [each for each in path.iterdir() if _is_network(each)]
        elif path.exists():
            inside = [path]
        else:
            inside = [pathlib.Path(each) for each in glob.glob(str(path))]
        if not inside:
            raise UserError(
                f"There is no network in {shortened(text)}. Give files ({', '.join(SUFFIXES)}), "
                "checkpoints of Orbax, a folder of them, or a pattern."
            )
        found += sorted(inside, key=_in_order)
    return found


def read_network(path: pathlib.Path) -> dict[str, NetworkArray]:
    """Returns the arrays of a network by name.

    Args:
        path: A safetensors file, an NPZ file, or the folder of an Orbax checkpoint. Nothing in it
            is run.

    Returns:
        The arrays. Those of Orbax are not read yet, as a few bytes of it may declare arrays that no
        memory can hold.

    Raises:
        UserError: If it cannot be read.
    """
    arrays: Mapping[str, NetworkArray]
    with _errors_are_reported(path):
        require_readable(path)
        if path.suffix == ".npz":
            names = names_in_npz(path, "network")
            with opened_npz(path, names, "network") as stored:
                arrays = dict(zip(names, (array.read() for array in stored), strict=True))
        elif path.is_dir():
            opened = open_arrays(path.resolve(), is_foreign=True)
            arrays = {
                name: SavedArray(name, array, array.dtype.numpy_dtype, None)
                if array.shape
                else np.asarray(array)
                for name, array in opened.items()
            }
        else:
            arrays = safetensors.numpy.load_file(path)
    return dict(arrays)


def parts_from(
    arrays: Mapping[str, NetworkArray], like: tuple[PyTree, PyTree], path: pathlib.Path
) -> tuple[Params, ModelState]:
    """Returns the parameters and the model state of a network from its arrays.

    Args:
        arrays: Arrays by name; see `read_network`. If they are not the names that `write_network`
            writes, a slash in them stands for a dot, and they may have the prefix `params.`.
        like: Parameters and model state of one member, arrays or shapes and types.
        path: Path that the arrays come from, for the message.

    Raises:
        UserError: If a name is missing or unknown, or an array has another type or shape, or
            cannot be read. Also if two arrays of the network have the same name.
    """
    params, model_state = (
        {name or root: leaf for name, leaf in named_leaves(part).items()}
        for root, part in zip(_ROOTS, like, strict=True)
    )
    _require_different([*params, *model_state])
    expected = {**model_state, **params}
    arrays = _with_names(arrays, expected)
    here = {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in expected.items()}
    there = {name: f"{array.dtype}{list(array.shape)}" for name, array in arrays.items()}
    wrong = [name for name in sorted({**here, **there}) if here.get(name) != there.get(name)]
    if wrong:
        named = "; ".join(
            f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} in the "
            "network"
            for name in wrong[:_MOST_NAMED]
        )
        raise UserError(
            f"{quoted(path)} does not fit the network of the config: {named}"
            f"{f', and {len(wrong) - _MOST_NAMED} more' if len(wrong) > _MOST_NAMED else ''}. Give "
            f"{counted(len(here), 'array')} with the names and shapes of the network."
        )
    with _errors_are_reported(path):
        read = {
            name: array.read_whole() if isinstance(array, SavedArray) else array
            for name, array in arrays.items()
        }
    made = [
        jax.tree.unflatten(jax.tree.structure(part), [read[name] for name in names])
        for part, names in zip(like, (params, model_state), strict=True)
    ]
    return made[0], made[1]


@contextlib.contextmanager
def _errors_are_reported(path: pathlib.Path) -> Iterator[None]:
    """Raises an error of reading a network as a `UserError`."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # Each of the libraries raises classes of its own.
        raise UserError(
            f"The network {quoted(path)} cannot be read: {first_line(error)} Give a safetensors or "
            "NPZ file, or the folder of an Orbax checkpoint."
        ) from error


def _name_of(leaf: str) -> str:
    """Returns the name of a leaf of a state in a file of one network."""
    root, _, name = leaf.partition(".")
    return name or root


def _with_names(
    arrays: Mapping[str, NetworkArray], expected: Collection[str]
) -> Mapping[str, NetworkArray]:
    """Returns arrays by the names of a network, as far as their own names can be read so.

    Args:
        arrays: Arrays by the names in their file.
        expected: Names of the network. They may have slashes, and the prefix of all parameters.
    """
    readings: list[Callable[[str], str]] = [
        lambda name: name,
        lambda name: name.removeprefix(_PARAMS),
        lambda name: name.replace("/", "."),
        lambda name: name.replace("/", ".").removeprefix(_PARAMS),
    ]
    found: Mapping[str, NetworkArray] = arrays
    for reading in readings:
        found = {reading(name): array for name, array in arrays.items()}
        if found.keys() == {*expected} and len(found) == len(arrays):
            break
    return found


def _require_different(names: Iterable[str]) -> None:
    """Raises a `UserError` if two arrays of a network have the same name."""
    repeated = [name for name, count in collections.Counter(names).items() if count > 1]
    if repeated:
        raise UserError(
            f"Two arrays of the network have the name {shortened(repeated[0])}, one in its "
            "parameters and one in its other state. Rename one of them in the network."
        )


def _lineage_in(path: pathlib.Path) -> Json:
    """Returns the lineage in the metadata of a network; None if it has none."""
    try:
        require_readable(path)
        with safetensors.safe_open(path, "np") as file:
            return json.loads(file.metadata()["lineage"])
    except Exception:  # Whoever has written the file may have written anything.
        return None


def _is_orbax(path: pathlib.Path) -> bool:
    """Returns whether a folder is a checkpoint of Orbax."""
    return any((path / name).exists() for name in _OF_ORBAX)


def _is_network(path: pathlib.Path) -> bool:
    """Returns whether an entry of a folder is a network."""
    return path.suffix in SUFFIXES or (path.is_dir() and _is_orbax(path))


def _in_order(path: pathlib.Path) -> list[tuple[int, str]]:
    """Returns a key by which net_2 comes before net_10."""
    parts = re.split(r"(\d+)", os.fspath(path))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
