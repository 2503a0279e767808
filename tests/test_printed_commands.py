"""Commands that are printed can be pasted into a shell, whatever the names in them."""

import ast
import os
import re
import subprocess
import sys

import pytest

from conftest import ROOT
from dist_ens.ground.commands import command_line, quoted
from stand_ins import HOSTILE

pytestmark = pytest.mark.quick
FILES = [*ROOT.glob("dist_ens/**/*.py"), *ROOT.glob("launch/*.py")]
NAMES = [
    *(*HOSTILE, "\x1b[31mred", "tab\tand\\backslash'", "new\nline\\'; touch x #", "-x"),
    *("~/x", "!!"),
    *("*", "{a,b}", "naïve", "\u202eright to left", os.fsdecode(b"\xff not text")),
    "\n7",  # an escape of three digits does not take the digit that follows
]
SHOW = f"{sys.executable} -c 'import sys, os; os.write(1, chr(0).join(sys.argv[1:]).encode(errors=\
\"surrogateescape\"))'"
# Values that a person named, and calls that quote them.
NAMED = re.compile("path|file|folder|dir|text|word|argument|input|output")
QUOTING = {"quoted", "shortened"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_a_shell_takes_a_command_apart_as_it_was_meant(tmp_path, name):
    command = command_line(name, workdir=name, config=None, shift=True)
    assert command.isprintable()
    line = f"{SHOW} {command}"
    ended = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, check=True)
    assert os.fsdecode(ended.stdout).split("\0") == [name, f"--workdir={name}", "--shift"]
    assert not list(tmp_path.iterdir())


def test_ordinary_names_are_not_quoted():
    assert quoted("runs/digits_1.2") == "runs/digits_1.2"
    assert command_line("dist-ens", "report", output="r.html") == "dist-ens report --output=r.html"


def unquoted_in(path):
    """Each named value that an f-string of a message puts after `--flag=` or `dist-ens`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.JoinedStr):
            continue
        for before, value in zip(node.values, node.values[1:], strict=False):
            text = before.value if isinstance(before, ast.Constant) else ""
            if not isinstance(value, ast.FormattedValue):
                continue
            source = ast.unparse(value.value)
            is_quoted = source.partition("(")[0] in QUOTING
            after_flag = re.search(r"""(--[\w.]+=["']?|dist-ens( \w+)? )$""", text)
            if after_flag and NAMED.search(source) and not is_quoted:
                yield value.value


@pytest.mark.slow
def test_a_path_in_a_printed_command_is_quoted(tmp_path):
    source = "f'Add --config={a.path}. {b.path} dist-ens {c.path} --x=\"{d.path}\" --y={quoted(e)}'"
    (tmp_path / "x.py").write_text(source)
    assert [*map(ast.unparse, unquoted_in(tmp_path / "x.py"))] == ["a.path", "c.path", "d.path"]
    found = [f"{path}: {ast.unparse(value)}" for path in FILES for value in unquoted_in(path)]
    assert not found
