"""Commands ask the C library for huge pages and to keep memory, unless somebody says otherwise."""

import pathlib
import sys

import pytest

from commands import process

SCRIPT = [pathlib.Path(sys.executable).parent / "dist-ens", "train"]
MODULE = [sys.executable, "-m", "launch.train"]
OTHER = "glibc.malloc.tcache_count=3"
IS_ASKED = sys.platform == "linux"
ASKED = (
    ":glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432"
    ":glibc.malloc.trim_threshold=1099511627776"
)
MADVISED = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
GIVES_HUGE_PAGES = IS_ASKED and MADVISED.exists() and "[never]" not in MADVISED.read_text()


def printed_by(config, tmp_path, *command, **variables):
    """What a config prints, after which the command ends."""
    path = tmp_path / "a config.py"
    path.write_text(config + "1 / 0\n")
    arguments = [f"--config={path}", "--workdir=a folder"]
    ended = process(*command, *arguments, **variables)
    assert ended.returncode == 2
    return ended.stdout, arguments


@pytest.mark.parametrize(
    ("command", "said", "asked"),
    [(SCRIPT, OTHER, ASKED), (MODULE, OTHER, ASKED), (SCRIPT, "glibc.malloc.hugetlb=0", "")],
    ids=["dist-ens", "python -m", "said no"],
)
def test_a_command_asks_once_and_keeps_its_arguments(command, said, asked, tmp_path):
    config = "import os, sys\nprint(os.environ['GLIBC_TUNABLES'], sys.argv[1:])\n"
    printed, arguments = printed_by(config, tmp_path, *command, GLIBC_TUNABLES=said)
    assert printed == f"{said}{asked if IS_ASKED else ''} {arguments}\n"


def test_memory_comes_in_huge_pages_and_is_kept_when_it_is_freed(tmp_path):
    config = """import numpy
def kib():
    lines = open('/proc/self/status')
    return next(int(line.split()[1]) for line in lines if line.startswith('VmRSS'))
kept = numpy.ones(2**24)
lines = [line.split() for line in open('/proc/self/smaps') if line.startswith('AnonHugePages')]
blocks = [numpy.ones(2**20) for _ in range(8)]
held = kib()
del blocks
print(sum(int(line[1]) for line in lines), held - kib())
"""
    huge_kib, freed_kib = map(int, printed_by(config, tmp_path, *MODULE)[0].split())
    assert huge_kib >= (2**16 if GIVES_HUGE_PAGES else 0)  # Of 131,072 KiB.
    assert freed_kib < (2**13 if IS_ASKED else 2**20)  # Of 65,536 KiB.
