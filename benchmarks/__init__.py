"""Benchmarks of dist_ens, run like its commands."""

import launch  # noqa: F401  The import tunes the C library's allocator, as the commands do.
