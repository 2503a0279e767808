"""`dist-ens doctor`, in processes as a user starts them."""

import pytest

from commands import dist_ens, start, together
from conftest import ROOT
from dist_ens import __version__

DIGITS = "--config=configs/digits.py"


def two(folder, *arguments, of_second=()):
    """What each of two doctors of one run printed, and its exit code."""
    first, second = (["doctor", *flags, *arguments] for flags in together(2))
    run = start(first, [*second, *of_second], folder=folder, name="log", in_one=True)
    codes = run.codes()
    return [((folder / f"log_{i}").read_text(), code) for i, code in enumerate(codes)]


def test_a_process_alone_can_start_and_nothing_is_left(tmp_path):
    workdir = tmp_path / "runs" / "x"
    code, printed, errors = dist_ens("doctor", DIGITS, f"--workdir={workdir}", devices=4)
    assert code == 0, errors
    for told in (
        f"dist-ens {__version__}, jax ",
        "processes 1: this one is alone",
        "devices   4 devices (cpu)",
        f"{tmp_path} can be written; ",
        # 8 members on 4 devices: 4 rows, and one column.
        "config    4 x 1 (ensemble x data) for 8 members; here members 0 to 7",
        "step      the first took",
    ):
        assert told in printed
    assert printed.splitlines()[-1].startswith("A run can start. Next: dist-ens train")
    assert not [*tmp_path.iterdir()]


def test_two_hosts_meet_and_take_a_step_together(tmp_path, tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    (printed, code), (of_second, code_of_second) = two(logs, DIGITS, f"--workdir={tmp_path}")
    assert (code, code_of_second) == (0, 0), printed + of_second
    for told in (
        "processes 2, with equal versions",
        "devices   2 devices (cpu), 1 of them here",
        f"{tmp_path} can be written, shared by all processes",
        "here members 0 to 3",
        "step      the first took",
    ):
        assert told in printed
        assert told not in of_second
    assert not [*tmp_path.iterdir()]


def test_hosts_that_do_not_share_the_workdir_are_named_by_all(tmp_path):
    (tmp_path / "other").mkdir()
    of_second = [f"--workdir={tmp_path / 'other'}"]
    for printed, code in two(tmp_path, f"--workdir={tmp_path}", of_second=of_second):
        assert code == 2
        assert "The processes [1] do not see the files of process 0 in" in printed


SIZES = "--config.layout.ensemble_axis=1 --config.data.global_batch_size=7"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            "--workdir=README.md/run",
            2,
            "Nothing can be written in README.md: not a directory.",
        ),
        (f"{DIGITS} {SIZES}", 45, "got data.global_batch_size=7 and a data axis of 2 (2 devices"),
    ],
)
def test_the_first_part_that_does_not_work_is_told(arguments, code, message):
    ended = dist_ens("doctor", *arguments.split(), devices=2)
    assert ended.returncode == code
    assert ended.stderr.startswith("error: ")
    assert message in ended.stderr.replace(f"{ROOT}/", "")
