"""The two kinds of failure that are told in a sentence instead of a traceback.

Every message has three parts: the rule, what was received, and the way out.
"""


class UserError(ValueError):
    """What a user gave cannot be used; nothing has been written."""


class RunError(RuntimeError):
    """Something happened to a run that was started properly."""


def first_line(error: Exception) -> str:
    """What an error says first, as a sentence."""
    line = next((line for line in str(error).splitlines() if line.strip()), "")
    return line if line.endswith((".", "!", "?")) else line + "."
