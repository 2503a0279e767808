"""Works on the members in the checkpoints of a run: dist-ens members RUN ACTION [--to=FOLDER].

- `list` shows each member with its seed, its steps and its history.
- `verify` compares every byte of the checkpoints with what was saved, and names each member and
  leaf that has changed. So it does with the metrics, the summary and the report of the run. It ends
  with exit code 44 if it finds a change, and with 1 if it finds none and cannot read all of it.
- `select` and `drop` write a new run that has the members in --members, or all but these.
- `merge` writes a new run that also has the members of other runs: RUN merge OTHER ….
- `extend` trains the members in --members, and writes a new run that has all of them.
- `export` writes each member as a safetensors file of one network.
- `import` makes RUN out of networks that were trained elsewhere: RUN import FILE … --config=FILE.

No action changes a run that exists.
"""

import pathlib
import re
from collections.abc import Callable, Mapping

from absl import flags
from rich.console import Console
from rich.table import Table

from dist_ens.checkpoint import FOLDER, SavedMembers, ids_text, read_lineages, saved_step
from dist_ens.checkpoint.store import CheckpointStore, is_gone
from dist_ens.checkpoint.verify import faults_of
from dist_ens.commands import quoted
from dist_ens.errors import RunError, UserError, counted, did_you_mean
from dist_ens.exit_codes import ExitCode
from dist_ens.experiment.members import drop, extend, merge, select
from dist_ens.experiment.networks import export_members, import_members
from dist_ens.paths import given_path, shortened
from dist_ens.run_digests import changed_files
from dist_ens.terminal import PlainConsole
from launch import cli
from launch.config_flags import ConfigFlags
from launch.path_flags import define_path

_STEP = flags.DEFINE_integer(
    "step",
    None,
    "Step of the checkpoint. Default: the newest; every saved step for verify.",
    lower_bound=0,
)
_MEMBERS = flags.DEFINE_string(
    "members", None, "Ids of members, such as 3,5 or 8-15. Default: all members, for export."
)
_TO = define_path("to", None, "Folder of the new run, or of the exported files.")
_CONFIG = ConfigFlags()
_IDS = re.compile(r"(\d{1,10})(?:-(\d{1,10}))?")
_MOST_IDS = 10**6  # A range of more ids is a slip of the keyboard.


class _Argument(str):
    """An argument of the command line. Two of them are never the same object."""


class _CommandLine:
    """The arguments of the command that are not flags: the folder of a run, an action and more.

    Attributes:
        workdir: Folder of the run.
        action: One of `_ACTIONS`.
        others: Folders of other runs, or paths of networks.
    """

    def __init__(self) -> None:
        self.workdir = pathlib.Path()
        self.action = ""
        self.others: list[str] = []

    def prepare(self, argv: list[str]) -> list[str]:
        """Returns the command line without these arguments, and stores them.

        Raises:
            UserError: If one of them is missing, or the action is unknown.
        """
        argv = _CONFIG.prepare(argv)
        # A word is known by the object that it is: a flag may have a value of the same text.
        argv = [*map(_Argument, argv)]
        _, *words = cli.parsed(argv, known_only=True)
        words = [word for word in words if not word.startswith("-")]
        if len(words) < 2:
            raise UserError(
                f"dist-ens members takes a folder and an action, and got "
                f"{counted(len(words), 'word')}. Give both, as in: dist-ens members runs/digits "
                "verify."
            )
        folder, self.action, *self.others = words
        if self.action not in _ACTIONS:
            raise UserError(
                f"dist-ens members cannot {shortened(self.action)}."
                f"{did_you_mean(self.action, _ACTIONS)} Choose one of {', '.join(_ACTIONS)}."
            )
        if self.others and self.action not in _TAKES_MORE:
            raise UserError(
                f"dist-ens members RUN {self.action} takes nothing more, and got "
                f"{shortened(self.others[0])}. Leave it out, or give it by a flag, such "
                "as --members=3,5 or --step=100."
            )
        overrides = [word for word in argv if word.lstrip("-").startswith("config.")]
        if overrides and self.action != "import":
            raise UserError(
                f"{shortened(overrides[0])} cannot be given: {self.action} keeps the experiment of "
                "the run. Leave it out."
            )
        self.workdir = given_path(folder, "RUN")
        return [argument for argument in argv if not any(argument is word for word in words)]


def _list(workdir: pathlib.Path) -> int:
    """Prints a table of the members."""
    step, members = read_lineages(workdir, _STEP.value)
    table = Table(title=f"{counted(len(members), 'member')} at step {step:,}", title_justify="left")
    for column in ("member", "seed", "trained as", "in", "history"):
        table.add_column(column, overflow="fold")
    for member in members:
        history = "; ".join(f"{event.what} at step {event.step:,}" for event in member.events)
        seed = "" if member.seed is None else str(member.seed)
        table.add_row(
            str(member.member_id), seed, str(member.original_id), member.run or "", history
        )
    _console().print(table)
    return ExitCode.DONE


