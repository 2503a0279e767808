"""The two kinds of failure that are told in a sentence instead of a traceback.

Every message has three parts: the rule, what was received, and the way out.
"""

from collections.abc import Sequence


class UserError(ValueError):
    """What a user gave cannot be used; nothing has been written."""


class BrokenMembersError(UserError):
    """Some members predict NaN, and what is asked needs all predictions.

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
    """What an error says first, as a sentence."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return line if line.endswith((".", "!", "?")) else line + "."
