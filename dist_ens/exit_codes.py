"""Exit codes of the commands, by which a launcher decides whether to start a run again."""

import enum


class ExitCode(enum.IntEnum):
    """Exit code of a command. A launcher starts the command again after `PREEMPTED` alone.

    After the other codes the command would end in the same way the next time.

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
