"""The half of storage that is in a bucket: Google Cloud Storage, S3 and what speaks like S3."""

# ruff: noqa: D102 (`Place` has the docstrings.)
import errno
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable
from typing import ClassVar, Self, TypeVar

import tensorstore as ts

from dist_ens.ground.causes import answer_in
from dist_ens.ground.json_text import JsonDict
from dist_ens.storage.lease import require_held
from dist_ens.storage.place import ABSENT, not_writable

_Result = TypeVar("_Result")


# TensorStore by itself would try for more than a quarter of an hour.
def _retries(count: int) -> JsonDict:
    retries = {"max_retries": count, "initial_delay": "500ms", "max_delay": "4s"}
    return {"s3_request_retries": retries, "gcs_request_retries": retries}


RETRIES = _retries(12)
# Just after a request that no server answered, others do not wait as long.
_PATIENT, _BRIEF, _BRIEF_SECS = ts.Context(RETRIES), ts.Context(_retries(1)), 20.0
_SILENT_SECS = 10.0  # Time without an answer that is told.
_PROBE = ".writable"


def storage_error(error: Exception, where: str) -> OSError:
    """Returns an error of TensorStore as one of the system, with the server's own words.

    >>> print(storage_error(ValueError("PERMISSION_DENIED: Access Denied [http='403']"), "s3://b"))
    [Errno 13] Access Denied: 's3://b'
    """
    code, words = answer_in(error)
    return OSError(code, words, where)


class Bucket:
    """A folder in a bucket; see `Place`. Its name is a prefix of keys that ends with a slash."""

    is_local = False
    _brief_until: ClassVar[float] = 0.0

    def __init__(self, address: str, spec: JsonDict) -> None:
        self.address, self._spec = address, spec
        self._prefix: str = spec.get("path", "")
        self._opened: dict[bool, ts.KvStore] = {}

    def __str__(self) -> str:
        return self.address

    def __truediv__(self, name: str) -> Self:
        spec = {**self._spec, "path": f"{self._prefix}{name}/"}
        return type(self)(f"{self.address}/{name}", spec)

    @property
    def name(self) -> str:
        return self.address.rpartition("/")[2]

    @property
    def parent(self) -> Self:
        spec = {**self._spec, "path": self._prefix.removesuffix(f"{self.name}/")}
        return type(self)(self.address.rpartition("/")[0], spec)

    def make(self) -> None:
        pass  # A bucket has no folders.

    def names(self, below: str = "") -> list[str]:
        prefix = f"{self._prefix}{below}/" if below else self._prefix
        # The character after a slash is a 0. A server may send other keys, too.
        within = ts.KvStore.KeyRange(prefix, f"{prefix[:-1]}0" if prefix else "")
        found = self._reported(lambda keys: keys.list(within).result())
        keys = [key.decode() for key in found if key.startswith(prefix.encode())]
        # A console of the cloud shows an empty key with a slash at its end as a folder.
        return [key.removeprefix(self._prefix) for key in keys if not key.endswith("/")]

    def read(self, name: str) -> bytes:
        content, tag = self.read_tagged(name)
        if tag == ABSENT:
            raise FileNotFoundError(
                errno.ENOENT, os.strerror(errno.ENOENT), f"{self.address}/{name}"
            )
        return content

    def read_tagged(self, name: str) -> tuple[bytes, bytes]:
        found = self._reported(lambda keys: keys.read(self._prefix + name).result(), name)
        return found.value, found.stamp.generation

    def digest(self, name: str) -> tuple[int, int]:
        content = self.read(name)
        return len(content), zlib.crc32(content)

    def size(self, name: str) -> None:
        return None

    def require_writable(self, names: Iterable[str] = (), *, is_new: bool = False) -> None:
        try:
            self.write(_PROBE, b"1")
            self.remove(_PROBE)
        except OSError as error:
            raise not_writable(self, error) from error

    def write(self, name: str, content: bytes) -> None:
        require_held(self.address)
        self._reported(lambda keys: keys.write(self._prefix + name, content).result(), name)

    def write_if(self, name: str, content: bytes, tag: bytes) -> bytes | None:
        key = self._prefix + name
        stamp = self._reported(lambda keys: keys.write(key, content, if_equal=tag).result(), name)
        if stamp.generation:
            return stamp.generation
        now, there = self.read_tagged(name)
        if there in (ABSENT, tag):  # Nothing has taken its place, so the bucket itself is gone.
            self.names(name)
        # A request whose answer was lost is sent again, and then finds its own content.
        return there if now == content and there != ABSENT else None

    def remove(self, name: str) -> None:
        require_held(self.address)
        self._reported(lambda keys: keys.write(self._prefix + name, None).result(), name)

    def remove_all(self, *, last: str | None = None) -> None:
        require_held(self.address)
        keys_of = [self._prefix + name for name in self.names() if name != last]

        def delete(keys: ts.KvStore) -> None:
            for deleted in [keys.write(key, None) for key in keys_of]:
                deleted.result()

        self._reported(delete)
        if last is not None:
            self.remove(last)

    def move_to(self, other: Self) -> None:
        for name in self.names():
            other.write(name, self.read(name))
        self.remove_all()

    def spec(self) -> JsonDict:
        return self._spec

    def _reported(self, use: Callable[[ts.KvStore], _Result], name: str = "") -> _Result:
        """Returns what a function returns, and raises its errors as those of the system."""
        brief = time.monotonic() < Bucket._brief_until
        told = threading.Timer(_SILENT_SECS, self._say_silent)
        told.daemon = True
        told.start()
        try:
            if brief not in self._opened:
                # One at the folder would cut the prefix off keys that lie elsewhere.
                root, context = {**self._spec, "path": ""}, _BRIEF if brief else _PATIENT
                self._opened[brief] = ts.KvStore.open(root, context=context).result()
            return use(self._opened[brief])
        except ValueError as error:
            found = storage_error(error, f"{self.address}/{name}".rstrip("/"))
            if found.errno in (errno.EHOSTDOWN, errno.ETIMEDOUT):
                Bucket._brief_until = time.monotonic() + _BRIEF_SECS
            raise found from None
        finally:
            told.cancel()

    def _say_silent(self) -> None:
        logging.warning("No answer from %s for %g s. Trying on.", self.address, _SILENT_SECS)
