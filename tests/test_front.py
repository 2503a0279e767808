"""What the commands share."""

import io
import re
import signal

import pytest
from rich.console import Console
from rich.table import Table

import dist_ens
import launch
from commands import python
from dist_ens.ground.errors import UserError
from dist_ens.ground.terminal import print_table
from launch.config_flags import ConfigFlags


def test_figures_are_not_cut_however_narrow_the_console():
    table = Table("mesh", *["bytes"] * 20)
    figures = [f"{number:,}" for number in range(10**9, 10**9 + 20)]
    table.add_row("1024 x 1024", *figures)
    console = Console(file=io.StringIO(), width=40)
    print_table(console, table)
    printed = console.file.getvalue()
    assert all(printed.count(figure) == 1 for figure in figures)
    assert "1024 x 1024" in printed
    assert "\u2026" not in printed
    assert console.width == 40


def test_help_has_a_line_for_each_verb_and_leads_to_its_flags():
    def printed(*words):
        ended = python("-c", "import launch; launch.main()", *words)
        assert (ended.returncode, ended.stderr) == (0, "")
        return ended.stdout

    lines = re.findall(r"^  (\w+) +(\w.+\w)$", printed("--help"), re.MULTILINE)
    assert [verb for verb, _ in lines] == [*launch.VERBS]
    assert ("train", "Trains an ensemble") in lines
    assert printed("help", "report") == printed("report", "--help")
    assert printed("--version") == f"dist_ens {dist_ens.__version__}\n"


def test_an_interrupted_command_ends_at_once_with_a_sentence():
    # A thread is in the middle of something.
    ended = python(
        "-c",
        """
import concurrent.futures, signal, threading, time
from launch import cli
def main():
    print("begun")
    pool = concurrent.futures.ThreadPoolExecutor(1)
    def go_on():
        while True:
            time.sleep(0.01)
            pool.submit(int)
    threading.Thread(target=go_on).start()
    signal.raise_signal(signal.SIGINT)
cli.run(main)
""",
    )
    assert ended.returncode == 128 + signal.SIGINT
    assert ended.stdout == "begun\n"
    assert ended.stderr == "Interrupted. Checkpoints and files that were saved before are kept.\n"


def test_a_field_without_its_prefix_is_told_where_fields_may_be_overridden():
    arguments = ["--config=configs/digits.py", "--num_members=4"]
    with pytest.raises(UserError, match="write --config.num_members=VALUE."):
        ConfigFlags().prepare(arguments)
    assert ConfigFlags(overridable=False).prepare(arguments) == arguments[1:]
