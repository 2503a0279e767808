"""Works on the members in the checkpoints of a run: dist-ens members RUN ACTION [--to=FOLDER].

- `list` shows each member with its seed, its steps and its history.
- `verify` compares every byte of the checkpoints with what was saved, and names each member and
  leaf that has changed. So it does with the metrics, the summary and the report of the run. It ends
  with exit code 44 if it finds a change, and with 1 if it finds none and cannot read all of it.
- `copy` writes a new run that has the members in --ids, or all, of one run or of several: RUN RUN …
  copy.
- `extend` trains the members in --ids, and writes a new run that has all of them.
- `export` writes each member as a safetensors file of one network.
- `import` makes RUN out of networks that were trained elsewhere: RUN import FILE … --config=FILE.
- `choose` chooses the best --size members on the validation split by the score --metric, and keeps
  the choice in the run: RUN choose --size=5 --metric=nll. `evaluate`, `predict` and the report then
  use these members, with their weights. RUN choose --size=all makes them use all members.

No other action changes a run that exists.
"""

import re
from collections.abc import Callable, Mapping

from absl import flags
from rich.table import Table

from dist_ens.checkpoint import SavedMembers, ids_text, moving_on, saved_step, saved_steps
from dist_ens.checkpoint.newest import checkpoints_of
from dist_ens.checkpoint.reading import is_gone
from dist_ens.checkpoint.run_digests import changed_files
from dist_ens.checkpoint.verify import faults_of
from dist_ens.evaluation.selection import METHODS
from dist_ens.experiment.chosen import choose_all, choose_members
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.members import copy_members, extend
from dist_ens.experiment.networks import export_members, import_members
from dist_ens.ground.commands import command_line, quoted
from dist_ens.ground.errors import ExitCode, RunError, UserError, counted
from dist_ens.ground.paths import shortened
from dist_ens.ground.terminal import PlainConsole
from dist_ens.metrics.catalogue import label_of
from dist_ens.report.facts import listed_weights
from dist_ens.storage import Place, place_of
from launch import cli
from launch.config_flags import ConfigFlags
from launch.path_flags import define_folder

_STEP = flags.DEFINE_integer(
    "step", None, "Step of a checkpoint. Default: the newest; for verify all.", lower_bound=0
)
_IDS = flags.DEFINE_string(
    "ids", None, "Ids of members, such as 3,5 or 8-15. Default: all members, for copy and export."
)
_TO = define_folder("to", None, "Folder of the new run, or of the exported files.")
_SIZE = flags.DEFINE_string(
    "size", None, "Number of choices, which may name a member again; or all, to use all members."
)
_METRIC = flags.DEFINE_string("metric", "nll", "Score by which choose compares members.")
_METHOD = flags.DEFINE_enum(
    "method",
    "greedy",
    METHODS,
    "Method of choose: greedy (adds the member that helps most), top (the best members alone) or "
    "stacking (the best weights of all members).",
)
_CONFIG = ConfigFlags()
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


class _CommandLine:
    """The arguments of the command that are not flags: folders of runs, an action and networks."""

    def __init__(self) -> None:
        self.workdirs: list[Place] = []
        self.action = ""
        self.networks: list[str] = []

    def prepare(self, argv: list[str]) -> list[str]:
        """Returns the command line without these arguments, and stores them."""
        words, rest = cli.split_words(_CONFIG.prepare(argv))
        place = next((n for n, word in enumerate(words) if n and word in _ACTIONS), 0)
        folders, self.networks = words[:place], words[place + 1 :]
        self.action = words[place] if place else ""
        if not place or (len(folders) > 1 and self.action != "copy"):
            raise UserError(
                "dist-ens members takes the folder of a run (copy takes several), then one of "
                f"{', '.join(_ACTIONS)}, and got {shortened(' '.join(words))}."
            )
        if self.networks and self.action != "import":
            raise UserError(f"{self.action} takes no {shortened(self.networks[0])}.")
        self.workdirs = [place_of(folder, "RUN") for folder in folders]
        return rest


def _list(workdir: Place) -> int:
    """Prints a table of the members."""
    saved = moving_on(_STEP.value, lambda: saved_step(workdir, _STEP.value))
    members, hyper = saved.members, saved.leaves(under="hyper.")
    stopped = saved.leaves(under="stopping.stopped_step").get("", [-1] * len(members))
    title = f"{counted(len(members), 'member')} at step {saved.step:,}"
    table = Table(title=title, title_justify="left")
    for column in ("member", *hyper, "seed", "trained as", "in", "history"):
        table.add_column(column, overflow="fold")
    for number, member in enumerate(members):
        settings = [f"{values[number]:.3g}" for values in hyper.values()]
        events = [f"{event.what} at step {event.step:,}" for event in member.events]
        if stopped[number] >= 0:
            events.append(f"stopped at step {stopped[number]:,}")
        seed = "" if member.seed is None else str(member.seed)
        table.add_row(
            str(member.member_id),
            *settings,
            seed,
            str(member.original_id),
            member.run or "",
            "; ".join(events),
        )
    PlainConsole().print(table)
    return ExitCode.DONE


