"""Compares runs on one page: dist-ens report RUN … [--output=report.html]."""

import pathlib

from dist_ens.commands import quoted
from dist_ens.errors import UserError
from dist_ens.paths import given_path
from dist_ens.report import read_run
from dist_ens.report.page import write_page
from dist_ens.terminal import PlainConsole
from launch import cli
from launch.path_flags import define_path

_OUTPUT = define_path("output", "report.html", "File for the page.")


class _Runs:
    """The arguments of the command that are not flags, which are folders of runs."""

    def __init__(self) -> None:
        self.workdirs: list[pathlib.Path] = []

    def prepare(self, argv: list[str]) -> list[str]:
        """Returns the command line without the folders, and stores them."""
        _, *paths = cli.parsed(argv, known_only=True)
        self.workdirs = [given_path(path, "RUN") for path in paths]
        return [argument for argument in argv if argument not in paths]


_RUNS = _Runs()


def main() -> None:
    """Reads the files of the runs, and writes the page."""
    if not _RUNS.workdirs:
        raise UserError(
            "No folder of a run was given. Give at least one: dist-ens report runs/digits "
            "runs/other --output=report.html."
        )
    runs = [read_run(workdir) for workdir in _RUNS.workdirs]
    cli.write_file(_OUTPUT, lambda path: write_page(path, runs))
    PlainConsole().print(f"{quoted(_OUTPUT.value)}: {len(runs)} runs.", soft_wrap=True)


def run() -> None:
    """Runs the command."""
    cli.run(main, _RUNS.prepare, joins_cluster=lambda: False)


if __name__ == "__main__":
    run()
