"""What `dist-ens tpu` asks gcloud to do, and what the workers then do."""

import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import dist_ens
from dist_ens.commands import command_line
from launch.gcloud import Tpu, create_call, delete_call, follow_line, run_calls, start_line
from stand_ins import HOSTILE, RECORD, arguments_in, executable

pytestmark = pytest.mark.quick
HERE = ["--name=digits", "--zone=us-west4-a"]
# Also bytes that are not UTF-8, which Python holds as surrogates.
arguments_of_users = st.lists(
    st.one_of(
        st.sampled_from(HOSTILE),
        st.binary(max_size=8).map(lambda each: os.fsdecode(each.replace(b"\0", b""))),
    ),
    max_size=4,
)


class Worker:
    """A home folder as on a TPU VM, in which a stand-in for dist-ens is installed.

    Args:
        home: Empty folder.
        script: End of the stand-in's script, after it has recorded its arguments.
    """

    def __init__(self, home: pathlib.Path, script: str = "") -> None:
        self.home, self.folder, self.record = home, home / ".dist_ens", home / "record"
        (home / ".local/bin").mkdir(parents=True)
        # The profile of Ubuntu puts commands that pip installed on the PATH of login shells.
        (home / ".profile").write_text('PATH="$HOME/.local/bin:$PATH"\n')
        executable(home / ".local/bin/dist-ens", RECORD.format(file=self.record) + script)

    def bash(self, line: str, **variables: str) -> subprocess.CompletedProcess:
        """Runs a line as ssh does."""
        return subprocess.run(
            ["bash", "-c", line],
            cwd=self.home,
            env={"HOME": str(self.home), "PATH": os.environ["PATH"], **variables},
            capture_output=True,
            timeout=60,
        )

    def exit_code(self) -> int:
        """The recorded exit code, as soon as there is one."""
        file = self.folder / "exit_code"
        wait_for(file)
        return int(file.read_text())

    def received(self) -> list[str]:
        return arguments_in(self.record)


def wait_for(file: pathlib.Path) -> None:
    deadline = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < deadline, f"{file} does not appear"
        time.sleep(0.005)


@pytest.fixture
def gcloud(tmp_path, monkeypatch):
    """The file of a stand-in for gcloud, which records its arguments and ends with `$CODE`."""
    record = tmp_path / "gcloud_arguments"
    executable(tmp_path / "gcloud", RECORD.format(file=record) + 'exit "${CODE:-0}"\n')
    return record


def tpu(*words, gcloud=None, code=0):
    """A finished `dist-ens tpu`, with the folder of a stand-in first on the PATH."""
    path = os.environ["PATH"] if gcloud is None else f"{gcloud.parent}:{os.environ['PATH']}"
    return subprocess.run(
        [sys.executable, "-c", "import launch; launch.main()", "tpu", *words],
        env={**os.environ, "PATH": path, "CODE": str(code)},
        cwd=pathlib.Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )


def command_in(call):
    """The line that a call of gcloud sends to a worker."""
    return next(each.removeprefix("--command=") for each in call if each.startswith("--command="))


def test_one_slice_is_a_queued_resource_of_one_node():
    call = create_call(
        Tpu("digits", "us-west4-a", "team"),
        "v5litepod-16",
        "v2-alpha-tpuv5-lite",
        spot=True,
        valid_until_duration="6h",
    )
    assert shlex.join(call) == (
        "gcloud compute tpus queued-resources create digits --zone=us-west4-a --project=team "
        "--node-id=digits --accelerator-type=v5litepod-16 --runtime-version=v2-alpha-tpuv5-lite "
        "--spot --valid-until-duration=6h"
    )


def test_two_slices_are_a_queued_resource_of_two_nodes_and_get_the_command_each():
    two = Tpu("digits", "us-west4-a", num_slices=2)
    call = create_call(two, "v4-16", "tpu-vm-v4", spot=False, valid_until_duration=None)
    assert call[7:9] == ["--node-count=2", "--node-prefix=digits"]
    calls = run_calls(two, ["train"])
    assert [call[5] for call in calls] == ["digits-0", "digits-1"]
    assert all("--worker=all" in call for call in calls)
    assert command_in(calls[0]) == command_in(calls[1])


def test_a_tpu_that_exists_is_deleted_by_force():
    assert shlex.join(delete_call(Tpu("digits", "us-west4-a"))) == (
        "gcloud compute tpus queued-resources delete digits --zone=us-west4-a --force"
    )


