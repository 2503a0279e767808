"""Files that each hold one network: its arrays by name, as safetensors, NumPy or Orbax store them.

A name has the keys of the nested dicts, joined by dots, such as `Dense_0.kernel`. Parameters have
no further prefix, and neither has other state of the network, such as
`batch_stats.BatchNorm_0.mean`.
"""

import contextlib
import glob
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
import safetensors
import safetensors.numpy

from dist_ens.checkpoint import Lineage
from dist_ens.checkpoint.arrays import SavedArray, open_arrays
from dist_ens.checkpoint.leaves import named_leaves
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import RunError, UserError, code_of_write, counted, first_line
from dist_ens.ground.file_reading import require_readable
from dist_ens.ground.file_writing import replace_file
from dist_ens.ground.paths import given_path, shortened
from dist_ens.ground.types import ModelState, Params, PyTree
from dist_ens.storage import Disk

SUFFIXES = (".safetensors", ".npz")
_ROOTS = ("params", "model_state")  # Fields of a state that belong to the network.
# Files by which a folder is known as a checkpoint of Orbax.
_OF_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA")
_MOST_NAMED = 5
NetworkArray = np.ndarray | SavedArray


def write_network(
    path: pathlib.Path, leaves: Mapping[str, np.ndarray], lineage: Lineage, step: int
) -> None:
    """Writes the network of one member as a safetensors file, whose metadata have its lineage."""
    of_network = [name for name in leaves if name.partition(".")[0] in _ROOTS]
    if not of_network:
        raise UserError("The checkpoint has no parameters of networks. Read it by Checkpoints.")
    arrays = {
        _name_of(name): np.ascontiguousarray(leaves[name]).reshape(leaves[name].shape)
        for name in of_network
    }
    metadata = {
        "format": "dist_ens",
        "step": str(step),
        "member_id": str(lineage.member_id),
        "lineage": json.dumps(lineage.to_dict()),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, safetensors.numpy.save(arrays, metadata))
    except Exception as error:  # The Rust part of safetensors raises classes of its own.
        raise RunError(
            f"{quoted(path)} could not be written: {first_line(error)}",
            exit_code=code_of_write(error),
        ) from error


def network_paths(given: Sequence[str]) -> list[pathlib.Path]:
    """Returns the paths of networks, in the order of their members."""
    found: list[pathlib.Path] = []
    for text in given:
        path = given_path(text, "FILE")
        if path.is_dir() and not _is_orbax(path):
            inside = [each for each in path.iterdir() if each.suffix in SUFFIXES or _is_orbax(each)]
        elif path.exists():
            inside = [path]
        else:
            inside = [pathlib.Path(each) for each in glob.glob(str(path))]
        if not inside:
            raise UserError(
                f"There is no network in {shortened(text)}. Give files ({', '.join(SUFFIXES)})."
            )
        found += sorted(inside, key=_in_order)
    return found


def read_network(path: pathlib.Path) -> dict[str, NetworkArray]:
    """Returns the arrays of a network by name."""
    with _errors_are_reported(path):
        require_readable(path)
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: np.asarray(arrays[name]) for name in arrays}
        if path.is_dir():
            return {
                name: SavedArray(name, array) if array.shape else np.asarray(array)
                for name, array in open_arrays(Disk(path), is_foreign=True).items()
            }
        return dict(safetensors.numpy.load_file(path))


def parts_from(
    arrays: Mapping[str, NetworkArray], like: tuple[PyTree, PyTree], path: pathlib.Path
) -> tuple[Params, ModelState]:
    """Returns the parameters and the model state of a network from its arrays."""
    params, model_state = (
        {name or root: leaf for name, leaf in named_leaves(part).items()}
        for root, part in zip(_ROOTS, like, strict=True)
    )
    expected = {**model_state, **params}
    if len(expected) < len(params) + len(model_state):
        raise UserError("Two arrays of the network have the same name. Rename one of them.")
    arrays = _with_names(arrays, expected)
    here, there = (
        {name: f"{array.dtype}{list(array.shape)}" for name, array in each.items()}
        for each in (expected, arrays)
    )
    wrong = [
        f"{name} is {there.get(name, 'absent')} there and {here.get(name, 'absent')} in the network"
        for name in sorted({**here, **there})
        if here.get(name) != there.get(name)
    ]
    if wrong:
        raise UserError(
            f"{quoted(path)} does not fit the network of the config in "
            f"{counted(len(wrong), 'array')}: {'; '.join(wrong[:_MOST_NAMED])}."
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
    arrays: Mapping[str, NetworkArray], expected: Mapping[str, object]
) -> Mapping[str, NetworkArray]:
    """Returns arrays by the names of a network, as far as their own names can be read so."""
    dotted = {name.replace("/", "."): array for name, array in arrays.items()}
    readings = [
        {name.removeprefix(prefix): array for name, array in each.items()}
        for each in (arrays, dotted)
        for prefix in ("", "params.")
    ]
    fitting = [
        each for each in readings if each.keys() == expected.keys() and len(each) == len(arrays)
    ]
    return fitting[0] if fitting else readings[-1]


def _is_orbax(path: pathlib.Path) -> bool:
    """Returns whether a path is that of a checkpoint of Orbax."""
    return path.is_dir() and any((path / name).exists() for name in _OF_ORBAX)


def _in_order(path: pathlib.Path) -> list[tuple[int, str]]:
    """Returns a key by which net_2 comes before net_10."""
    parts = re.split(r"(\d+)", os.fspath(path))
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
