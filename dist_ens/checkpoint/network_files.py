"""Files that hold one network: safetensors, NPZ, and the folder of an Orbax checkpoint."""

import contextlib
import dataclasses
import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
import safetensors
import safetensors.numpy

from dist_ens.checkpoint.arrays import SavedArray, open_arrays
from dist_ens.checkpoint.leaves import named_leaves
from dist_ens.checkpoint.run_digests import write_run_file
from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import UserError, counted, first_line
from dist_ens.ground.file_reading import require_readable
from dist_ens.ground.paths import given_path
from dist_ens.ground.shared import Shared
from dist_ens.ground.types import ModelState, Params, PyTree
from dist_ens.layout import to_host
from dist_ens.processes import cluster
from dist_ens.storage import Disk, Place

SUFFIXES = (".safetensors", ".npz")
BASE = "shared"  # Key of the metadata of a member's file: the digest of what it shares.
SHARED = "shared.safetensors"  # File of a run with the arrays that its members share.
ROOTS = ("params", "model_state")  # Fields of a state that belong to the network.
# Files by which a folder is known as a checkpoint of Orbax.
_OF_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA")
_MOST_NAMED = 5
NetworkArray = np.ndarray | SavedArray


@dataclasses.dataclass(frozen=True)
class FromFile:
    """The arrays of a file, and its path; see `from_file`."""

    arrays: PyTree
    path: str


def from_file(
    path: str | os.PathLike[str],
    *,
    names: Mapping[str, str] | Callable[[str], str | None] | None = None,
    like: PyTree = None,
) -> FromFile:
    """Returns the arrays of a file, for the argument `shared` of an `Ensemble`.

    A run records the path of the file and the digest of its arrays, and does not save them again.

    Args:
        path: Path of a safetensors or NPZ file, or of the folder of an Orbax checkpoint.
        names: Names that the arrays are to have: a dict from names in the file, or a function of
            such a name. An array without a new name, or with the new name None, is left out.
            Default: the names in the file.
        like: Pytree of arrays or shapes, whose structure the result takes. Its leaves have the
            names of the arrays, their keys joined by dots. It may also be a pair of parameters and
            model state, as `init` of a member returns it. Default: dicts, nested as the dots or
            slashes of the names say. A dict of all numbers from 0 on becomes a list.

    Returns:
        The arrays, as `arrays`, and the path.

    Raises:
        UserError: If the file cannot be read, or its arrays do not fit `like`.

    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/base.npz"
    >>> np.savez(path, **{"dense.weight": np.ones((2, 3), np.float32)})
    >>> base = from_file(path, names=lambda name: name.replace("weight", "kernel"))
    >>> base.arrays["dense"]["kernel"].shape
    (2, 3)
    """
    file = given_path(os.fspath(path), "path")
    arrays = read_network(file)
    if names is not None:
        renamed = names if callable(names) else names.get
        new = {name: renamed(name) for name in arrays}
        _require_different([name for name in new.values() if name is not None])
        arrays = {name: arrays[old] for old, name in new.items() if name is not None}
        if not arrays:
            raise UserError(
                f"names has none of the names in {quoted(file)}, such as "
                f"{', '.join([*new][:_MOST_NAMED])}. Give a dict from these to new names."
            )
    if like is not None:
        # A module of equinox has leaves that are no arrays.
        like = jax.tree.map(lambda leaf: leaf if hasattr(leaf, "dtype") else None, like)
        is_pair = isinstance(like, tuple) and len(like) == 2
        made = parts_from(arrays, like if is_pair else (like, ()), file)
        return FromFile(made if is_pair else made[0], str(file.resolve()))
    with _errors_are_reported(file):
        read = {name: _read(array) for name, array in arrays.items()}
    return FromFile(_nested(read), str(file.resolve()))


def base_digest_in(path: pathlib.Path) -> str | None:
    """Returns the digest of the arrays that the member in a file shares; None if not known."""
    if path.suffix != ".safetensors":
        return None
    with _errors_are_reported(path), safetensors.safe_open(path, "numpy") as file:
        return (file.metadata() or {}).get(BASE)


