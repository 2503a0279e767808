"""Exit codes of the commands; see `dist_ens.errors`."""

from dist_ens.errors import RESTARTED, ExitCode, code_of_shell

__all__ = ["RESTARTED", "ExitCode", "code_of_shell"]
