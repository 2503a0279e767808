"""Eight devices for every test, on any machine."""

import gc
import os
import signal
import tempfile

import fast_xla

DEVICES = 8
# What one test compiled another finds in a cache of this session. Commands that a test starts as
# processes are given `COMMAND_ENVIRONMENT`: with nothing else said they compile as a user's do.
_CACHE = tempfile.TemporaryDirectory(prefix="dist_ens_tests_")
_CACHING = {
    "XDG_CACHE_HOME": _CACHE.name,
    "JAX_COMPILATION_CACHE_DIR": _CACHE.name,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
COMMAND_ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
COMMAND_ENVIRONMENT |= _CACHING
os.environ |= _CACHING
os.environ["XLA_FLAGS"] = fast_xla.flags(DEVICES)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax  # noqa: E402
import pytest  # noqa: E402


def pytest_sessionstart(session: pytest.Session) -> None:
    if jax.device_count() != DEVICES:
        pytest.exit(f"The tests need {DEVICES} devices; JAX has {jax.device_count()}.", 3)


def pytest_xdist_auto_num_workers() -> int:
    # One more than the cores: there is always a file whose test waits, for a process or a disk.
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish(session: pytest.Session) -> None:
    # The libraries stay: a test that collects garbage, as whatever times does, need not look there.
    gc.collect()
    gc.freeze()


@pytest.fixture
def interruptible():
    """Ctrl-C raises, as where a person types it: what a shell begins beside itself ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True, scope="module")
def _a_file_leaves_no_programs():
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _rank_promotion_is_an_error():
    with jax.numpy_rank_promotion("raise"):
        yield
