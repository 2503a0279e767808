"""The causes of errors of reading and writing, as a person reads them."""

import errno
import os
import re
from typing import NamedTuple

from dist_ens.ground.errors import first_line

# What to do about an error of the system, as a sentence without its end.
_REMEDIES = {
    errno.ENOSPC: "Free some space there",
    errno.EDQUOT: "Free some space there, or ask for a larger quota",
    errno.EFBIG: "Raise the limit on the size of a file (ulimit -f)",
    errno.EROFS: "Mount that disk so that it can be written",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "Give this user permission"),
    errno.ELOOP: "Put a file or a folder in the place of the link",
    **dict.fromkeys(
        (errno.ENOENT, errno.ENOTDIR, errno.ESTALE), "Put the folder of the run back in its place"
    ),
    errno.EMFILE: "Raise the limit on open files (ulimit -n)",
    errno.ENFILE: "Close files of other programs",
    errno.ENOMEM: "Free some memory",
    errno.EBUSY: "Wait for the other run, or choose another folder",
    **dict.fromkeys((errno.EIO, errno.EINTR, errno.ETIMEDOUT), "Check that disk"),
    **dict.fromkeys((errno.ENOTCONN, errno.EHOSTDOWN), "Check the connection to that disk"),
}
_REMEDIES_OF_BUCKETS = {
    errno.EACCES: "Set or renew the credentials, or give them the right to read and write there",
    errno.ENODEV: "Make the bucket, or correct its name",
    **dict.fromkeys((errno.EHOSTDOWN, errno.ETIMEDOUT), "Check the connection to the server"),
    errno.EIO: "Check the address of the server, and what it answers",
}
# Numbers of the system that say the same as a status of TensorStore about a request to a server.
_STATUSES = {
    "PERMISSION_DENIED": errno.EACCES,
    "UNAUTHENTICATED": errno.EACCES,
    "UNAVAILABLE": errno.EHOSTDOWN,
    "DEADLINE_EXCEEDED": errno.ETIMEDOUT,
    "ABORTED": errno.ETIMEDOUT,
    "NOT_FOUND": errno.ENODEV,  # The bucket. A file that is absent is an empty answer.
}
_OF_SERVER = re.compile(r"\[(http|curl)_")  # A part of each error of a request.
_OF_CREDENTIALS = re.compile(
    "[Cc]redentials|Expired ?Token|InvalidAccessKeyId|Signature|InvalidToken"
)
# Errors of reading that say nothing about the content of the files.
NO_DAMAGE = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENODEV),
        *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EINTR),
    }
)


class Cause(NamedTuple):
    """The cause of an error, what to do, both without a full stop, and the system's number."""

    what: str
    remedy: str
    code: int | None


def explained(error: BaseException | None) -> Cause:
    """Returns the cause of an error of reading or writing; None is an error of another host.

    TensorStore reports an error of the system as a text in a ValueError.

    >>> explained(ValueError("RESOURCE_EXHAUSTED: No space left on device [a/b.cc:1]")).what
    'no space left on device'
    """
    if error is None:
        return Cause("another host reports an error", "Look at its output", None)
    while error.__cause__ is not None:  # A file of metrics reports the system's error as its cause.
        error = error.__cause__
    code, text = None, None
    if isinstance(error, OSError):
        code, text = error.errno, error.strerror
    if code is None and _OF_SERVER.search(str(error)):
        code, text = answer_in(error)
    if code is None:
        code = next((each for each in _REMEDIES if os.strerror(each) in str(error)), None)
    if code is None:
        return Cause(first_line(error).rstrip("."), "Remove the cause", None)
    what = text or os.strerror(code)
    is_of_bucket = "://" in str(getattr(error, "filename", "")) or _OF_SERVER.search(str(error))
    remedies = _REMEDIES | _REMEDIES_OF_BUCKETS if is_of_bucket else _REMEDIES
    if what.split()[0][1:].islower():  # A name such as NoSuchBucket stays.
        what = what[0].lower() + what[1:]
    return Cause(what, remedies.get(code, "Remove the cause"), code)


def answer_in(error: BaseException) -> tuple[int, str]:
    """Returns the number and the words of a server's answer, which TensorStore reports as a text.

    The number is that of the system for such an error.

    >>> answer_in(ValueError("PERMISSION_DENIED: Access Denied [http_response_code='403']"))
    (13, 'Access Denied')
    """
    status, _, rest = str(error).partition(": ")
    is_status = status.isupper() and bool(rest)
    code = _STATUSES.get(status, errno.EHOSTDOWN if _OF_SERVER.search(rest) else errno.EIO)
    if _OF_CREDENTIALS.search(str(error)):  # S3 answers some of them as bad requests.
        code = errno.EACCES
    words = (rest if is_status else str(error)).partition(" [")[0].rpartition('": ')[2]
    # The answer to some requests has no text.
    return code, words.replace("Unknown", os.strerror(code)).rstrip(".")


def is_of_disk(error: BaseException) -> bool:
    """Returns whether an error of reading may pass, so that the content may still be sound.

    >>> is_of_disk(OSError(5, "Input/output error")), is_of_disk(ValueError("a checksum differs"))
    (True, False)
    """
    code = explained(error).code
    return code == errno.EIO or code in NO_DAMAGE
