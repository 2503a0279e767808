"""What every command begins and ends with: flags, the cluster, errors told as sentences."""

import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
from absl import app, flags, logging

from dist_ens import cluster
from dist_ens.errors import RunError, UserError

_COORDINATOR_ADDRESS = flags.DEFINE_string(
    "coordinator_address", None, "host:port of process 0; not needed where JAX finds the cluster."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Processes in all; likewise.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Of this process, from 0; likewise.")


def run(main: Callable[[], int | None], prepare: Callable[[list[str]], list[str]] = list) -> None:
    """Runs a command and ends the process.

    Its exit code is what `main` returns (None: 0); 2 for what a user gave, 1 for what happened.

    Args:
        main: The command.
        prepare: Takes the command line before it is parsed, returns what is left to parse.
    """

    def parse(argv: Sequence[str]) -> list[str]:
        try:
            rest = flags.FLAGS(prepare(list(argv)))
        except UserError as error:
            _leave(2, f"error: {error}")
        except flags.Error as error:
            _leave(2, f"error: {error}. --help lists the flags.")
        if len(rest) > 1:
            _leave(2, f"error: Arguments are flags, --NAME=VALUE. Received: {' '.join(rest[1:])}.")
        return rest

    def command(_: Sequence[str]) -> None:
        if not flags.FLAGS["verbosity"].present:  # the libraries' own progress is not a user's
            logging.set_verbosity(logging.WARNING)
        try:
            cluster.start(_COORDINATOR_ADDRESS.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
            code = main() or 0
        except UserError as error:
            _leave(2, f"error: {error}")
        except RunError as error:
            _leave(1, f"error: {error}")
        except KeyboardInterrupt:
            _leave(130, "Interrupted; what was saved before is kept.")
        except Exception:
            _leave(1, traceback.format_exc())
        if code:
            _leave(code)

    app.run(command, flags_parser=parse)


def required(flag: flags.FlagHolder) -> Any:
    """The value of a flag that must be given.

    Raises:
        UserError: If it was not.
    """
    if flag.value is None:
        raise UserError(f"This command needs --{flag.name}. Received: none. Add --{flag.name}=….")
    return flag.value


def write_file(flag: flags.FlagHolder, write: Callable[[pathlib.Path], None]) -> None:
    """Writes the file that a flag names.

    Raises:
        UserError: If the system refuses.
    """
    try:
        write(pathlib.Path(flag.value))
    except OSError as error:
        raise UserError(
            f"The output is a file that can be written. Received: --{flag.name}={flag.value}: "
            f"{error.strerror}. Choose another path."
        ) from error


def _leave(code: int, message: str = "") -> NoReturn:
    """Ends the process; at once where others wait for it, so that they fail with it, not later."""
    if message:
        print(message, file=sys.stderr)
    if jax.distributed.is_initialized() and jax.process_count() > 1 and code not in (130, 143):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
