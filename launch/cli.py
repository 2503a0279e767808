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
from dist_ens.compile_cache import use_compile_cache
from dist_ens.config import did_you_mean
from dist_ens.errors import RunError, UserError, first_line
from dist_ens.paths import given_path, shortened
from launch import ends
from launch.environment import check_xla_flags

_COORDINATOR_ADDRESS = flags.DEFINE_string(
    "coordinator_address", None, "host:port of process 0; not needed where JAX finds the cluster."
)
_NUM_PROCESSES = flags.DEFINE_integer("num_processes", None, "Processes in all; likewise.")
_PROCESS_ID = flags.DEFINE_integer("process_id", None, "Of this process, from 0; likewise.")
_BEGINS_PLATFORMS = "xla_bridge.py"  # JAX has no error of its own for it
_DEVICES_BY = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
_GRACE_SECS = 3.0
_LONGEST_NAME = 200  # characters of a flag's name, those of the config's fields included
_HELP = ("help", "h", "?", "helpshort")
_SHOWN_TWICE = 40  # characters of a value that its refusal may repeat
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
        if any(argument.startswith("-") and argument.lstrip("-") in _HELP for argument in argv):
            module = sys.modules[main.__module__]
            # absl knows the flags of a file that is run by its path.
            name = sys.argv[0] if module.__name__ == "__main__" else module.__name__
            flags_of = (flags.FLAGS.module_help(m) for m in (name, __name__))
            ends.show_and_exit("\n".join([module.__doc__ or "", *flags_of]))
        with _told_as_sentences():
            # A config file may compute, and JAX joins a cluster before it computes.
            parsed(argv, known_only=True)
            use_compile_cache()
            check_xla_flags()
            if joins_cluster():
                cluster.start(_COORDINATOR_ADDRESS.value, _NUM_PROCESSES.value, _PROCESS_ID.value)
            cluster.use_cores_as_devices()
            rest = parsed(prepare(list(argv)))
            if len(rest) > 1:
                raise UserError(
                    f"{shortened(' '.join(rest[1:]))} is no flag: arguments are written "
                    "--NAME=VALUE. --help lists the flags."
                )
        return rest

    def command(_: Sequence[str]) -> None:
        if not flags.FLAGS["verbosity"].present:  # the libraries' own progress is not a user's
            logging.set_verbosity(logging.WARNING)
        with _told_as_sentences():
            code = main() or 0
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # nothing is left that would tell of it
        sys.exit(ends.exit_code(code))

    app.run(command, flags_parser=parse)


def parsed(argv: Sequence[str], *, known_only: bool = False) -> list[str]:
    """Parses flags, and returns the arguments that are none.

    Args:
        argv: The command line, with the program's name first.
        known_only: Whether unknown flags are returned among the other arguments.

    Raises:
        UserError: If a flag is unknown, or refuses its value.
    """
    for argument in argv[1:]:  # absl compares an unknown name with every flag, however long it is
        name = argument.lstrip("-").partition("=")[0]
        if argument.startswith("-") and len(name) > _LONGEST_NAME:
            raise UserError(f"{shortened(name)} is no flag. --help lists the flags.")
    try:
        return flags.FLAGS(argv, known_only=known_only)
    except flags.IllegalFlagValueError as error:
        raise UserError(_refusal(error)) from error
    except UserError:
        raise
    except UnicodeDecodeError as error:
        raise UserError(f"--flagfile cannot be read as text: {error}. Correct it.") from error
    except (flags.Error, ValueError) as error:  # absl's own flags raise the latter too
        why = str(error).removeprefix("ERROR:: ").replace(" ?", "?").rstrip(".")
        end = "" if why.endswith("?") else "."
        raise UserError(f"{why}{end} --help lists the flags.") from error


def _refusal(error: flags.IllegalFlagValueError) -> str:
    """Returns the message for a value that a flag refuses."""
    cause = error.__context__
    if isinstance(cause, UserError):  # of a path, say
        return str(cause)
    given = str(error).removeprefix("flag ")
    name, equals, value = given.removesuffix(f": {cause}").partition("=")
    if cause is None or not equals:
        return f"{given.rstrip('.')}. --help lists the flags."
    why, start = str(cause.args[0]), value[:_SHOWN_TWICE]
    if len(value) > len(start):  # it is shown already
        why = why.partition(start)[0].rstrip(": '\"")
    return f"{name} cannot be {shortened(value)}: {why.rstrip('.')}. --help says what it takes."


@contextlib.contextmanager
def _told_as_sentences() -> Iterator[None]:
    try:
        yield
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
            traceback.print_exc()
            _leave(1)
        given = [
            f"{name}={shortened(os.environ[name])}" for name in _DEVICES_BY if os.environ.get(name)
        ]
        told = f" with {', '.join(given)}" if given else ""
        what = first_line(error) if str(error) else f"an {type(error).__name__}."
        _end(
            2 if given else 1,  # somebody said which devices, or the machine has none that work
            f"error: JAX cannot begin its devices{told}: {what} Correct the variables "
            f"{', '.join(_DEVICES_BY)}, or install what the platform needs (for GPUs the extra "
            "[cuda], for TPUs [tpu]).",
        )


def _end(code: int, message: str) -> NoReturn:
    """Ends the process at once."""
    try:
        ends.say(message)
        sys.stdout.flush()
    finally:
        os._exit(code)


def required(flag: flags.FlagHolder) -> Any:
    """The value of a flag that must be given.

    Raises:
        UserError: If it was not.
    """
    if not flag.value:
        raise UserError(f"--{flag.name} is missing. Add --{flag.name}=….")
    return flag.value


def names(flag: flags.FlagHolder, known: Iterable[str]) -> list[str]:
    """The names that a flag lists.

    Raises:
        UserError: If one of them is not known.
    """
    known = list(known)
    if not flag.value:
        raise UserError(
            f"--{flag.name} names nothing. Choose among {', '.join(known)}, or leave the flag out "
            "for all."
        )
    for name in flag.value:
        if name not in known:
            raise UserError(
                f"--{flag.name} cannot take {shortened(name)}.{did_you_mean(name, known)} Choose "
                f"among {', '.join(known)}, or leave the flag out for all."
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
        path = flag.value
        is_folder, has_place = path.is_dir(), path.parent.is_dir()
        if is_folder:
            raise _unwritable(flag, "it is a folder")
        # A file is written beside the place where it goes, under a longer name.
        given_path(path.with_name(f"{path.name}.unfinished"), f"--{flag.name}")
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
        write(flag.value)
    except OSError as error:
        raise RunError(
            f"--{flag.name}={shortened(str(flag.value))} could not be written: "
            f"{error.strerror or error}. See to it, and run the same command again."
        ) from error


def _unwritable(flag: flags.FlagHolder, why: str | None) -> UserError:
    return UserError(
        f"--{flag.name}={shortened(str(flag.value))} cannot be written: {why}. Choose another path."
    )


def _fail(code: int, message: str) -> NoReturn:
    """Prints a message and ends the process."""
    ends.say(message)
    _leave(code)


def _leave(code: int) -> NoReturn:
    """Ends the process; on several hosts without waiting for those that wait for it."""
    if jax.distributed.is_initialized() and jax.process_count() > 1:
        if cluster.is_main():
            time.sleep(_GRACE_SECS)  # with it ends the coordinator, and every process that is left
        os._exit(code)
    sys.exit(code)
