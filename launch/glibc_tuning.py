"""Settings of the C library for commands: huge pages, and keeping of freed memory.

An update writes hundreds of megabytes of new memory at every call. With pages of 4 KiB, mapping
them took a third of the time of a transformer's step. A save copies the state off the devices. If
its memory goes back to the system, the next save must map it again, and a virtual machine requests
it from its host. That took nearly as long as the rest of the save.
"""

import os
import sys

_TUNABLES = "GLIBC_TUNABLES"
# Blocks of up to 32 MiB, the largest possible threshold, come from memory that is kept.
_SETTINGS = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": 2**25,
    "glibc.malloc.trim_threshold": 2**40,
}


def ask() -> None:
    """Restarts this program with settings of the C library, which it reads when it begins.

    Nothing is done if `GLIBC_TUNABLES` has one of these settings already. Other C libraries, and
    versions of glibc before 2.35, ignore the settings.
    """
    said = os.environ.get(_TUNABLES, "")
    if sys.platform != "linux" or any(name in said for name in _SETTINGS):
        return
    settings = [f"{name}={value}" for name, value in _SETTINGS.items()]
    os.environ[_TUNABLES] = ":".join(filter(None, [said, *settings]))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
