"""A figure of the training speed of ensembles of several sizes."""

import io
import pathlib
from collections.abc import Mapping, Sequence

from dist_ens.ground.file_writing import replace_file


def plot_rates(
    path: pathlib.Path, num_members: Sequence[int], rates: Mapping[str, Sequence[float]]
) -> None:
    """Plots curves of member-examples per second over the number of members, as a PNG file."""
    from matplotlib.figure import Figure  # Slow to import, and rarely needed.

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
    replace_file(path, file.getvalue())
