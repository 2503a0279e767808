"""JAX's compilation cache, kept between runs in the user's cache folder."""

import functools
import logging
import os
import pathlib
import stat
import tempfile
from typing import Self

import jax
import platformdirs

_COMPILED = "/jax/core/compile/backend_compile_duration"
_SPARED = "/jax/compilation_cache/compile_time_saved_sec"
_MAX_BYTES = 2 * 2**30


@functools.cache
def use_compile_cache_by_default() -> None:
    """Sets up JAX's compilation cache, unless this process has chosen a cache folder already."""
    if jax.config.values["jax_compilation_cache_dir"] is None and cache_folder() is not None:
        use_compile_cache()


def use_compile_cache() -> None:
    """Sets up JAX's compilation cache in the user's cache folder.

    The cache holds at most 2 GiB; the least recently used programs are deleted first. JAX runs the
    programs that it loads, so the folder is not used if another user could have put one there. If
    it cannot be used, a warning is logged and nothing is cached. A folder in JAX's own variable
    `JAX_COMPILATION_CACHE_DIR` is used instead; an empty variable disables the cache.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    place = cache_folder()
    try:
        if place is None:
            raise FileNotFoundError(0, "this user has no home folder")
        folder = place / "compiled"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if others := access_of_others(folder):
            raise PermissionError(0, others)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        logging.warning(
            "The compilation cache is disabled, because its folder cannot be used: %s. Set "
            "XDG_CACHE_HOME or JAX_COMPILATION_CACHE_DIR to another folder.",
            error.strerror,
        )
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)


def access_of_others(folder: pathlib.Path) -> str | None:
    """Returns how another user, but root, could put a program into a folder; None if nobody could.

    In a folder above it that has the sticky bit, such as `/tmp`, others can replace nothing.
    """
    if not hasattr(os, "getuid"):  # The system is Windows.
        return None
    given, real = folder.absolute(), folder.resolve()
    for path in (given, *given.parents, real, *real.parents):
        status = path.lstat()
        if status.st_uid not in (0, os.getuid()):
            return f"{path} belongs to another user"
        if stat.S_ISLNK(status.st_mode) or (path != real and status.st_mode & stat.S_ISVTX):
            continue
        if status.st_mode & stat.S_IWOTH or (
            status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
        ):
            return f"others may write to {path}"
    return None


def _is_private_group(group_id: int) -> bool:
    """Returns whether only this process's user is in a group, as on systems with umask 002."""
    import grp  # These modules do not exist on Windows.
    import pwd

    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return group_id == user.pw_gid and group.gr_name == user.pw_name and not group.gr_mem


_spared_secs = 0.0


def _count_spared(event: str, duration_secs: float, **_: str | int) -> None:
    global _spared_secs
    # JAX keeps compile times in whole seconds, so a program that compiled in less counts negative.
    _spared_secs += max(0.0, duration_secs) if event == _SPARED else 0.0


jax.monitoring.register_event_duration_secs_listener(_count_spared)


class LongestCompilation:
    """A context that notes the longest compilation of a program inside it.

    Attributes:
        secs: Its seconds, which are those without the cache; 0 if nothing was compiled.
    """

    def __init__(self) -> None:
        self.secs = 0.0

    def __enter__(self) -> Self:
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event in (_COMPILED, _SPARED):
            self.secs = max(self.secs, duration_secs)


def spared_secs() -> float:
    """Returns the seconds of compilation that JAX's cache has saved in this process."""
    return _spared_secs


def cache_folder() -> pathlib.Path | None:
    """Returns the user's cache folder of dist_ens; None if the user has no home folder."""
    try:
        folder = platformdirs.user_cache_dir("dist_ens")
    except RuntimeError:
        return None
    # Older versions of platformdirs return a path that begins with `~`, and raise no error.
    return None if folder.startswith("~") else pathlib.Path(folder)
