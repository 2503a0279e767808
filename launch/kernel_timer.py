"""A timer of the kernel that kills this process, also while no Python code can run."""

import contextlib
import ctypes
import signal
import sys

_CLOCK_MONOTONIC, _SIGEV_SIGNAL = 1, 0  # Of timer_create(2).


class _Event(ctypes.Structure):
    """The struct `sigevent`, of 64 bytes: which signal is sent."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("unused", ctypes.c_char * 48),
    )


class _Time(ctypes.Structure):
    """The struct `timespec`."""

    _fields_ = (("secs", ctypes.c_long), ("nanosecs", ctypes.c_long))


class _Setting(ctypes.Structure):
    """The struct `itimerspec`: when the timer ends, and whether it starts again."""

    _fields_ = (("interval", _Time), ("value", _Time))


class KillTimer:
    """A timer at whose end this process gets SIGKILL, which needs no handler.

    A call of C that holds the GIL keeps all Python code from running. Without the functions of
    Linux the timer does nothing. A process that is forked does not have it.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._timer: ctypes.c_void_p | None = None
        if not sys.platform.startswith("linux"):
            return
        event = _Event(number=signal.SIGKILL, notify=_SIGEV_SIGNAL)
        timer = ctypes.c_void_p()
        with contextlib.suppress(AttributeError):  # An old glibc has it in another library.
            if not self._libc.timer_create(
                _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)
            ):
                self._timer = timer

    def start(self, secs: float) -> None:
        """Starts the timer, or starts it again.

        Args:
            secs: Time until this process is killed, in seconds, more than 0.
        """
        if self._timer is None:
            return
        whole, part = divmod(secs, 1.0)
        setting = _Setting(value=_Time(int(whole), int(part * 1e9)))
        self._libc.timer_settime(self._timer, 0, ctypes.byref(setting), None)
