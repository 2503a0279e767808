"""Commands ask the C library for huge pages and to keep memory, unless somebody says otherwise."""

import pathlib
import subprocess
import sys

import pytest

from conftest import COMMAND_ENVIRONMENT
from launch import glibc_tuning

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = [pathlib.Path(sys.executable).parent / "dist-ens", "train"]
MODULE = [sys.executable, "-m", "launch.train"]
OTHER = "glibc.malloc.tcache_count=3"
IS_ASKED = glibc_tuning.can_be_asked()
ASKED = (
    ":glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432"
    ":glibc.malloc.trim_threshold=1099511627776"
)
MADVISED = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
GIVES_HUGE_PAGES = IS_ASKED and MADVISED.exists() and "[never]" not in MADVISED.read_text()


@pytest.mark.parametrize("command", [SCRIPT, MODULE], ids=["dist-ens", "python -m"])
@pytest.mark.parametrize(
    ("said", "seen"),
    [
        (OTHER, OTHER + (ASKED if IS_ASKED else "")),
        ("glibc.malloc.hugetlb=0", "glibc.malloc.hugetlb=0"),
    ],
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


def printed_by(config, tmp_path):
    """The number that a config prints which a command reads."""
    path = tmp_path / "config.py"
    path.write_text(config + "1 / 0\n")
    ended = subprocess.run(
        [*MODULE, f"--config={path}", "--workdir=x"],
        cwd=ROOT,
        env=COMMAND_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return int(ended.stdout)


def test_memory_comes_in_huge_pages(tmp_path):
    config = """import numpy
kept = numpy.ones(2**24)
lines = [line.split() for line in open('/proc/self/smaps') if line.startswith('AnonHugePages')]
print(sum(int(line[1]) for line in lines))
"""
    # Of 131,072 KiB.
    assert printed_by(config, tmp_path) >= (2**16 if GIVES_HUGE_PAGES else 0)


def test_memory_that_was_freed_is_kept(tmp_path):
    config = """import numpy
def kib():
    lines = open('/proc/self/status')
    return next(int(line.split()[1]) for line in lines if line.startswith('VmRSS'))
blocks = [numpy.ones(2**20) for _ in range(8)]
held = kib()
del blocks
print(held - kib())
"""
    assert printed_by(config, tmp_path) < (2**13 if IS_ASKED else 2**20)  # Of 65,536 KiB.
