"""JAX's compilation cache, kept between runs in the user's cache folder."""

import logging
import os
import pathlib
import tempfile

import jax
import platformdirs

_SPARED = "/jax/compilation_cache/compile_time_saved_sec"
_MAX_BYTES = 2 * 2**30


def use_compile_cache() -> None:
    """Sets up JAX's compilation cache in the user's cache folder.

    The cache holds at most 2 GiB; the least recently used programs are deleted first. JAX runs the
    programs that it loads, so nobody but the user may write to the folder. A folder in JAX's own
    variable `JAX_COMPILATION_CACHE_DIR` is used instead; an empty variable disables the cache. If
    the folder cannot be used, a warning is logged and nothing is cached.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    said = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    folder = compiled_folder()
    if folder is None:
        return
    try:
        folder.mkdir(mode=0o777 if said else 0o700, parents=True, exist_ok=True)
        status = folder.stat()
        is_shared = hasattr(os, "getuid") and (
            status.st_uid != os.getuid() or status.st_mode & 0o022
        )
        if is_shared and not said:
            raise PermissionError(0, "others than its user may write to it")
        if said:
            os.listdir(folder)  # A folder that others have filled may be readable only.
        else:
            with tempfile.TemporaryFile(dir=folder):
                pass
    except OSError as error:
        logging.warning(
            "The compilation cache is disabled, because its folder %s cannot be used: %s. Set "
            "XDG_CACHE_HOME or JAX_COMPILATION_CACHE_DIR to another folder.",
            folder,
            error.strerror,
        )
        jax.config.update("jax_compilation_cache_dir", None)
        return
    if not said:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)


_spared_secs = 0.0


def _count_spared(event: str, duration_secs: float, **_: str | int) -> None:
    """Adds the duration of an event to the saved seconds, if the cache has saved them."""
    global _spared_secs
    # JAX keeps compile times in whole seconds, so a program that compiled in less counts negative.
    _spared_secs += max(0.0, duration_secs) if event == _SPARED else 0.0


jax.monitoring.register_event_duration_secs_listener(_count_spared)


def spared_secs() -> float:
    """Returns the seconds of compilation that JAX's cache has saved in this process.

    JAX rounds the compile time of each program down to whole seconds.
    """
    return _spared_secs


def compiled_folder() -> pathlib.Path | None:
    """Returns the folder of JAX's compilation cache, which need not exist.

    Returns:
        Folder. None if the cache is disabled, or is not in a folder of a file system.
    """
    said = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if said == "" or "://" in (said or ""):
        return None
    return pathlib.Path(said or cache_folder() / "compiled")


def cache_folder() -> pathlib.Path:
    """Returns the user's cache folder of dist_ens, which need not exist."""
    return pathlib.Path(platformdirs.user_cache_dir("dist_ens"))
