"""Annotations say what an argument is, by a class or a name of `dist_ens.ground.types`."""

import ast
import pathlib

import pytest

import dist_ens.ground.types

pytestmark = pytest.mark.quick

ROOT = pathlib.Path(__file__).parent.parent
FILES = sorted([*ROOT.glob("dist_ens/**/*.py"), *ROOT.glob("launch/*.py")])
# Lower this number when fewer are left.
MOST = 60


@pytest.mark.slow
def test_any_stands_only_where_a_value_may_be_anything():
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "Any"
    ]
    assert len(found) <= MOST, (
        f"Any stands {len(found)} times in dist_ens and launch, and at most {MOST} are allowed. "
        "Use a class, a type variable, `object` for a value that is only checked, or a name of "
        f"dist_ens/ground/types.py. They are in {', '.join(found)}"
    )


def test_every_name_is_explained_in_the_line_below():
    body = ast.parse((ROOT / "dist_ens/ground/types.py").read_text()).body
    names = [number for number, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
    assert len(names) > 20
    for number in names:
        below = body[number + 1]
        name = ast.unparse(body[number].target)
        assert hasattr(dist_ens.ground.types, name)
        is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        assert is_text, f"{name} has no docstring"
