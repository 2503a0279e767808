"""Simulation of a run whose hosts fail: the part of the time that is useful work.

    python -m benchmarks.restarts --plot_file=docs/images/restarts.png

A failure of any host ends the whole run, which then restarts from its last checkpoint. Each host
fails at a constant rate. Training waits while a checkpoint is saved, which is pessimistic, because
dist_ens writes checkpoints in the background. The table and the plot compare runs of 1, 64 and 4096
members, with four members on each host. The hosts save one after another, or all at once.
"""

import dataclasses
import math
import pathlib

import numpy as np
from absl import flags

from launch import cli
from launch.path_flags import define_path

_PLOT = define_path("plot_file", None, "PNG or SVG file to write the plot to.")
_SAVE_SECS = flags.DEFINE_float(
    "save_secs_per_member", 0.07, "Seconds that the save of one member takes.", lower_bound=0.0
)
_RESTART_SECS = flags.DEFINE_float(
    "restart_secs", 120.0, "Seconds from a failure until the run trains again.", lower_bound=0.0
)

DEFAULT_INTERVAL_SECS = 60.0  # The default of checkpoint.every_secs.
_MEMBERS = (1, 64, 4096)
_MEMBERS_PER_HOST = 4
_DAY_SECS = 86_400.0
_DAYS = (1.0, 10.0, 100.0, 1000.0)
_SEGMENTS = 20_000
_SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failures:
    """A run on hosts that fail.

    Attributes:
        host_mtbf_secs: Mean time between failures of one host, in seconds, positive.
        num_hosts: Number of hosts, at least 1. The failure of any of them ends the run.
        interval_secs: Seconds of training between two checkpoints, positive.
        save_secs: Seconds of a save, during which training waits.
        restart_secs: Seconds from a failure until the run trains again. A failure during a restart
            begins another one.
    """

    host_mtbf_secs: float
    num_hosts: int
    interval_secs: float
    save_secs: float
    restart_secs: float

    @property
    def mtbf_secs(self) -> float:
        """Mean time between failures of the run, in seconds."""
        return self.host_mtbf_secs / self.num_hosts


def simulated_useful_fraction(
    failures: Failures, *, num_segments: int, seed: int
) -> tuple[float, float]:
    """Returns the simulated fraction of the time that is useful work, and its standard error.

    A segment is the training of one interval with its save. It is tried until no failure happens
    before its end. Each failure loses the time since the start of the segment, and adds a restart.

    Args:
        failures: Run to simulate.
        num_segments: Number of segments, at least 2.
        seed: Seed of the random numbers.
    """
    random = np.random.default_rng(seed)
    needed = failures.interval_secs + failures.save_secs
    secs = np.zeros(num_segments)
    # The first attempt of a segment trains at once. Every later one begins with a restart.
    left, attempt_secs = np.arange(num_segments), needed
    while len(left):
        until_failure = random.exponential(failures.mtbf_secs, len(left))
        has_failed = until_failure < attempt_secs
        secs[left] += np.where(has_failed, until_failure, attempt_secs)
        left, attempt_secs = left[has_failed], failures.restart_secs + needed
    mean = secs.mean()
    fraction = failures.interval_secs / mean
    error = secs.std(ddof=1) / math.sqrt(num_segments)
    return float(fraction), float(fraction * error / mean)


def expected_useful_fraction(failures: Failures) -> float:
    """Returns the expected fraction of the time that is useful work.

    M is the mean time between failures, t the interval, d the time of a save, and R the time of a
    restart. A segment takes on average

        M exp(R / M) (exp((t + d) / M) - 1).

    Source: Daly (2006), "A higher order estimate of the optimum checkpoint interval for restart
    dumps", https://doi.org/10.1016/j.future.2004.11.016.
    """
    mtbf = failures.mtbf_secs
    needed = (failures.interval_secs + failures.save_secs) / mtbf
    exponent = failures.restart_secs / mtbf + needed
    # exp(R / M) (exp(x) - 1) = exp(R / M + x) (1 - exp(-x)), which overflows later.
    if exponent > 700:
        return 0.0
    return failures.interval_secs / (mtbf * math.exp(exponent) * -math.expm1(-needed))


