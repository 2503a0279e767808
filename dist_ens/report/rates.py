"""A picture of how fast ensembles of several sizes train."""

import io
import pathlib
from collections.abc import Mapping, Sequence

from dist_ens.report.files import write_atomically


def plot_rates(
    path: pathlib.Path, num_members: Sequence[int], rates: Mapping[str, Sequence[float]]
) -> None:
    """A picture of member-examples per second over the number of members.

    Args:
        path: Of the PNG file.
        num_members: Along the horizontal axis.
        rates: A curve for each name, for each number of members a number, or NaN for none.
    """
    from matplotlib.figure import Figure  # slow to import, and seldom needed

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, values in rates.items():
        axes.plot(num_members, values, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(num_members, [str(n) for n in num_members])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("members")
    axes.set_ylabel("member-examples per second")
    axes.grid(alpha=0.3)
    axes.legend()
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    write_atomically(path, file.getvalue())
