"""How commands end: streams that cannot be written, and values that cannot be used."""

import json
import os
import pathlib
import shutil
import sys

import pytest

from commands import CLOSED, NOBODY, dist_ens, process, python

CONFIG = "--config=configs/digits.py"
DIST_ENS = f"{sys.executable} -c 'import launch; launch.main()'"
UNWRITTEN = "error: Some of the output could not be written: No space left on device. "
TINY = [CONFIG, "--config.num_members=2", "--config.execution=vmap"]
LONG = "x" * 20_000


def assert_ended(ended, code, error):
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.startswith(error)
    assert ended.stderr.count("\n") == bool(error)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        *((f"--help {stream}", 0, "") for stream in ("| head -c 0", ">&-", "2>&-")),
        ("--help >/dev/full", 2, UNWRITTEN),
        *((f"trian {stream}", 2, "") for stream in ("2>&-", "2>/dev/full", ">&- 2>&-")),
    ],
)
def test_output_that_nobody_reads_is_no_error_and_help_that_is_lost_is(words, code, error):
    assert_ended(process("bash", "-c", f"set -o pipefail; {DIST_ENS} {words}"), code, error)


@pytest.mark.quick
def test_no_file_takes_the_place_of_a_stream_that_is_closed():
    # Libraries in C++ write to descriptors 1 and 2, whatever these are.
    code = "from launch import stdio; stdio.begin(); import os; os._exit(os.dup(0))"
    line = f"{sys.executable} -c '{code}' <&- >&- 2>&-"
    assert process("bash", "-c", line).returncode >= 3


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
        ("/dev/full", "err", 1, UNWRITTEN),
        pytest.param(NOBODY, NOBODY, 0, "", marks=pytest.mark.long),
        pytest.param("out", CLOSED, 0, "", marks=pytest.mark.long),
        pytest.param("/dev/full", "/dev/full", 1, "", marks=pytest.mark.long),
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
    message = (
        "error: A file runs/a/summary.json could not be read or written: no space left on device. "
    )
    assert_ended(python("-c", FULL), 46, message)
