"""What commands ask of the C library: memory in huge pages, and that it keeps what was freed.

An update fills hundreds of megabytes anew at every call. In pages of 4 KiB a transformer's step
spent a third of its time on having them mapped. And a save copies the state off the devices: where
that memory is given back to the system after each, the next save has other mapped anew (a virtual
machine asks its host for it), which took nearly as long again as the rest of the save.
"""

import os
import pathlib
import sys

_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = {"glibc.malloc.hugetlb": 1}
# Blocks of up to 32 MiB, the most that can be asked for, are taken from memory that is kept.
_KEPT_MEMORY = {"glibc.malloc.mmap_threshold": 2**25, "glibc.malloc.trim_threshold": 2**40}
_OFFERED = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")


def ask() -> None:
    """Starts this program again with a C library that was asked.

    It reads its settings once, before the program begins. Nothing is done where it cannot be asked
    (it is the GNU C library since 2.35 that can), or where `GLIBC_TUNABLES` says something of one
    of these settings already. Must come before anything that takes long.
    """
    said = os.environ.get(_TUNABLES, "")
    if not _can_be_asked() or any(name in said for name in (_HUGE_PAGES | _KEPT_MEMORY)):
        return
    # Where the system gives huge pages to nobody, or to all, there is nothing to ask.
    asked = (_HUGE_PAGES if _given_who_asks() else {}) | _KEPT_MEMORY
    settings = [f"{name}={value}" for name, value in asked.items()]
    os.environ[_TUNABLES] = ":".join(filter(None, [said, *settings]))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _can_be_asked() -> bool:
    if "CS_GNU_LIBC_VERSION" not in getattr(os, "confstr_names", ()):
        return False
    name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    return name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35)


def _given_who_asks() -> bool:
    try:
        return "[madvise]" in _OFFERED.read_text()
    except OSError:
        return False
