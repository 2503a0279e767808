"""The two kinds of failure that are told in a sentence instead of a traceback.

A message says what is wrong, with the values, and then what to do.
"""

from collections.abc import Sequence


class UserError(ValueError):
    """An argument, a field or a file of the user that cannot be used. Nothing has been written."""


class BrokenMembersError(UserError):
    """Members whose predictions are NaN, where the predictions of all members are needed.

    Args:
        member_ids: Ids of these members.
    """

    def __init__(self, member_ids: Sequence[int]) -> None:
        super().__init__(
            f"Members {list(member_ids)} predict NaN, so the ensemble does too. Pass "
            "--leave_out_broken to average the others, or train again with a lower "
            "--config.optimizer.learning_rate."
        )
        self.member_ids = tuple(member_ids)


class RunError(RuntimeError):
    """Something happened to a run that was started properly."""


def first_line(error: Exception) -> str:
    """Returns the first line of an error's message, as a sentence."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return line if line.endswith((".", "!", "?")) else line + "."
