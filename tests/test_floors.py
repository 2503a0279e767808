"""A file imports only from floors below its own."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FLOORS = {
    "launch": 11,
    "dist_ens.experiment": 9,
    "dist_ens.plan": 10,
    "dist_ens.training": 8,
    "dist_ens.callbacks": 7,
    "dist_ens.evaluation": 6,
    "dist_ens.feed": 6,
    "dist_ens.report": 5,
    "dist_ens.ensemble": 5,
    "dist_ens.checkpoint": 5,
    "dist_ens.execution": 4,
    "dist_ens.losses": 3,
    "dist_ens.methods": 4,
    "dist_ens.data": 4,
    "dist_ens.models": 4,
    "dist_ens.sampling": 3,
    "dist_ens.members": 3,
    "dist_ens.layout": 2,
    "dist_ens.metrics": 2,
    "dist_ens.cluster": 1,
    "dist_ens.cluster_environment": 0,
    "dist_ens.compile_cache": 1,
    "dist_ens.state": 1,
    "dist_ens.stop_signal": 0,
    "dist_ens.peers": 0,
    "dist_ens.progress": 0,
    "dist_ens.watchdog": 0,
    "dist_ens.randomness": 1,
    "dist_ens.ground": 0,
    "dist_ens.narrowing": -1,  # `host_keys`, which imports JAX, takes it from here.
    "dist_ens.host_keys": 0,
    "dist_ens.file_writing": 0,
    "dist_ens.file_reading": 0,
    "dist_ens.run_digests": 0,
    "dist_ens.data_workers": 0,
    "dist_ens.paths": 0,
    "dist_ens.terminal": 0,
    "dist_ens.commands": 0,
    "dist_ens.json_text": 0,
    "dist_ens.errors": 0,
    "dist_ens.errors": 0,
    "dist_ens.errors": 0,
    "dist_ens.types": 0,
    "dist_ens": -1,
}
# Rooms of the ground floor that may be imported on it: none of them imports JAX.
GROUND = {name for name, floor in FLOORS.items() if floor <= 0} - {
    "dist_ens.types",
    "dist_ens.host_keys",
}
_WRITE_THE_WORDS = {
    "ood.py",
    "curves.py",
    "scores.py",
    "row_scores.py",
    "assess.py",
    "assessment.py",
    "facts.py",
    "uci.py",
}
FILES = sorted([*ROOT.glob("dist_ens/**/*.py"), *ROOT.glob("launch/*.py")])


def room(module: str) -> str:
    """The room a module stands in: launch, dist_ens, or dist_ens.NAME."""
    parts = module.split(".")
    return parts[0] if parts[0] == "launch" else ".".join(parts[:2])


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: pathlib.Path) -> set[str]:
    found = set()
    tree = ast.parse(path.read_text())
    for_types = {
        inside
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inside in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            found |= {f"{base}.{a.name}" if base == "dist_ens" else base for a in node.names}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_file_imports_only_from_floors_below_its_own(path):
    here = room(module_of(path))
    assert here in FLOORS, f"{here} stands on no floor: say which in this test"
    for module in imports_of(path):
        if module.split(".")[0] in ("dist_ens", "launch") and room(module) != here:
            below = FLOORS[room(module)] < FLOORS[here] or {here, room(module)} <= GROUND
            assert below, f"{path} imports {module}"


@pytest.mark.quick
def test_the_ground_floor_imports_no_jax():
    ground = [*ROOT.glob("dist_ens/ground/*.py"), ROOT / "dist_ens/errors.py"]
    ground += [ROOT / f"dist_ens/{name}.py" for name in ("paths", "cluster_environment")]
    for path in ground:
        imported = imports_of(path)
        assert not [m for m in imported if m.split(".")[0] in ("jax", "jaxlib", "flax", "optax")]


@pytest.mark.slow
def test_only_the_layout_names_the_axes_and_places_arrays():
    for path in FILES:
        if room(module_of(path)) == "dist_ens.layout":
            continue
        tree = ast.parse(path.read_text())
        names = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        attributes = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        assert not {"PartitionSpec", "NamedSharding", "device_put"} & (names | attributes), path
        # Of the last the files have an array of this name, of the others JSON has this key.
        # The package has a public module `data`.
        if path.name not in _WRITE_THE_WORDS and path != ROOT / "dist_ens/__init__.py":
            assert not {"ensemble", "data"} & {s for s in strings if isinstance(s, str)}, path