@settings(max_examples=25, deadline=None)
@given(arguments_of_users)
def test_a_worker_gets_the_arguments_that_the_user_typed(tmp_path_factory, arguments):
    worker = Worker(tmp_path_factory.mktemp("home"))
    ended = worker.bash(start_line(["train", *arguments]))
    assert ended.returncode == 0, ended.stderr
    assert worker.exit_code() == 0
    assert worker.received() == ["train", *arguments]
    assert not (worker.home / "x").exists()


def test_the_line_that_gcloud_records_runs_on_a_worker(tmp_path, gcloud):
    ended = tpu("run", *HERE, "--", "train", *HOSTILE, gcloud=gcloud)
    assert ended.returncode == 0, ended.stderr
    assert f"Next: dist-ens tpu follow {command_line(name='digits', zone='us-west4-a')}" in (
        ended.stdout
    )
    (tmp_path / "home").mkdir()
    worker = Worker(tmp_path / "home")
    worker.bash(command_in(arguments_in(gcloud)))
    assert worker.exit_code() == 0
    assert worker.received() == ["train", *HOSTILE]


def test_a_dry_run_prints_the_call_and_makes_none(gcloud):
    ended = tpu("run", *HERE, "--dry_run", "--", "train", *HOSTILE, gcloud=gcloud)
    assert ended.returncode == 0, ended.stderr
    assert not gcloud.exists()
    subprocess.run(
        ["bash", "-c", ended.stdout],
        env={"PATH": f"{gcloud.parent}:{os.environ['PATH']}"},
        check=True,
    )
    assert (
        arguments_in(gcloud) == run_calls(Tpu("digits", "us-west4-a"), ["train", *HOSTILE])[0][1:]
    )


@pytest.mark.slow
def test_a_worker_records_the_log_and_the_exit_code_of_a_detached_command(tmp_path):
    worker = Worker(tmp_path, "echo trained; echo warned >&2; sleep 1; exit 42\n")
    began = time.monotonic()
    assert worker.bash(start_line(["train"])).returncode == 0
    assert time.monotonic() - began < 0.9
    followed = worker.bash(follow_line())
    assert followed.returncode == 42
    assert followed.stdout == b"trained\nwarned\n"
    assert worker.exit_code() == 42


def test_a_second_command_is_refused_while_one_runs(tmp_path):
    worker = Worker(tmp_path, '[ "$2" != first ] || sleep 60\n')
    worker.bash(start_line(["train", "first"]))
    wait_for(worker.record)
    refused = worker.bash(start_line(["train", "second"]))
    assert refused.returncode == 1
    assert b"still runs" in refused.stderr
    assert worker.received() == ["train", "first"]
    os.killpg(int((worker.folder / "pid").read_text()), signal.SIGKILL)
    # A killed command has recorded no exit code: 134 is that of a lost host.
    assert worker.bash(follow_line()).returncode == 134
    assert worker.bash(start_line(["train", "third"])).returncode == 0
    assert worker.exit_code() == 0


def test_variables_of_slices_that_are_gone_do_not_reach_a_command(tmp_path):
    worker = Worker(tmp_path, "env | grep MEGASCALE\n")
    worker.bash(start_line(["train"]), MEGASCALE_NUM_SLICES="4", MEGASCALE_SLICE_ID="3")
    assert worker.exit_code() == 1  # grep found nothing
    assert (worker.folder / "log").read_text() == ""


def test_nothing_to_follow_is_said(tmp_path):
    followed = Worker(tmp_path).bash(follow_line())
    assert followed.returncode == 2
    assert followed.stderr == b"No command was started on this TPU.\n"


def test_following_ends_with_the_exit_code_of_the_run(gcloud):
    assert tpu("follow", *HERE, gcloud=gcloud, code=43).returncode == 43
    assert arguments_in(gcloud)[5:7] == ["--zone=us-west4-a", "--worker=0"]


def test_a_failure_of_gcloud_is_a_failure_of_the_command(gcloud):
    ended = tpu("delete", *HERE, gcloud=gcloud, code=3)
    assert ended.returncode == 1
    assert "gcloud ended with exit code 3" in ended.stderr


def test_a_word_is_needed():
    ended = dist_ens("tpu", "folow", *HERE)
    assert ended.returncode == 2
    assert "follow" in ended.stderr
