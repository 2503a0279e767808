"""`dist-ens doctor`, in processes as a user starts them."""

import subprocess
import sys

import pytest

from conftest import COMMAND_ENVIRONMENT, ROOT
from dist_ens import __version__
from test_cluster import free_port

DIGITS = "--config=configs/digits.py"
LIMIT_SECS = 200


def started(*arguments, **variables):
    fixed = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-m", "launch.doctor", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, env=COMMAND_ENVIRONMENT | fixed | variables, **streams
    )


def ended(*processes):
    """What each process printed, and its exit code."""
    try:
        printed = [process.communicate(timeout=LIMIT_SECS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(text, process.returncode) for text, process in zip(printed, processes, strict=True)]


def two(*arguments, of_second=()):
    """What each of two doctors of one run printed, and its exit code."""
    flags = [f"--coordinator_address=127.0.0.1:{free_port()}", "--num_processes=2", *arguments]
    return ended(started(*flags, "--process_id=0"), started(*flags, "--process_id=1", *of_second))


def test_a_process_alone_can_start_and_nothing_is_left(tmp_path):
    workdir = tmp_path / "runs" / "x"
    ((printed, code),) = ended(started(DIGITS, f"--workdir={workdir}", JAX_NUM_CPU_DEVICES="4"))
    assert code == 0, printed
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


def test_two_hosts_meet_and_take_a_step_together(tmp_path):
    (printed, code), (of_second, code_of_second) = two(DIGITS, f"--workdir={tmp_path}")
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
    for printed, code in two(
        f"--workdir={tmp_path}", of_second=[f"--workdir={tmp_path / 'other'}"]
    ):
        assert code == 2
        assert "The processes [1] do not see the files of process 0 in" in printed


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--workdir=README.md/run"], 2, "Nothing can be written in README.md: Not a directory."),
        (
            [DIGITS, "--config.layout.ensemble_axis=1", "--config.data.global_batch_size=7"],
            45,
            "got data.global_batch_size=7 and a data axis of 2 (2 devices",
        ),
    ],
)
def test_the_first_part_that_does_not_work_is_told(arguments, code, message):
    ((printed, found),) = ended(started(*arguments, JAX_NUM_CPU_DEVICES="2"))
    assert found == code
    assert message in printed.replace(f"{ROOT}/", "")
    assert "\nerror: " in printed
    assert "A run can start" not in printed
