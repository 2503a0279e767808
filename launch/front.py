"""What every command begins and ends with: flags, the cluster, errors told as sentences."""

import contextlib
import os
import pathlib
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import jax
from absl import app, flags, logging
from rich.console import Console
from rich.table import Table

from dist_ens import cluster
from dist_ens.cache import use_compile_cache
from dist_ens.config import did_you_mean
from dist_ens.errors import RunError, UserError, first_line

_COORDINATOR_ADDRESS = flags.DEFINE_string(
    "coordinator_address", None, "host:port of process 0; not needed where JAX finds the cluster."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Processes in all; likewise.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Of this process, from 0; likewise.")
_BEGINS_PLATFORMS = "xla_bridge.py"  # JAX has no error of its own for it
_GRACE_SECS = 3.0
_WIDEST_TABLE = 1000  # columns


def run(
    main: Callable[[], int | None],
    prepare: Callable[[list[str]], list[str]] = list,
    joins_cluster: Callable[[], bool] = lambda: True,
) -> None:
    """Runs a command and ends the process.

    Its exit code is what `main` returns (None: 0); 2 for what a user gave, 1 for what happened.

    Args:
        main: The command.
        prepare: Takes the command line before it is parsed, returns what is left to parse.
        joins_cluster: Whether the processes of a cluster run the command together.
    """

    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on it is told

    def parse(argv: Sequence[str]) -> list[str]:
        if "--help" in argv or "-h" in argv:
            module = sys.modules[main.__module__]
            # absl knows the flags of a file that is run by its path.
            name = sys.argv[0] if module.__name__ == "__main__" else module.__name__
            flags_of = (flags.FLAGS.module_help(m) for m in (name, __name__))
            print(module.__doc__, *flags_of, sep="\n")
            sys.exit(0)
        with _told_as_sentences():
            # A config file may compute, and JAX joins a cluster before it computes.
            flags.FLAGS(argv, known_only=True)
            use_compile_cache()
            if joins_cluster():
                cluster.start(_COORDINATOR_ADDRESS.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
            cluster.use_cores_as_devices()
            rest = flags.FLAGS(prepare(list(argv)))
            if len(rest) > 1:
                raise UserError(
                    f"Arguments are flags, --NAME=VALUE. Received: {' '.join(rest[1:])}. --help "
                    "lists the flags."
                )
        return rest

    def command(_: Sequence[str]) -> None:
        if not flags.FLAGS["verbosity"].present:  # the libraries' own progress is not a user's
            logging.set_verbosity(logging.WARNING)
        with _told_as_sentences():
            code = main() or 0
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left that would tell of it
        if code:
            sys.exit(code)

    app.run(command, flags_parser=parse)


@contextlib.contextmanager
def _told_as_sentences() -> Iterator[None]:
    try:
        yield
    except flags.IllegalFlagValueError as error:
        _fail(2, f"error: A flag takes a value of its kind and range. Received: {error}.")
    except (UserError, flags.Error) as error:
        _fail(2, f"error: {error}")
    except RunError as error:
        _fail(1, f"error: {error}")
    except KeyboardInterrupt:
        # What other threads are in the middle of would complain of an end in good order.
        _end(130, "Interrupted; what was saved before, if anything, is kept.")
    except Exception as error:
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if pathlib.Path(raised_in).name != _BEGINS_PLATFORMS:
            _fail(1, traceback.format_exc())
        platforms = os.environ.get("JAX_PLATFORMS")
        told = f"JAX_PLATFORMS={platforms}" if platforms else "no JAX_PLATFORMS"
        what = first_line(error) if str(error) else f"an {type(error).__name__}."
        _end(
            1,
            f"error: JAX begins the platforms that it is told, or finds. Received: {told}, and "
            f"from JAX: {what} Correct JAX_PLATFORMS, or install what the platform needs (for GPUs "
            "the extra [cuda], for TPUs [tpu]).",
        )


def _end(code: int, message: str) -> NoReturn:
    """Ends the process at once."""
    try:
        print(message, file=sys.stderr, flush=True)
        sys.stdout.flush()
    finally:
        os._exit(code)


def required(flag: flags.FlagHolder) -> Any:
    """The value of a flag that must be given.

    Raises:
        UserError: If it was not.
    """
    if not flag.value:
        raise UserError(f"This command needs --{flag.name}. Received: none. Add --{flag.name}=….")
    return flag.value


def names(flag: flags.FlagHolder, known: Iterable[str]) -> list[str]:
    """The names that a flag lists.

    Raises:
        UserError: If one of them is not known.
    """
    known = list(known)
    if not flag.value:
        raise UserError(
            f"--{flag.name} takes names among {', '.join(known)}. Received: none. Leave the flag "
            "out for all."
        )
    for name in flag.value:
        if name not in known:
            raise UserError(
                f"--{flag.name} takes names among {', '.join(known)}. Received: {name!r}."
                f"{did_you_mean(name, known)} Leave the flag out for all."
            )
    return flag.value


def print_table(console: Console, table: Table) -> None:
    """Prints a table whose figures are never cut, however narrow the console or file."""
    widest = console.options.update(width=_WIDEST_TABLE)
    width = console.width
    console.width = max(width, console.measure(table, options=widest).maximum)
    console.print(table)
    console.width = width


def check_outputs(*of_files: flags.FlagHolder) -> None:
    """Finds out before the work, not after it, whether files that flags name can be written.

    Raises:
        UserError: If one cannot.
    """
    # Process 0 writes. Without a cluster that is this one, and no device is taken to find it out.
    if jax.distributed.is_initialized() and not cluster.is_main():
        return
    for flag in of_files:
        if flag.value is None:
            continue
        path = pathlib.Path(flag.value)
        try:
            is_folder, has_place = path.is_dir(), path.parent.is_dir()
        except OSError as error:  # a folder above it is closed
            raise _unwritable(flag, error.strerror) from error
        if is_folder:
            raise _unwritable(flag, "it is a folder")
        if not has_place:
            is_there = path.parent.exists()
            why = f"{path.parent} is no folder" if is_there else f"there is no folder {path.parent}"
            raise _unwritable(flag, why)
        # What is there is replaced by what is written beside it.
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise _unwritable(flag, f"nothing can be written in {path.parent}")


def write_file(flag: flags.FlagHolder, write: Callable[[pathlib.Path], None]) -> None:
    """Writes the file that a flag names.

    Raises:
        RunError: If the system refuses.
    """
    try:
        write(pathlib.Path(flag.value))
    except OSError as error:
        raise RunError(
            f"What was found is written at the end. Received: --{flag.name}={flag.value}: "
            f"{error.strerror or error}. See to it, and run the same command again."
        ) from error


def _unwritable(flag: flags.FlagHolder, why: str | None) -> UserError:
    return UserError(
        f"The output is a file that can be written. Received: --{flag.name}={flag.value}: {why}. "
        "Choose another path."
    )


def _fail(code: int, message: str) -> NoReturn:
    """Ends the process; on several hosts without waiting for those that wait for it."""
    print(message, file=sys.stderr, flush=True)
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        if cluster.is_main():
            time.sleep(_GRACE_SECS)  # with it ends the coordinator, and every process that is left
        os._exit(code)
    sys.exit(code)
