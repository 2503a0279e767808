"""Memory in huge pages, where the system gives them to programs that ask.

An update fills hundreds of megabytes anew at every call. In pages of 4 KiB a transformer's step
spent a third of its time on having them mapped.
"""

import os
import pathlib
import sys

_TUNABLES = "GLIBC_TUNABLES"
_ASKS = "glibc.malloc.hugetlb"
_OFFERED = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def ask() -> None:
    """Starts this program again with a C library that asks for huge pages.

    It reads its settings once, before the program begins. Nothing is done where it cannot ask (it
    is the GNU C library since 2.35 that can), where the system gives none or gives them to all, or
    where `GLIBC_TUNABLES` says something of them already. Must come before anything that takes
    long.
    """
    said = os.environ.get(_TUNABLES, "")
    if _ASKS in said or not _can_ask() or not _given_who_asks():
        return
    os.environ[_TUNABLES] = ":".join(filter(None, [said, f"{_ASKS}=1"]))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _can_ask() -> bool:
    if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", ()):
        return False
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)


def _given_who_asks() -> bool:
    try:
        return "[madvise]" in _OFFERED.read_text()
    except OSError:
        return False
