"""A file imports only from floors below its own."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FLOORS = {
    "launch": 5,
    "dist_ens.train": 4,
    "dist_ens.bench": 4,
    "dist_ens.assess": 4,
    "dist_ens.workdir": 3.75,
    "dist_ens.run": 3.5,
    "dist_ens.plan": 3.5,
    "dist_ens.evaluate": 3,
    "dist_ens.feed": 3,
    "dist_ens.fingerprint": 3,
    "dist_ens.ensemble": 2,
    "dist_ens.data": 2,
    "dist_ens.checkpoint": 2,
    "dist_ens.conformal": 2,
    "dist_ens.report": 2,
    "dist_ens.models": 2,
    "dist_ens.layout": 1,
    "dist_ens.cluster": 1,
    "dist_ens.cache": 1,
    "dist_ens.member": 1,
    "dist_ens.losses": 1,
    "dist_ens.methods": 1.5,
    "dist_ens.turns": 1.5,
    "dist_ens.optimizers": 1,
    "dist_ens.metrics": 1,
    "dist_ens.config": 0,
    "dist_ens.array_files": 0,
    "dist_ens.execution": -1,
    "dist_ens.randomness": -1,
    "dist_ens.narrowing": -1,
    "dist_ens.paths": -1,
    "dist_ens.commands": -2,
    "dist_ens.json_text": -2,
    "dist_ens.errors": -2,
    "dist_ens": -3,
}
_WRITE_THE_WORDS = {"detection.py", "curves.py", "assess.py", "page.py", "sections.py", "uci.py"}
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
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            found |= {f"{base}.{a.name}" if base == "dist_ens" else base for a in node.names}
    return found


@pytest.mark.quick
@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_a_file_imports_only_from_floors_below_its_own(path):
    here = room(module_of(path))
    assert here in FLOORS, f"{here} stands on no floor: say which in this test"
    for module in imports_of(path):
        if module.split(".")[0] in ("dist_ens", "launch") and room(module) != here:
            assert FLOORS[room(module)] < FLOORS[here], f"{path} imports {module}"


@pytest.mark.quick
def test_the_ground_floor_imports_no_jax():
    ground = [*ROOT.glob("dist_ens/config/*.py"), *ROOT.glob("dist_ens/e[rx]*.py")]
    ground.append(ROOT / "dist_ens/paths.py")
    assert len(ground) == 8
    for path in ground:
        imported = imports_of(path)
        assert not [m for m in imported if m.split(".")[0] in ("jax", "jaxlib", "flax", "optax")]


@pytest.mark.quick
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
        if path.name not in _WRITE_THE_WORDS:
            assert not {"ensemble", "data"} & {s for s in strings if isinstance(s, str)}, path
