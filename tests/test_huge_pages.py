"""Commands ask the C library for huge pages, and leave alone what somebody says of them."""

import pathlib
import subprocess
import sys

import pytest

from conftest import COMMAND_ENVIRONMENT
from launch import huge_pages

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = [pathlib.Path(sys.executable).parent / "dist-ens", "train"]
MODULE = [sys.executable, "-m", "launch.train"]
OTHER = "glibc.malloc.tcache_count=3"
# What a program is given where the system has huge pages for those who ask.
ASKS = ":glibc.malloc.hugetlb=1" if huge_pages._can_ask() and huge_pages._given_who_asks() else ""


@pytest.mark.parametrize("command", [SCRIPT, MODULE], ids=["dist-ens", "python -m"])
@pytest.mark.parametrize(
    ("said", "seen"),
    [(OTHER, OTHER + ASKS), ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0")],
    ids=["said nothing", "said no"],
)
def test_a_command_asks_once_and_keeps_its_arguments(command, said, seen, tmp_path):
    config = tmp_path / "a config.py"
    config.write_text("import os, sys\nprint(os.environ['GLIBC_TUNABLES'], sys.argv[1:])\n1 / 0\n")
    ended = subprocess.run(
        [*command, f"--config={config}", "--workdir=a folder"],
        cwd=ROOT,
        env=COMMAND_ENVIRONMENT | {"GLIBC_TUNABLES": said},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.stdout == f"{seen} {[f'--config={config}', '--workdir=a folder']}\n"
    assert ended.returncode == 2


def test_memory_comes_in_huge_pages(tmp_path):
    config = tmp_path / "config.py"
    config.write_text(
        "import numpy\nkept = numpy.ones(2**24)\n"
        "print(sum(int(line.split()[1]) for line in open('/proc/self/smaps') "
        "if line.startswith('AnonHugePages')))\n1 / 0\n"
    )
    ended = subprocess.run(
        [*MODULE, f"--config={config}", "--workdir=x"],
        cwd=ROOT,
        env=COMMAND_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert int(ended.stdout) >= (2**16 if ASKS else 0)  # of 131,072 KiB
