"""How commands end: streams that cannot be written, and values that cannot be used."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from commands import CLOSED, NOBODY, dist_ens, python
from conftest import COMMAND_ENVIRONMENT, ROOT

ENVIRONMENT = COMMAND_ENVIRONMENT | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
CONFIG = "--config=configs/digits.py"
DIST_ENS = f"{sys.executable} -c 'import launch; launch.main()'"
UNWRITTEN = "error: Some of the output could not be written: No space left on device. "
TINY = [CONFIG, "--config.num_members=2", "--config.execution=vmap"]
LONG = "x" * 20_000


def in_bash(line):
    command = ["bash", "-c", line]
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)


def assert_ended(ended, code, error):
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.startswith(error)
    assert ended.stderr.count("\n") == bool(error)


@pytest.mark.parametrize(
    ("stream", "code", "error"),
    [("| head -c 0", 0, ""), (">&-", 0, ""), ("2>&-", 0, ""), (">/dev/full", 2, UNWRITTEN)],
)
def test_help_that_nobody_reads_is_no_error_and_one_that_is_lost_is(stream, code, error):
    assert_ended(in_bash(f"set -o pipefail; {DIST_ENS} --help {stream}"), code, error)


@pytest.mark.quick
@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full", ">&- 2>&-"])
def test_an_error_that_cannot_be_shown_keeps_its_exit_code(stream):
    assert in_bash(f"{DIST_ENS} trian {stream}").returncode == 2


@pytest.mark.quick
def test_no_file_takes_the_place_of_a_stream_that_is_closed():
    # Libraries in C++ write to descriptors 1 and 2, whatever these are.
    code = "from launch import stdio; stdio.begin(); import os; os._exit(os.dup(0))"
    assert in_bash(f"{sys.executable} -c '{code}' <&- >&- 2>&-").returncode >= 3


@pytest.mark.parametrize("flag", ["--help", "-?"])
def test_the_help_of_a_verb_ends_as_that_of_all_does(flag):
    assert_ended(dist_ens("train", flag, out="/dev/full"), 2, UNWRITTEN)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that was trained while nobody read its output."""
    workdir = tmp_path_factory.mktemp("stdio") / "run"
    ended = dist_ens("train", *TINY, f"--workdir={workdir}", "--config.steps=2", out=NOBODY)
    assert_ended(ended, 0, "")
    assert json.loads((workdir / "summary.json").read_text())["steps"] == 2
    assert (workdir / "report.html").exists()
    return workdir


@pytest.mark.parametrize(
    ("out", "err", "code", "error"),
    [
        (CLOSED, "err", 0, ""),
        (NOBODY, NOBODY, 0, ""),
        ("out", CLOSED, 0, ""),
        ("/dev/full", "err", 1, UNWRITTEN),
        ("/dev/full", "/dev/full", 1, ""),
    ],
)
def test_results_are_written_whatever_becomes_of_the_output(run, tmp_path, out, err, code, error):
    scores = tmp_path / "scores.json"
    ended = dist_ens("evaluate", f"--workdir={run}", f"--json={scores}", out=out, err=err)
    assert_ended(ended, code, error)
    assert "accuracy" in json.loads(scores.read_text())["test"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["bench", "--turns=1"], "--turns cannot be '1': 1 is not integer >= 2."),
        ([LONG], "x' (20,000 characters) is not a verb of dist-ens"),
        (["evaluate", "--workdir=\x1b[31mred"], r"\033[31mred"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_value_that_cannot_be_used_is_one_short_message(words, sentence):
    ended = dist_ens(*words)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("error: ")
    assert sentence in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "\x1b" not in ended.stderr
    assert len(ended.stderr) < 2000


def test_output_is_text_whatever_the_name_of_a_file(run, tmp_path):
    strange = tmp_path / os.fsdecode(b"\xff")
    shutil.copytree(run, strange)
    ended = dist_ens("report", strange, f"--output={strange}.html")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert r"\377.html'" in ended.stdout  # as a shell takes it
    assert r"<title>\udcff</title>" in pathlib.Path(f"{strange}.html").read_text()


def test_a_tilde_on_the_command_line_is_the_home_folder(tmp_path):
    ended = dist_ens("evaluate", "--workdir=~/x", environ={"HOME": str(tmp_path)})
    assert ended.returncode == 2
    assert f"There is no checkpoint in {tmp_path}/x" in ended.stderr


FULL = """
import errno
from launch import cli, signals
signals.begin()
def main():
    raise OSError(errno.ENOSPC, 'No space left on device', 'runs/a/summary.json')
cli.run(main, joins_cluster=lambda: False)
"""


def test_a_full_disk_is_a_message_with_its_own_exit_code_wherever_it_happens():
    message = "error: A file runs/a/summary.json could not be written: no space left on device. "
    assert_ended(python("-c", FULL), 46, message)
