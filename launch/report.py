"""Compares runs on one page: dist-ens report RUN … [--output=report.html]."""

from dist_ens.ground.commands import quoted
from dist_ens.ground.errors import counted
from dist_ens.ground.terminal import PlainConsole
from dist_ens.report import read_run
from dist_ens.report.page import page_of
from launch import cli
from launch.path_flags import define_file

_OUTPUT = define_file("output", "report.html", "File for the page.")
_RUNS = cli.RunFolders("dist-ens report runs/digits runs/other --output=report.html")


def main() -> None:
    """Reads the files of the runs, and writes the page."""
    cli.check_outputs(_OUTPUT)
    runs = [read_run(workdir) for workdir in _RUNS.places]
    cli.write_file(_OUTPUT, page_of(runs))
    PlainConsole().print(f"{quoted(_OUTPUT.value)}: {counted(len(runs), 'run')}.", soft_wrap=True)


run = cli.command(main, _RUNS.prepare, joins_cluster=lambda: False)

if __name__ == "__main__":
    run()