def _verify(workdir: pathlib.Path) -> int:
    """Verifies checkpoints."""
    newest = CheckpointStore(workdir, read_only=True).latest_step()
    store, step = saved_step(workdir, _STEP.value or newest)
    steps = store.steps() if _STEP.value is None else [step]
    console, code = _console(), ExitCode.DONE
    for sentence in store.unread_steps():
        console.print(sentence, soft_wrap=True)
        code = ExitCode.DAMAGED
    for step in steps:
        path = workdir.resolve() / FOLDER / str(step)
        try:
            faults = faults_of(path)
        except RunError as error:
            console.print(f"Step {step}: not verified. {error}", soft_wrap=True)
            if code == ExitCode.DONE and not is_gone(path):
                code = ExitCode.FAULT
            continue
        console.print(f"Step {step}: {'damaged' if faults else 'sound'}.", soft_wrap=True)
        for fault in faults:
            console.print(f"  {fault}", soft_wrap=True)
            code = ExitCode.DAMAGED
    faults = [] if _STEP.value is not None else changed_files(workdir)
    for fault in faults:
        console.print(f"Beside the checkpoints: {fault}.", soft_wrap=True)
        code = ExitCode.DAMAGED
    return code


def _select(workdir: pathlib.Path) -> int:
    """Writes a new run that has some members."""
    return _told(select(workdir, _ids(), _to(), step=_STEP.value))


def _drop(workdir: pathlib.Path) -> int:
    """Writes a new run that has all members but some."""
    return _told(drop(workdir, _ids(), _to(), step=_STEP.value))


def _merge(workdir: pathlib.Path) -> int:
    """Writes a new run that has the members of several runs."""
    others = [given_path(other, "OTHER") for other in _COMMAND_LINE.others]
    return _told(merge([workdir, *others], _to(), step=_STEP.value))


def _extend(workdir: pathlib.Path) -> int:
    """Trains more members, and writes a new run that has all of them."""
    members = extend(
        workdir, _ids(), _to(), own_parts=_CONFIG.own_parts, open_source=_CONFIG.open_source
    )
    return ExitCode.PREEMPTED if members is None else _told(members)


def _export(workdir: pathlib.Path) -> int:
    """Writes each member as a file."""
    given = None if _MEMBERS.value is None else _ids()
    paths = export_members(workdir, _to(), member_ids=given, step=_STEP.value)
    _console().print(
        f"Wrote {counted(len(paths), 'network')}: {quoted(paths[0])} to {quoted(paths[-1].name)}.",
        soft_wrap=True,
    )
    return ExitCode.DONE


def _import(workdir: pathlib.Path) -> int:
    """Makes a run out of networks."""
    experiment = _CONFIG.experiment()
    source = _CONFIG.open_source(experiment.data)
    parts = _CONFIG.own_parts(source.spec)
    has_own = _CONFIG.file is not None and (parts.member is not None or parts.names)
    members = import_members(
        _COMMAND_LINE.others,
        experiment,
        workdir,
        parts=parts,
        member_file=_CONFIG.file.path if has_own and _CONFIG.file else None,
        source=source,
    )
    return _told(members, workdir)


_ACTIONS: Mapping[str, Callable[[pathlib.Path], int]] = {
    "list": _list,
    "verify": _verify,
    "select": _select,
    "drop": _drop,
    "merge": _merge,
    "extend": _extend,
    "export": _export,
    "import": _import,
}
_TAKES_MORE = ("merge", "import")
_COMMAND_LINE = _CommandLine()


def _told(members: SavedMembers, to: pathlib.Path | None = None) -> int:
    """Prints which members a new run has."""
    ids = members.member_ids
    _console().print(
        f"Wrote {counted(len(ids), 'member')} (ids {ids_text(ids)}) at step {members.step:,} to "
        f"{quoted(_to() if to is None else to)}.",
        soft_wrap=True,
    )
    return ExitCode.DONE


def _to() -> pathlib.Path:
    """Returns the folder that --to names.

    Raises:
        UserError: If the flag is missing.
    """
    return cli.required(_TO, "runs/new")


def _ids() -> list[int]:
    """Returns the ids that --members names.

    Raises:
        UserError: If the flag is missing, or its value is no list of ids.
    """
    if _MEMBERS.value is None:
        raise UserError("--members is missing. Give ids, such as --members=3,5 or --members=8-15.")
    ids: list[int] = []
    for part in _MEMBERS.value.split(","):
        found = _IDS.fullmatch(part.strip())
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if not 0 <= last - first < _MOST_IDS:
            raise UserError(
                f"--members={shortened(_MEMBERS.value)} is no list of ids. Give ids, such as "
                "--members=3,5 or --members=8-15."
            )
        ids += range(first, last + 1)
    return ids


def _console() -> Console:
    return PlainConsole()


def main() -> int:
    """Does what the action says, and returns the exit code."""
    return _ACTIONS[_COMMAND_LINE.action](_COMMAND_LINE.workdir)


def run() -> None:
    """Runs the command."""
    cli.run(main, _COMMAND_LINE.prepare, joins_cluster=lambda: False)


if __name__ == "__main__":
    run()
