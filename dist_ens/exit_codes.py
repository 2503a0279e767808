"""Exit codes of the commands, by which a launcher decides whether to start a run again."""

import enum


class ExitCode(enum.IntEnum):
    """Exit code of a command.

    A launcher starts a command again after `PREEMPTED`, and after a code of `INFRASTRUCTURE`. After
    the other codes the command would end in the same way the next time.

    >>> ExitCode.PREEMPTED.value
    42
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
    HOST_LOST = 134


# Ends of a process by its machine: SIGABRT (134), as after the death of another host, SIGKILL
# (137), SIGSEGV (139) and SIGTERM (143).
INFRASTRUCTURE = (134, 137, 139, 143)
# Codes after which a launcher starts the command again.
RESTARTED = (int(ExitCode.PREEMPTED), *INFRASTRUCTURE)


def code_of_shell(code: int) -> int:
    """Returns an exit code as a shell gives it, in [0, 255].

    Args:
        code: Exit code, or the negative number of the signal that ended the process, as
            `subprocess` gives it.

    >>> code_of_shell(-9), code_of_shell(42)
    (137, 42)
    """
    return 128 - code if code < 0 else code