def _verify(workdir: Place) -> int:
    """Verifies checkpoints, and without --step also the other files of the run."""
    steps, code = saved_steps(workdir), ExitCode.DONE
    if _STEP.value is not None:
        steps = [step for step in steps if step == _STEP.value]
    if not steps:
        raise UserError(f"There is no such checkpoint in {quoted(workdir)}. Correct the folder.")
    are_verified = False
    for step in steps:
        checkpoint = checkpoints_of(workdir) / str(step)
        try:
            faults = faults_of(checkpoint)
        except RunError as error:
            _print(f"Step {step}: not verified. {error}")
            if code == ExitCode.DONE and not is_gone(checkpoint):
                code = ExitCode.FAULT
            continue
        are_verified = True
        _print(f"Step {step}: {'damaged' if faults else 'sound'}.")
        for fault in faults:
            _print(f"  {fault}")
            code = ExitCode.DAMAGED
    for fault in changed_files(workdir) if _STEP.value is None else ():
        _print(f"Beside the checkpoints: {fault}.")
        code = ExitCode.DAMAGED
    return code if are_verified else code or ExitCode.FAULT


def _copy(_: Place) -> int:
    workdirs, to = _COMMAND_LINE.workdirs, cli.required(_TO, "runs/new")
    return _reported(copy_members(workdirs, to, member_ids=_ids(), step=_STEP.value), to)


def _extend(workdir: Place) -> int:
    """Trains more members, and writes a new run that has all of them."""
    ids, to = _ids(), cli.required(_TO, "runs/new")
    if ids is None:
        raise UserError("--ids is missing. Give ids, such as --ids=3,5 or --ids=8-15.")
    members = extend(workdir, ids, to, _CONFIG.file)
    return ExitCode.PREEMPTED if members is None else _reported(members, to)


def _export(workdir: Place) -> int:
    """Writes each member as a file."""
    to = cli.required(_TO, "nets")
    paths = export_members(workdir, to, member_ids=_ids(), step=_STEP.value)
    last = quoted(paths[-1].rpartition("/")[2])
    _print(f"Wrote {counted(len(paths), 'network')}: {quoted(paths[0])} to {last}.")
    return ExitCode.DONE


def _import(workdir: Place) -> int:
    """Makes a run out of networks."""
    experiment = _CONFIG.experiment()
    source = _CONFIG.file.open_source(experiment.data)
    parts = _CONFIG.file.own_parts(source.spec)
    members = import_members(
        _COMMAND_LINE.networks,
        experiment,
        workdir,
        parts=parts,
        member_file=_CONFIG.file.path,
        source=source,
    )
    return _reported(members, workdir)


def _choose(workdir: Place) -> int:
    """Chooses members, and keeps the choice in the run."""
    asked = _SIZE.value or "5"
    if asked != "all" and not asked.isdecimal():
        raise UserError(f"--size={shortened(asked)} is no number of choices. Try 5, or all.")
    opened = open_finished(workdir, config=_CONFIG.file, step=_STEP.value)
    is_newest = _STEP.value is None
    evaluate = command_line("dist-ens", "evaluate", workdir=workdir)
    score_them = f"Type {evaluate} to score them."
    if asked == "all":
        choose_all(opened, is_newest=is_newest)
        _print(f"All members of step {opened.step:,} predict again. {score_them}")
        return ExitCode.DONE
    metric, method = _METRIC.value, _METHOD.value
    found = choose_members(
        opened, size=int(asked), metric=metric, method=method, is_newest=is_newest
    )
    count = int((found.weights > 0).sum())
    ids = opened.ensemble.predictor_ids(opened.state)[found.weights > 0].tolist()
    listed = listed_weights(ids, found.weights[found.weights > 0].tolist())
    _print(
        f"Chose {count:,} of {counted(len(found.weights), 'member')} of step {opened.step:,}, with "
        f"weights: {listed}. Their validation {label_of(metric)} is {found.path[-1]:.4g}, and that "
        f"of all members is {found.before:.4g}. {score_them}"
    )
    return ExitCode.DONE


_ACTIONS: Mapping[str, Callable[[Place], int]] = {
    "list": _list,
    "verify": _verify,
    "copy": _copy,
    "extend": _extend,
    "export": _export,
    "import": _import,
    "choose": _choose,
}
_COMMAND_LINE = _CommandLine()


def _reported(members: SavedMembers, to: Place) -> int:
    """Prints which members a new run has."""
    ids = members.member_ids
    _print(
        f"Wrote {counted(len(ids), 'member')} (ids {ids_text(ids)}) at step {members.step:,} to "
        f"{quoted(to)}."
    )
    return ExitCode.DONE


def _ids() -> list[int] | None:
    """Returns the ids that --ids names; None without the flag."""
    if _IDS.value is None:
        return None
    parts = [_RANGE.fullmatch(part.strip()) for part in _IDS.value.split(",")]
    ranges = [range(int(part[1]), int(part[2] or part[1]) + 1) for part in parts if part]
    if len(ranges) < len(parts) or not all(ranges):
        raise UserError(f"--ids={shortened(_IDS.value)} is no list of ids, such as 3,5 or 8-15.")
    return [member_id for each in ranges for member_id in each]


def _print(sentence: str) -> None:
    PlainConsole().print(sentence, soft_wrap=True)


def main() -> int:
    """Does what the action says, and returns the exit code."""
    return _ACTIONS[_COMMAND_LINE.action](_COMMAND_LINE.workdirs[0])


run = cli.command(main, _COMMAND_LINE.prepare, joins_cluster=lambda: False)

if __name__ == "__main__":
    run()
