"""Programs of a cluster, such as sbatch and gcloud, that a launcher calls."""

import subprocess
from collections.abc import Sequence

from dist_ens.errors import UserError


def run_program(
    call: Sequence[str], advice: str, *, text: str | None = None, keeps_output: bool = False
) -> subprocess.CompletedProcess[str]:
    """Runs a program to its end.

    Args:
        call: The program and its arguments.
        advice: Sentence that says what to do if the program is not installed.
        text: Text for its standard input. Default: that of this process.
        keeps_output: Whether to return what it prints, in place of printing it.

    Raises:
        UserError: If the program is not installed.
    """
    try:
        return subprocess.run(
            call, input=text, capture_output=keeps_output, text=True, errors="surrogateescape"
        )
    except FileNotFoundError as error:
        raise UserError(f"{call[0]} is not on the PATH. {advice}") from error
