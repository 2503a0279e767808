"""A file imports only from floors below its own, and annotates what an argument is."""

import ast
import functools
import pathlib

import pytest

from dist_ens.ground import types

ROOT = pathlib.Path(__file__).parent.parent
# From the top to the ground.
FLOORS = [
    {"launch"},
    {"dist_ens.plan"},
    {"dist_ens.experiment", "dist_ens.sklearn"},
    {"dist_ens.training"},
    {"dist_ens.callbacks"},
    {"dist_ens.evaluation"},
    {"dist_ens.data"},
    {"dist_ens.ensemble", "dist_ens.report"},
    {"dist_ens.checkpoint", "dist_ens.execution", "dist_ens.methods", "dist_ens.models"},
    {"dist_ens.layout", "dist_ens.losses", "dist_ens.members"},
    {"dist_ens.metrics", "dist_ens.processes", "dist_ens.sampling", "dist_ens.storage"},
    {"dist_ens.ground", "dist_ens"},
]
HEIGHT = {name: -depth for depth, names in enumerate(FLOORS) for name in names}
# Of uci.py the files have an array of this name. Of the others JSON has this key.
_WRITE_THE_WORDS = {
    *("ood.py", "curves.py", "scores.py"),
    *("assess.py", "assessment.py", "facts.py", "uci.py"),
}
# Lower this number when fewer are left.
MOST_OF_ANY = 60
FILES = sorted([*ROOT.glob("dist_ens/**/*.py"), *ROOT.glob("launch/*.py")])


def room(module: str) -> str:
    """The room a module stands in: launch, dist_ens, or dist_ens.NAME."""
    parts = module.split(".")
    return parts[0] if parts[0] == "launch" else ".".join(parts[:2])


def module_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def nodes_of(path: pathlib.Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text()))]


def imports_of(path: pathlib.Path) -> set[str]:
    found = set()
    for node in nodes_of(path):
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
    for module in imports_of(path):
        is_own = module.split(".")[0] in ("dist_ens", "launch")
        # The package names what it offers, for type checkers.
        if is_own and here not in ("dist_ens", room(module)):
            assert HEIGHT[room(module)] < HEIGHT[here], f"{path} imports {module}"


@pytest.mark.quick
def test_the_package_is_of_few_rooms():
    entries = {path.name for path in (ROOT / "dist_ens").iterdir()} - {"__pycache__", "py.typed"}
    assert len(entries) <= 22
    assert {f"dist_ens.{name}" for name in entries - {"__init__.py"}} < HEIGHT.keys()
    assert len(FLOORS) <= 12


@pytest.mark.quick
def test_what_a_command_needs_at_once_imports_no_jax():
    for name in ("errors", "commands", "paths", "numbers", "terminal", "json_text"):
        imported = imports_of(ROOT / f"dist_ens/ground/{name}.py")
        assert not {module.split(".")[0] for module in imported} & {"jax", "flax", "optax"}


@pytest.mark.slow
def test_only_the_layout_names_the_axes_and_places_arrays():
    for path in FILES:
        if room(module_of(path)) == "dist_ens.layout":
            continue
        names = {n.id for n in nodes_of(path) if isinstance(n, ast.Name)}
        names |= {n.attr for n in nodes_of(path) if isinstance(n, ast.Attribute)}
        strings = {n.value for n in nodes_of(path) if isinstance(n, ast.Constant)}
        assert not {"PartitionSpec", "NamedSharding", "device_put"} & names, path
        # The package has a public module `data`.
        if path.name not in _WRITE_THE_WORDS and path != ROOT / "dist_ens/__init__.py":
            assert not {"ensemble", "data"} & {s for s in strings if isinstance(s, str)}, path


@pytest.mark.slow
def test_any_stands_only_where_a_value_may_be_anything():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in nodes_of(path)
        if isinstance(node, ast.Name) and node.id == "Any"
    ]
    # Use a class, a type variable, `object` for a value that is only checked, or a name of
    # dist_ens/ground/types.py.
    assert len(found) <= MOST_OF_ANY, found


@pytest.mark.quick
def test_every_name_of_a_type_is_explained_in_the_line_below():
    body = ast.parse((ROOT / "dist_ens/ground/types.py").read_text()).body
    names = [number for number, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
    assert len(names) > 20
    for number in names:
        name, below = ast.unparse(body[number].target), body[number + 1]
        assert hasattr(types, name)
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        assert is_text, f"{name} has no docstring"
