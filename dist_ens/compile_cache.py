"""JAX's persistent compilation cache, on by default: a program is compiled once per machine."""

import logging
import os
import pathlib
import tempfile

import jax
import platformdirs

_MAX_BYTES = 2 * 2**30


def use_compile_cache() -> None:
    """Has JAX keep what it compiles in the user's cache folder, the oldest going beyond 2 GiB.

    What JAX loads from there is run: the folder is the user's own, and nobody else may write to
    it. Whoever has set JAX's own `JAX_COMPILATION_CACHE_DIR` (empty for none) keeps that. Where the
    folder cannot be used a warning says so, and training goes on without it.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    folder = pathlib.Path(platformdirs.user_cache_dir("dist_ens")) / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
            raise PermissionError(0, "others than its user may write to it")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        logging.warning(
            "The compilation cache is a folder of the user's own. Received: %s: %s. Going on "
            "without it; XDG_CACHE_HOME or JAX_COMPILATION_CACHE_DIR names another place.",
            folder,
            error.strerror,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
