"""Eight devices for every test, on any machine; and the blocks of the documentation as tests.

With `DIST_ENS_TEST_PLATFORM=cuda` (or `tpu`) the tests run on the accelerators that are there,
however few they are. Tests that ask for more devices fail then.

The blocks of a page run in order, in a new folder that holds `configs` and `examples`. A block that
cannot run here is skipped by a comment above it, with its reason. Pages that start commands take
long and have the marker `long`, except README.md and the quickstart.
"""

import gc
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import fast_xla

DEVICES = 8
# All tests of a session share one compilation cache. Commands that a test starts as processes get
# `COMMAND_ENVIRONMENT`, with which they compile as a user's commands do.
_CACHE = tempfile.TemporaryDirectory(prefix="dist_ens_tests_")
_CACHING = {
    "XDG_CACHE_HOME": _CACHE.name,
    "XDG_CONFIG_HOME": _CACHE.name,  # Matplotlib makes a folder for its settings there.
    "JAX_COMPILATION_CACHE_DIR": _CACHE.name,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
COMMAND_ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
COMMAND_ENVIRONMENT |= _CACHING
os.environ |= _CACHING
PLATFORM = os.environ.get("DIST_ENS_TEST_PLATFORM", "cpu")
if PLATFORM == "cpu":
    os.environ["XLA_FLAGS"] = fast_xla.flags(DEVICES)
else:
    # Several processes run tests, each of which would take most of the memory of an accelerator.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
os.environ["JAX_PLATFORMS"] = PLATFORM
# Commands inherit that nohup makes the tests ignore this signal, which some tests send them.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import jax  # noqa: E402
import pytest  # noqa: E402
from sybil import Sybil  # noqa: E402
from sybil.example import Example  # noqa: E402
from sybil.parsers.markdown import (  # noqa: E402
    CodeBlockParser,
    PythonCodeBlockParser,
    SkipParser,
)

from dist_ens.processes import cluster  # noqa: E402

ROOT = pathlib.Path(__file__).parent


def pytest_sessionstart(session: pytest.Session) -> None:
    """Stops if another library has begun JAX with fewer devices."""
    if PLATFORM == "cpu" and jax.device_count() != DEVICES:
        pytest.exit(f"The tests need {DEVICES} devices; JAX has {jax.device_count()}.", 3)


def pytest_xdist_auto_num_workers() -> int:
    """Returns the number of processes that run tests."""
    # One more than the cores: there is always a file whose test waits, for a process or a disk.
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the pages of the documentation whose blocks start commands as `long`."""
    pages = {item.path for item in items if item.path.suffix == ".md"}
    pages -= {ROOT / "README.md", ROOT / "docs/quickstart.md"}
    # A whole page is marked: its blocks share a folder.
    takes_long = {page for page in pages if "\n```sh" in page.read_text()}
    for item in items:
        if item.path in takes_long:
            item.add_marker(pytest.mark.long)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempts what is imported from garbage collection."""
    # The libraries stay, so a test that collects garbage, as every timing does, can skip them.
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what the tests with the marker `faults` have recorded, as Markdown tables.

    Tests that record the same properties share a table.
    """
    reports = itertools.chain(*terminalreporter.stats.values())
    rows = [
        dict(report.user_properties)
        for report in reports
        if isinstance(report, pytest.TestReport)
        and report.when == "call"
        and "faults" in report.keywords
        and report.user_properties
    ]
    for columns in dict.fromkeys(map(tuple, rows)):
        terminalreporter.write_line("")
        for cells in (columns, ["---"] * len(columns)):
            terminalreporter.write_line(f"| {' | '.join(cells)} |")
        for row in rows:
            if tuple(row) == columns:
                terminalreporter.write_line(f"| {' | '.join(map(str, row.values()))} |")


@pytest.fixture
def interruptible():
    """Makes Ctrl-C raise, as it does at a prompt; a process in the background would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def sleep(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Replaces the clock by one that only `time.sleep` moves on, so that timings are exact."""
    now = [0.0]

    def sleep(secs: float) -> None:
        now[0] += secs

    monkeypatch.setattr(cluster, "clock", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    return sleep


@pytest.fixture(autouse=True, scope="module")
def _a_file_leaves_no_programs():
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _rank_promotion_is_an_error():
    with jax.numpy_rank_promotion("raise"):
        yield


def _run_shell(example: Example) -> str | None:
    """Runs a block of shell; returns what it printed if it failed."""
    commands = pathlib.Path(sys.executable).parent
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", example.parsed],
        capture_output=True,
        text=True,
        env=COMMAND_ENVIRONMENT
        | {
            "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": fast_xla.flags(2),
            "JAX_PLATFORMS": "cpu",
        },
    )
    return None if ended.returncode == 0 else f"{ended.stdout}\n{ended.stderr}"


def _enter_folder(namespace: dict[str, Any]) -> None:
    """Changes to a new folder that looks like a clone."""
    folder = tempfile.TemporaryDirectory()
    for name in ("configs", "examples"):
        (pathlib.Path(folder.name) / name).symlink_to(ROOT / name)
    namespace["_folder"], namespace["_before"] = folder, os.getcwd()
    os.chdir(folder.name)


def _leave_folder(namespace: dict[str, Any]) -> None:
    os.chdir(namespace["_before"])
    namespace["_folder"].cleanup()


pytest_collect_file = Sybil(
    parsers=[
        PythonCodeBlockParser(),
        CodeBlockParser(language="sh", evaluator=_run_shell),
        SkipParser(),
    ],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    setup=_enter_folder,
    teardown=_leave_folder,
).pytest()