def keep_shared(run: Place, shared: Shared, *, is_saved: bool) -> None:
    """Writes the shared arrays of a run into its folder, once, unless they are from a file.

    `is_saved` says that the run has saved members on the same arrays. Every host must call this.
    """
    is_there = is_saved and cluster.as_main_sees(SHARED in run.names())
    if shared.is_empty or shared.path or is_there:
        return
    on_host = _on_host(shared)
    # Parameters and model state have the names that they have in other files of a network.
    parts = on_host[::-1] if type(on_host) is tuple and len(on_host) == 2 else (on_host,)
    named = [named_leaves(part) for part in parts]
    if len({name for part in named for name in part}) < sum(map(len, named)):
        named = [named_leaves(on_host)]
    leaves = {name: np.asarray(leaf) for part in named for name, leaf in part.items()}
    # NumPy makes an axis for a single number.
    arrays = {n: np.ascontiguousarray(leaf).reshape(leaf.shape) for n, leaf in leaves.items()}
    if cluster.is_main():
        write_run_file(run, SHARED, safetensors.numpy.save(arrays))


def copy_shared(run: Place, to: Place) -> None:
    """Copies the shared arrays of a run, if its folder holds any, into the folder of another."""
    if SHARED in run.names():
        write_run_file(to, SHARED, run.read(SHARED))


def digest_of(shared: Shared) -> str:
    """Returns the SHA-256 of the names, types, shapes and bytes of shared arrays, as hex digits."""
    digest = hashlib.sha256()
    for name, leaf in named_leaves(_on_host(shared)).items():
        array = np.asarray(leaf)
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _on_host(shared: Shared) -> PyTree:
    with jax.transfer_guard("allow"):
        return to_host(shared.arrays)


def _nested(arrays: Mapping[str, np.ndarray]) -> PyTree:
    """Returns arrays in dicts and lists, nested as the dots or slashes of their names say."""
    found: dict[str, PyTree] = {}
    dotted = [name.replace("/", ".") for name in arrays]
    inner = {name.rpartition(".")[0] for name in dotted}
    _require_different([*dotted, *(name for name in dotted if name in inner)])
    for name, array in arrays.items():
        *keys, last = name.replace("/", ".").split(".")
        inside = found
        for key in keys:
            inside = inside.setdefault(key, {})
        inside[last] = array

    def with_lists(tree: PyTree) -> PyTree:
        if not isinstance(tree, dict):
            return tree
        made = {key: with_lists(value) for key, value in tree.items()}
        if {*made} == {*map(str, range(len(made)))}:
            return [made[str(number)] for number in range(len(made))]
        return made

    return with_lists(found)


def _require_different(names: Sequence[str]) -> None:
    if len({*names}) < len(names):
        twice = max(names, key=names.count)
        raise UserError(f"Two arrays would be called {twice!r}. Give other names, by names=.")


def _read(array: NetworkArray) -> np.ndarray:
    return array.read_whole() if isinstance(array, SavedArray) else array


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
        for root, part in zip(ROOTS, like, strict=True)
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
            f"{quoted(path)} does not fit the network in "
            f"{counted(len(wrong), 'array')}: {'; '.join(wrong[:_MOST_NAMED])}."
        )
    with _errors_are_reported(path):
        read = {name: _read(array) for name, array in arrays.items()}
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


def _with_names(
    arrays: Mapping[str, NetworkArray], expected: Mapping[str, object]
) -> Mapping[str, NetworkArray]:
    """Returns arrays by the names of a network, as far as their own names can be read so."""
    dotted = {name.replace("/", "."): array for name, array in arrays.items()}
    # Names of Haiku have slashes of their own.
    own = {name.replace("/", "."): name for name in expected}
    if dotted.keys() == own.keys() and len(own) == len(expected) == len(arrays):
        return {own[name]: array for name, array in dotted.items()}
    readings = [
        {name.removeprefix(prefix): array for name, array in each.items()}
        for each in (arrays, dotted)
        for prefix in ("", "params.")
    ]
    fitting = [
        each for each in readings if each.keys() == expected.keys() and len(each) == len(arrays)
    ]
    return fitting[0] if fitting else readings[-1]


def is_orbax(path: pathlib.Path) -> bool:
    """Returns whether a path is that of a checkpoint of Orbax."""
    return path.is_dir() and any((path / name).exists() for name in _OF_ORBAX)
