"""The common parts of all commands: flags, the cluster, and errors reported as messages."""

import contextlib
import errno
import functools
import os
import pathlib
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from logging import LogRecord
from typing import Any, NoReturn

import jax
from absl import app, flags, logging

from dist_ens.ground.causes import explained
from dist_ens.ground.commands import printable, quoted
from dist_ens.ground.errors import RunError, UserError, code_of_write, first_line
from dist_ens.ground.file_writing import UNFINISHED
from dist_ens.ground.paths import shortened
from dist_ens.processes import cluster
from dist_ens.processes.compile_cache import use_compile_cache
from dist_ens.processes.stop_signal import StopSignal
from dist_ens.storage import Place, file_at, place_of
from launch import hosts, signals, stdio
from launch.started_command import split_at_dashes

START_TIMEOUT_SECS = flags.DEFINE_float(
    "start_timeout_secs", 600.0, "Seconds to wait for the others at the start.", lower_bound=1.0
)
_HEARTBEAT_TIMEOUT_SECS = flags.DEFINE_float(
    "heartbeat_timeout_secs",
    100.0,
    "Seconds of silence after which a process is lost, and the others end.",
    lower_bound=1.0,
)
_CLUSTER: Sequence[flags.FlagHolder] = (
    flags.DEFINE_string(
        "coordinator_address", None, "host:port of process 0. Not needed where JAX finds it."
    ),
    flags.DEFINE_integer(
        "num_processes", None, "Number of processes. Not needed where JAX finds the cluster."
    ),
    flags.DEFINE_integer("process_id", None, "Number of this process, from 0."),
    START_TIMEOUT_SECS,
    _HEARTBEAT_TIMEOUT_SECS,
    flags.DEFINE_float(
        "shutdown_timeout_secs", 300.0, "Seconds to wait for the others at the end.", lower_bound=1
    ),
)
# JAX has no special error for a platform that cannot start, so the file of the error decides.
_BEGINS_PLATFORMS = "xla_bridge.py"
_DEVICES_BY = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")
# Errors of writing that the state of a disk explains, and no fault of the program.
_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO, errno.ESTALE)
_HELP = ("help", "h", "?", "helpshort")


def run(
    main: Callable[[], int | None],
    prepare: Callable[[list[str]], list[str]] = list,
    joins_cluster: Callable[[], bool] = lambda: True,
) -> None:
    """Runs a command, and ends the process with its result, 2 after a `UserError`, or 1.

    `prepare` takes the command line before it is parsed, and returns what is left to parse.
    """
    signals.raise_at_interrupt()
    StopSignal.numbers = (signal.SIGINT, *signals.caught_preemptions())

    def parse(argv: Sequence[str]) -> list[str]:
        """Parses the command line and starts JAX."""
        own, _ = split_at_dashes(argv)
        if any(argument.startswith("-") and argument.lstrip("-") in _HELP for argument in own):
            _show_help(sys.modules[main.__module__])
        with _reported_as_sentences():
            # A config file may compute with JAX, which must join a cluster before that.
            parsed(argv, known_only=True)
            use_compile_cache()
            if joins_cluster():
                cards = cluster.start(**{flag.name: flag.value for flag in _CLUSTER})
                hosts.begin(cards, _HEARTBEAT_TIMEOUT_SECS.value)
            cluster.use_cores_as_devices()
            rest = parsed(prepare(list(argv)))
            if len(rest) > 1:
                raise UserError(f"{shortened(' '.join(rest[1:]))} is not a flag, as --NAME=VALUE.")
        return rest

    def work(_: Sequence[str]) -> None:
        """Runs the command and ends the process with its exit code."""
        if not flags.FLAGS["verbosity"].present:  # Messages of libraries are not for the user.
            logging.set_verbosity(logging.WARNING)
        logging.get_absl_handler().setFormatter(_Printable())
        warnings.formatwarning = lambda message, *_, **__: f"{printable(str(message))}\n"
        hosts.catch_abort()
        with _reported_as_sentences():
            code = main() or 0
        signals.end_at_interrupt()  # No code that would report it is left.
        hosts.end(stdio.exit_code(code))

    app.run(work, flags_parser=parse)


def command(
    main: Callable[[], int | None],
    prepare: Callable[[list[str]], list[str]] = list,
    joins_cluster: Callable[[], bool] = lambda: True,
) -> Callable[[], None]:
    """Returns a function that runs a command; see `run`."""
    return functools.partial(run, main, prepare, joins_cluster)


def _show_help(module: types.ModuleType) -> NoReturn:
    # absl stores the flags of a file that is run as a script under the path of the file.
    name = sys.argv[0] if module.__name__ == "__main__" else module.__name__
    flags_of = filter(None, map(flags.FLAGS.module_help, (name, "launch.config_flags", __name__)))
    stdio.show_and_exit("\n".join([module.__doc__ or "", *flags_of]))


class _Printable(logging.PythonFormatter):
    """A formatter of log messages, in which text from a file is escaped."""

    def format(self, record: LogRecord) -> str:
        return printable(super().format(record))


def parsed(argv: Sequence[str], *, known_only: bool = False) -> list[str]:
    """Parses flags, and returns the arguments that are not flags."""
    try:
        return flags.FLAGS(argv, known_only=known_only)
    except flags.IllegalFlagValueError as error:
        cause = error.__context__
        if isinstance(cause, UserError):  # The value is a path, for example.
            raise cause from error
        name, _, value = str(error).removesuffix(f": {cause}").partition("=")
        why = cause.args[0] if cause else "it is not allowed"
        flag = name.removeprefix("flag ")
        raise UserError(f"{flag} cannot be {shortened(value)}: {why}.") from error
    except UserError:
        raise
    except (flags.Error, ValueError) as error:  # absl's own flags also raise a ValueError.
        why = str(error).removeprefix("ERROR:: ").replace(" ?", "?").rstrip(".")
        end = "" if why.endswith("?") else "."
        raise UserError(f"{why}{end} --help lists the flags.") from error


