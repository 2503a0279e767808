"""Trains one member of a run once more, alone: dist-ens replay RUN --member=7 [--until=STEP]."""

import math

from absl import flags

from dist_ens.experiment.replay import Replay, replay
from dist_ens.ground.errors import ExitCode, UserError, counted
from dist_ens.ground.terminal import PlainConsole
from launch import cli
from launch.config_flags import ConfigFlags

_MEMBER = flags.DEFINE_integer("member", None, "Id of the member.", lower_bound=0)
_UNTIL = flags.DEFINE_integer(
    "until", None, "Step of the checkpoint to compare with. Default: the newest.", lower_bound=1
)
_TOLERANCE = flags.DEFINE_float(
    "tolerance",
    0.0,
    "Largest difference to the same member, relative to the largest absolute value of each leaf.",
    lower_bound=0.0,
)
_CONFIG = ConfigFlags(overridable=False)
_RUN = cli.RunFolders("dist-ens replay runs/digits --member=0")


def main() -> int:
    """Trains the member and prints the comparison."""
    if len(_RUN.places) != 1 or _MEMBER.value is None:
        raise UserError("Give one folder and the id of a member: replay runs/digits --member=0.")
    found = replay(
        _RUN.places[0],
        _MEMBER.value,
        until=_UNTIL.value,
        config=_CONFIG.file,
    )
    PlainConsole().print(_sentence(found), soft_wrap=True)
    is_same = found.largest[1] <= _TOLERANCE.value  # False for NaN.
    return ExitCode.DONE if is_same else ExitCode.FAULT


def _sentence(found: Replay) -> str:
    """Returns what the comparison has shown."""
    member = f"Member {found.member} after {counted(found.step, 'step')} of {found.execution}"
    arrays = counted(found.num_leaves, "array")
    if not found.differences:
        return f"{member} has the same bits as in the run, in {arrays}."
    name, largest = found.largest
    by = "NaN in one of the two" if math.isnan(largest) else f"{largest:.2g} of the largest value"
    return (
        f"{member} differs from the one in the run in {len(found.differences)} of {arrays}, most "
        f"in {name}: by {by}. Only the execution loop promises the same bits for any number of "
        "members and devices, on one data column, without a model axis."
    )


def _prepare(argv: list[str]) -> list[str]:
    return _RUN.prepare(_CONFIG.prepare(argv))


run = cli.command(main, _prepare, joins_cluster=lambda: False)

if __name__ == "__main__":
    run()