def best_interval_secs(failures: Failures) -> float:
    """Returns the interval with the largest expected useful fraction, in seconds.

    The derivative of the expected time is zero where x - 1 + exp(-x - d / M) = 0, with x = t / M.
    Young's approximation sqrt(2 d M) is the limit for short saves.

    Args:
        failures: Run whose interval is not used. Its `save_secs` must be positive.
    """
    mtbf, saving = failures.mtbf_secs, failures.save_secs / failures.mtbf_secs
    # The left side rises from exp(-saving) - 1 < 0 at x = 0 to a positive number at x = 1.
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if middle - 1 + math.exp(-middle - saving) < 0:
            low = middle
        else:
            high = middle
    return mtbf * high


def main() -> None:
    """Prints the useful fractions as a table, and draws the plot."""
    print(
        "| members | hosts | host MTBF, days | save s | every 60 s | simulated | best interval s "
        "| best interval | all hosts at once, every 60 s |\n" + "| --- " * 9 + "|"
    )
    for members in _MEMBERS:
        for days in _DAYS:
            run = run_of(members, days)
            best = dataclasses.replace(run, interval_secs=best_interval_secs(run))
            at_once = run_of(members, days, saves_at_once=True)
            fraction, error = simulated_useful_fraction(run, num_segments=_SEGMENTS, seed=_SEED)
            print(
                f"| {members:,} | {run.num_hosts:,} | {days:g} | {run.save_secs:.3g} "
                f"| {expected_useful_fraction(run):.3f} | {fraction:.3f} ± {error:.3f} "
                f"| {best.interval_secs:,.0f} | {expected_useful_fraction(best):.3f} "
                f"| {expected_useful_fraction(at_once):.3f} |"
            )
    if _PLOT.value is not None:
        _draw(_PLOT.value)


def run_of(members: int, host_mtbf_days: float, *, saves_at_once: bool = False) -> Failures:
    """Returns the run of a number of members, saved at the default interval.

    Args:
        members: Number of members, at most four on each host.
        host_mtbf_days: Mean time between failures of one host, in days.
        saves_at_once: Whether all hosts save at the same time at full pace. If not, they share the
            pace of one host. Default: False.
    """
    saved = min(members, _MEMBERS_PER_HOST) if saves_at_once else members
    return Failures(
        host_mtbf_secs=host_mtbf_days * _DAY_SECS,
        num_hosts=math.ceil(members / _MEMBERS_PER_HOST),
        interval_secs=DEFAULT_INTERVAL_SECS,
        save_secs=saved * _SAVE_SECS.value,
        restart_secs=_RESTART_SECS.value,
    )


def _draw(path: pathlib.Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    days = np.geomspace(_DAYS[0], _DAYS[-1], 200)
    for color, members in zip(("C0", "C1", "C2"), _MEMBERS, strict=True):
        runs = [run_of(members, each) for each in days]
        best = [dataclasses.replace(run, interval_secs=best_interval_secs(run)) for run in runs]
        at_once = [run_of(members, each, saves_at_once=True) for each in days]
        for style, drawn in (("-", runs), ("--", best), (":", at_once)):
            fractions = [*map(expected_useful_fraction, drawn)]
            axes.semilogx(days, fractions, color=color, linestyle=style)
        simulated = [
            simulated_useful_fraction(run_of(members, each), num_segments=_SEGMENTS, seed=_SEED)[0]
            for each in _DAYS
        ]
        axes.semilogx(_DAYS, simulated, color=color, marker="o", linestyle="none")
        hosts = runs[0].num_hosts
        label = f"{members:,} member{'s'[: members > 1]}, {hosts:,} host{'s'[: hosts > 1]}"
        axes.semilogx([], [], color=color, linewidth=4, label=label)
    for style, label in (
        ("-", "one file system, saved every 60 s (points: simulated)"),
        ("--", "one file system, saved at the best interval"),
        (":", "every host saves at full pace, every 60 s"),
    ):
        axes.semilogx([], [], color="gray", linestyle=style, label=label)
    axes.set_xticks(_DAYS, [f"{each:g}" for each in _DAYS])
    axes.set_xlabel("mean time between failures of one host, in days")
    axes.set_ylabel("useful fraction of the time")
    axes.set_ylim(0, 1.02)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    figure.savefig(path, dpi=100, bbox_inches="tight")


if __name__ == "__main__":
    cli.run(main, joins_cluster=lambda: False)
