"""JAX's compilation cache, kept between runs in the user's cache folder."""

import functools
import logging
import os
import pathlib
import stat
import tempfile

import jax
import platformdirs

_SPARED = "/jax/compilation_cache/compile_time_saved_sec"
_MAX_BYTES = 2 * 2**30


@functools.cache
def use_compile_cache_by_default() -> None:
    """Sets up JAX's compilation cache, unless this process has chosen a cache folder already."""
    if jax.config.values["jax_compilation_cache_dir"] is None and compiled_folder() is not None:
        use_compile_cache()


def use_compile_cache() -> None:
    """Sets up JAX's compilation cache in the user's cache folder.

    The cache holds at most 2 GiB; the least recently used programs are deleted first. JAX runs the
    programs that it loads, so the folder is not used if another user could have put one there. A
    folder in JAX's own variable `JAX_COMPILATION_CACHE_DIR` is used instead, with a warning if
    another user could; an empty variable disables the cache. If the folder cannot be used, a
    warning is logged and nothing is cached.
    """
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    said = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    folder = compiled_folder()
    if folder is None:
        if said is None:
            logging.warning(
                "The compilation cache is disabled, because this user has no home folder. Set "
                "XDG_CACHE_HOME or JAX_COMPILATION_CACHE_DIR to a folder."
            )
        return
    try:
        folder.mkdir(mode=0o777 if said else 0o700, parents=True, exist_ok=True)
        others = access_of_others(folder)
        if others and not said:
            raise PermissionError(0, others)
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
    if others:
        logging.warning(
            "JAX runs the programs in JAX_COMPILATION_CACHE_DIR=%s, and %s. Use this folder only "
            "if you trust everybody who can write to it.",
            folder,
            others,
        )
    if not said:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)


def access_of_others(folder: pathlib.Path) -> str | None:
    """Returns how another user could have put a program into a folder; None if nobody could.

    Another user is one that is neither this process's user nor root. Nobody else may own or write
    to the folder, what is in it, the folders above it, or a symbolic link on the way to it. Others
    may write to a folder above it that has the sticky bit, such as `/tmp`: they cannot replace what
    is not theirs there.

    Args:
        folder: Folder that exists.

    Raises:
        OSError: If the folder cannot be read.
    """
    if not hasattr(os, "getuid"):
        return None
    given, real = folder.absolute(), folder.resolve()
    for path in (given, *given.parents, real, *real.parents):
        status = path.lstat()
        if status.st_uid not in (0, os.getuid()):
            return f"{path} belongs to user {user_name(status.st_uid)}"
        if stat.S_ISLNK(status.st_mode) or (path != real and status.st_mode & stat.S_ISVTX):
            continue
        if status.st_mode & stat.S_IWOTH or (
            status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
        ):
            return f"others may write to {path}"
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                owner = entry.stat(follow_symlinks=False).st_uid
            except FileNotFoundError:  # Another run has just deleted the program.
                continue
            if owner not in (0, os.getuid()):
                return f"{entry.name} in it belongs to user {user_name(owner)}"
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


def user_name(user_id: int) -> str:
    """Returns the name of a user of this machine, or the number if it has no name.

    Args:
        user_id: Number of the user.
    """
    try:
        import pwd  # It does not exist on Windows.

        return pwd.getpwuid(user_id).pw_name
    except (ImportError, KeyError):
        return str(user_id)


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
        Folder. None if the cache is disabled, or is not in a folder of a file system, or the user
        has no home folder.
    """
    said = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if said is not None:
        return None if said == "" or "://" in said else pathlib.Path(said)
    folder = cache_folder()
    return None if folder is None else folder / "compiled"


def cache_folder() -> pathlib.Path | None:
    """Returns the user's cache folder of dist_ens, which need not exist.

    Returns:
        Folder. None if the user has no home folder, such as a user without a name in a container.
    """
    try:
        folder = platformdirs.user_cache_dir("dist_ens")
    except RuntimeError:
        return None
    # Older versions of platformdirs return a path that begins with `~`, and raise no error.
    return None if folder.startswith("~") else pathlib.Path(folder)
