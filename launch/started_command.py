"""The command after `--` that a launcher starts: dist-ens slurm render --nodes=2 -- train …."""

import re
from collections.abc import Sequence

from dist_ens.ground.commands import command_line
from dist_ens.ground.errors import UserError, did_you_mean
from dist_ens.ground.paths import shortened
from dist_ens.storage import place_of

# Verbs that the processes of a cluster can run together.
STARTED = ("train", "evaluate", "predict")


class StartedCommand:
    """The command line of a launcher: [ACTION] FLAGS -- VERB FLAGS."""

    def __init__(self, *actions: str, alone: str | None = None) -> None:
        self._actions, self._alone = actions, alone
        self.action = actions[0] if actions else ""
        self.arguments: tuple[str, ...] = ()
        self.launcher: tuple[str, ...] = ()

    def prepare(self, argv: Sequence[str]) -> list[str]:
        """Takes the action and the command from a command line, and returns what is left."""
        before, after = split_at_dashes(argv)
        if self._actions and before[1:] and not before[1].startswith("-"):
            self.action = _one_of(before.pop(1), self._actions, "is not an action.")
        self.launcher = tuple(before[1:])
        if self.action == self._alone:
            return before
        if not after:
            raise UserError("The command to start is missing. Add it: -- train --config=FILE …")
        _one_of(after[0], STARTED, "cannot be started after --.")
        if workdir := value_of(after, "workdir"):
            place_of(workdir, "--workdir")  # Only a check.
        self.arguments = tuple(after)
        return before

    def line(self, *words: str) -> str:
        """Returns the line of a shell that starts the same command, and not as a dry run."""
        own = [flag for flag in self.launcher if not re.match("--?dry_run", flag)]
        return command_line(*words, *own, "--", *self.arguments)


def _one_of(word: str, known: Sequence[str], problem: str) -> str:
    if word not in known:
        choices = f"{did_you_mean(word, known)} Choose one of {', '.join(known)}."
        raise UserError(f"{shortened(word)} {problem}{choices}")
    return word


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments before the first `--`, and those after it."""
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def value_of(arguments: Sequence[str], name: str) -> str | None:
    """Returns the last value of a flag in a command line; None if the flag is not there.

    >>> value_of(["train", "--workdir=a", "-workdir", "b"], "workdir")
    'b'
    """
    value = None
    words = iter(arguments)
    for word in words:
        given, equals, text = word.partition("=")
        if given in (f"-{name}", f"--{name}"):
            value = text if equals else next(words, None)
    return value