class _Argument(str):
    """An argument of the command line. Two of them are never the same object."""


def split_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the arguments of a command line that are not flags, and the command line without."""
    # A word is known by the object that it is: a flag may have a value of the same text.
    argv = [*map(_Argument, argv)]
    words = [word for word in parsed(argv, known_only=True)[1:] if not word.startswith("-")]
    return words, [argument for argument in argv if not any(argument is word for word in words)]


class RunFolders:
    """The folders of runs on a command line, which are typed without a flag: `places`."""

    def __init__(self, example: str) -> None:
        self._example = example
        self.places: list[Place] = []

    def prepare(self, argv: Sequence[str]) -> list[str]:
        """Returns the command line without the folders."""
        words, rest = split_words(argv)
        if not words or any(word.startswith("--workdir") for word in rest):
            raise UserError(
                f"The folder of a run is missing. Type it without a flag: {self._example}."
            )
        self.places = [place_of(word, "RUN") for word in words]
        return rest


@contextlib.contextmanager
def _reported_as_sentences() -> Iterator[None]:
    """Reports an error of its body as a message, and ends the process."""
    try:
        yield
    except (UserError, RunError) as error:
        hosts.wait_if_of_another(error)
        _fail(error.exit_code, f"error: {error}")
    except KeyboardInterrupt:
        # An orderly end would make other threads, which are still working, print errors.
        hosts.leave(
            signals.exit_code(),
            "Interrupted. Checkpoints and files that were saved before are kept.",
        )
    except Exception as error:
        hosts.wait_if_of_another(error)
        is_of_bucket = isinstance(error, OSError) and "://" in str(error.filename)
        if isinstance(error, OSError) and (is_of_bucket or error.errno in _OF_DISKS):
            why = explained(error)
            where = f" {quoted(error.filename)}" if error.filename else ""
            _fail(
                code_of_write(error),
                f"error: A file{where} could not be read or written: {why.what}. {why.remedy}, "
                "then run the same command again.",
            )
        raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
        if pathlib.Path(raised_in).name == _BEGINS_PLATFORMS:
            _leave_without_devices(error)
        traceback.print_exc()
        if hosts.are_several():
            hosts.leave(1, f"error: {type(error).__name__}: {first_line(error)}")
        sys.exit(1)


def _leave_without_devices(error: Exception) -> NoReturn:
    """Reports that JAX cannot start its devices, and ends the process."""
    given = [f"{name}={shortened(os.environ[name])}" for name in _DEVICES_BY if name in os.environ]
    what = first_line(error) if str(error) else f"an {type(error).__name__}."
    hosts.leave(
        2 if given else 1,  # It is the user's error only if a variable chose the devices.
        f"error: JAX cannot start its devices{' with ' if given else ''}{', '.join(given)}: {what} "
        f"Correct the variables {', '.join(_DEVICES_BY)}, or install what the "
        "platform needs (for GPUs the extra [cuda], for TPUs [tpu]).",
    )


def _fail(code: int, message: str) -> NoReturn:
    if hosts.are_several():  # An orderly end would wait for processes that may never end.
        hosts.leave(code, message)
    stdio.fail(code, message)


def required(flag: flags.FlagHolder, example: str) -> Any:
    """Returns the value of a flag that must be given. The error message has the example."""
    if not flag.value:
        raise UserError(f"--{flag.name} is missing. Add it, such as --{flag.name}={example}.")
    return flag.value


def names(flag: flags.FlagHolder, known: Iterable[str]) -> list[str]:
    """Returns the names in the list of a flag, which are among those known."""
    known = list(known)
    for name in flag.value or [""]:
        if name not in known:
            raise UserError(f"--{flag.name} takes {', '.join(known)}, and not {shortened(name)}.")
    return flag.value


def check_outputs(*of_files: flags.FlagHolder) -> None:
    """Raises a `UserError` before the work, if the file of a flag cannot be written."""
    # Only process 0 writes. Asking for its number would start the devices, so a process without a
    # cluster does not ask.
    if jax.distributed.is_initialized() and not cluster.is_main():
        return
    for flag in of_files:
        if flag.value is not None:
            place, name = _target(flag)
            # A file is first written beside its final place, under a longer name.
            place.require_writable([name, f"{name}.{UNFINISHED}"])


def write_file(flag: flags.FlagHolder, content: str | bytes) -> None:
    """Writes the file that a flag names."""
    place, name = _target(flag)
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    with reported_writing(flag):
        place.write(name, content)


@contextlib.contextmanager
def reported_writing(flag: flags.FlagHolder) -> Iterator[None]:
    """Raises an error of writing what a flag names as a `RunError`."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"--{flag.name}={shortened(str(flag.value))} could not be written: "
            f"{error.strerror or error}.",
            exit_code=code_of_write(error),
        ) from error


def _target(flag: flags.FlagHolder) -> tuple[Place, str]:
    """Returns the folder and the name of the file that a flag names.

    A link of a user's is followed, so that the file that it leads to is replaced.
    """
    text, name = flag.value, f"--{flag.name}"
    if os.path.islink(text):
        text = os.path.realpath(text)
    if os.path.isdir(text):
        raise UserError(f"{name}={shortened(str(text))} is a folder, not a file.")
    return file_at(text, name)
