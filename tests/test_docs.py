"""The documentation names what is there, and what is there stands in the documentation.

Its blocks of Python and shell are run as tests of their own; see `conftest.py`.
"""

import inspect
import pathlib
import re
import xml.etree.ElementTree as ElementTree

import pytest

import commands
import dist_ens
import launch
from dist_ens.experiment import MAY_CHANGE_ON_RESUME, Experiment
from dist_ens.ground.errors import ExitCode
from dist_ens.metrics import CATALOGUE

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {path.relative_to(ROOT): path.read_text() for path in (ROOT / "docs").rglob("*.md")}
DOCS = "\n".join(PAGES.values())

CONFIGS = [f"configs/{path.name}" for path in (ROOT / "configs").glob("*.py")]

pytestmark = pytest.mark.quick

SHELL = re.compile(r"```sh\n(.*?)\n```", re.DOTALL)
SETUP = [
    "python3 -m venv .venv && . .venv/bin/activate && pip install -e . && "
    "dist-ens train --config=configs/digits.py --workdir=runs/digits",
    ".venv/bin/pip install -e '.[test]' && .venv/bin/python -m pytest",
]


def test_readme_is_short_and_has_the_two_commands_of_the_setup():
    assert SHELL.findall(README)[:2] == SETUP
    assert len(README.splitlines()) <= 130
    assert len(README.split()) <= 1000


def test_every_verb_and_every_config_stands_in_the_documentation():
    for words in [f"dist-ens {verb} " for verb in launch.VERBS] + CONFIGS:
        assert words in DOCS, words


def test_the_commands_of_all_pages_can_be_typed_in_one_clone():
    runs = {}
    for page, text in [("README.md", README), *PAGES.items()]:
        lines = "\n".join(SHELL.findall(text)).replace("\\\n", "").splitlines()
        for line in lines + re.findall(r"`(dist-ens .*?)`", text):
            words = line.split()
            if "train" not in words or "…" in line:
                continue
            given = dict(word.split("=", 1) for word in words if word.startswith("--config"))
            workdir = re.search(r"--workdir=(runs/\S+)", line)
            run = {
                name: value
                for name, value in given.items()
                if not name.removeprefix("--config.").startswith(MAY_CHANGE_ON_RESUME)
            }
            if workdir and given:  # Another run in the same folder would be refused.
                assert runs.setdefault(workdir[1], run) == run, f"{page}: {line}"


def test_every_path_in_the_documentation_exists():
    for text in (README, DOCS, (ROOT / "CONTRIBUTING.md").read_text()):
        for path in re.findall(r"\b(?:configs|examples|dist_ens|launch|tests)/[\w/.]+\w", text):
            assert (ROOT / path).exists(), path


def test_every_link_between_pages_leads_somewhere():
    for page, text in [(pathlib.Path("README.md"), README), *PAGES.items()]:
        for target in re.findall(r"\]\(([^)#:]+?)(?:#[^)]*)?\)", text):
            made = target.endswith(("reference/config.md", "reference/command_line.md"))
            there = (ROOT / page).parent / target
            assert made or there.exists(), f"{page}: {target}"


def test_every_config_has_its_command_its_duration_and_its_result():
    for config in CONFIGS:
        docstring = (ROOT / config).read_text().split('"""')[1]
        for told in (f"dist-ens train --config={config}", "Duration:", "Result:"):
            assert told in docstring, config


def test_every_metric_stands_in_the_reference_with_its_direction():
    page = PAGES[pathlib.Path("docs/reference/metrics.md")]
    table = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in page.splitlines()]
    directions = {row[0]: row[3] for row in table if len(row) > 3}
    for metric in CATALOGUE.values():
        assert directions[metric.name] == (metric.direction or ""), metric.name


@pytest.mark.slow
def test_every_flag_has_a_description():
    for verb in launch.VERBS:
        printed = commands.dist_ens(verb, "--helpxml").stdout
        flags = ElementTree.fromstring(printed).iter("flag")
        ours = [flag for flag in flags if "launch" in flag.findtext("file", "")]
        assert ours
        for flag in ours:
            assert len(flag.findtext("meaning", "")) > 10, flag.findtext("name")


def test_every_exit_code_stands_in_the_reference():
    page = PAGES[pathlib.Path("docs/reference/exit_codes.md")]
    codes = [int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert codes == [*ExitCode]


def test_every_field_of_a_config_is_described():
    def described(section):
        for name, field in section.__dataclass_fields__.items():
            assert re.search(rf"^ {{4,8}}{name}: ", section.__doc__, re.MULTILINE), name
            if hasattr(field.default_factory, "__dataclass_fields__"):
                described(field.default_factory)

    described(Experiment)


def public_names():
    for name in dist_ens.__all__:
        value = getattr(dist_ens, name)
        if not inspect.ismodule(value):
            yield f"dist_ens.{name}", value
            continue
        for inner in getattr(value, "__all__", ()):
            found = getattr(value, inner)
            if inspect.isclass(found) or inspect.isfunction(found):
                yield f"dist_ens.{name}.{inner}", found


@pytest.mark.parametrize("name", dict(public_names()))
def test_every_public_name_has_an_example_that_runs(name):
    assert ">>>" in inspect.getdoc(dict(public_names())[name])
