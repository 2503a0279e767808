"""Exit codes of the commands, by which a launcher decides whether to start a run again."""

import enum


class ExitCode(enum.IntEnum):
    """Exit code of a command.

    A launcher starts a command again after `PREEMPTED` and after a code that `is_infrastructure`.
    All other codes would be the same the next time.

    >>> ExitCode.PREEMPTED.value, is_restarted(ExitCode.PREEMPTED), is_restarted(ExitCode.USAGE)
    (42, True, False)
    """

    DONE = 0
    FAULT = 1
    USAGE = 2
    PREEMPTED = 42
    DIVERGED = 43
    DAMAGED = 44
    IMPOSSIBLE_LAYOUT = 45
    DISK_FULL = 46
    INTERRUPTED = 130
    ABORTED = 134


def is_infrastructure(code: int) -> bool:
    """Returns whether a process ended because of its machine, and not by itself.

    These are the ends by SIGABRT (134), as after the death of another host, SIGKILL (137), SIGSEGV
    (139) and SIGTERM (143).

    Args:
        code: Exit code as a shell gives it, in [0, 255], or the negative number of the signal that
            ended the process, as `subprocess` gives it.

    >>> is_infrastructure(-9), is_infrastructure(137), is_infrastructure(1)
    (True, True, False)
    """
    return (128 - code if code < 0 else code) in (134, 137, 139, 143)


def is_restarted(code: int) -> bool:
    """Returns whether a launcher starts a run again that ended with a code.

    Args:
        code: Exit code; see `is_infrastructure`.
    """
    return code == ExitCode.PREEMPTED or is_infrastructure(code)
