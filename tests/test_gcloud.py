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
from launch.gcloud import InstanceGroup, QueuedResource
from launch.worker_lines import follow_line, follow_worker_0_line, start_line, stop_line
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
        if not sys.platform.startswith("linux"):
            pytest.skip("the lines for a worker use programs of Linux, which TPU VMs have")
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


def is_running(group: int) -> bool:
    """Whether a process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


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
    (call,) = QueuedResource("digits", "us-west4-a", "team").create_calls(
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
    two = QueuedResource("digits", "us-west4-a", num_slices=2)
    (call,) = two.create_calls("v4-16", "tpu-vm-v4", spot=False, valid_until_duration=None)
    assert call[7:9] == ["--node-count=2", "--node-prefix=digits"]
    calls = two.ssh_calls("all")
    assert [call[5] for call in calls] == ["digits-0", "digits-1"]
    assert all("--worker=all" in call for call in calls)


def test_a_tpu_that_exists_is_deleted_by_force():
    (call,) = QueuedResource("digits", "us-west4-a").delete_calls()
    assert shlex.join(call) == (
        "gcloud compute tpus queued-resources delete digits --zone=us-west4-a --force"
    )


@settings(max_examples=25, deadline=None)
@given(arguments_of_users)
def test_a_worker_gets_the_arguments_that_the_user_typed(tmp_path_factory, arguments):
    worker = Worker(tmp_path_factory.mktemp("home"))
    ended = worker.bash(start_line(["train", *arguments], "id"))
    assert ended.returncode == 0, ended.stderr
    assert worker.exit_code() == 0
    assert worker.received() == ["train", *arguments]
    assert not (worker.home / "x").exists()


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_dry_run_prints_the_call_and_makes_none(tmp_path, gcloud):
    ended = tpu("run", *HERE, "--dry_run", "--", "train", *HOSTILE, gcloud=gcloud)
    assert ended.returncode == 0, ended.stderr
    assert not gcloud.exists()
    subprocess.run(
        ["bash", "-c", ended.stdout],
        env={"PATH": f"{gcloud.parent}:{os.environ['PATH']}"},
        check=True,
    )
    (tmp_path / "home").mkdir()
    worker = Worker(tmp_path / "home")
    worker.bash(command_in(arguments_in(gcloud)))
    assert worker.exit_code() == 0
    assert worker.received() == ["train", *HOSTILE]


@pytest.mark.slow
def test_a_worker_records_the_log_and_the_exit_code_of_a_detached_command(tmp_path):
    worker = Worker(tmp_path, "echo trained; echo warned >&2; sleep 1; exit 42\n")
    began = time.monotonic()
    assert worker.bash(start_line(["train"], "id")).returncode == 0
    assert time.monotonic() - began < 0.9
    followed = worker.bash(follow_line())
    assert followed.returncode == 42
    assert followed.stdout == b"trained\nwarned\n"
    assert worker.exit_code() == 42


@pytest.mark.slow
def test_a_second_command_is_refused_while_one_runs(tmp_path):
    worker = Worker(tmp_path, '[ "$2" != first ] || sleep 60\n')
    worker.bash(start_line(["train", "first"], "id"))
    wait_for(worker.record)
    refused = worker.bash(start_line(["train", "second"], "other"))
    assert refused.returncode == 1
    assert b"still runs" in refused.stderr
    assert worker.received() == ["train", "first"]
    os.killpg(int((worker.folder / "pid").read_text()), signal.SIGKILL)
    # A killed command has recorded no exit code: 134 is that of a lost host.
    assert worker.bash(follow_line()).returncode == 134
    assert worker.bash(start_line(["train", "third"], "id")).returncode == 0
    assert worker.exit_code() == 0


def test_variables_of_slices_that_are_gone_do_not_reach_a_command(tmp_path):
    worker = Worker(tmp_path, "env | grep MEGASCALE\n")
    worker.bash(start_line(["train"], "id"), MEGASCALE_NUM_SLICES="4", MEGASCALE_SLICE_ID="3")
    assert worker.exit_code() == 1  # grep found nothing
    assert (worker.folder / "log").read_text() == ""


def test_nothing_to_follow_is_said(tmp_path):
    followed = Worker(tmp_path).bash(follow_line())
    assert followed.returncode == 2
    assert followed.stderr == b"No command was started on this TPU.\n"


@pytest.mark.slow
def test_following_ends_with_the_exit_code_of_the_run(gcloud):
    assert tpu("follow", *HERE, gcloud=gcloud, code=43).returncode == 43
    assert arguments_in(gcloud)[5:7] == ["--zone=us-west4-a", "--worker=0"]


@pytest.mark.slow
def test_a_failure_of_gcloud_is_a_failure_of_the_command(gcloud):
    ended = tpu("delete", *HERE, gcloud=gcloud, code=3)
    assert ended.returncode == 1
    assert "gcloud ended with exit code 3" in ended.stderr


def test_an_instance_group_is_a_policy_a_template_and_a_group_of_as_many_vms_as_the_slice_has():
    # 32 chips, 4 on each VM.
    group = InstanceGroup("digits", "us-east5-b", "team")
    calls = group.create_calls("ct6e-standard-4t", "4x8", "tpu-image", "images", spot=True)
    assert [shlex.join(call) for call in calls] == [
        "gcloud compute resource-policies create workload-policy digits --region=us-east5 "
        "--project=team --type=HIGH_THROUGHPUT --accelerator-topology=4x8",
        "gcloud compute instance-templates create digits --project=team "
        "--machine-type=ct6e-standard-4t --maintenance-policy=TERMINATE --provisioning-model=SPOT "
        "--instance-termination-action=STOP --image-family=tpu-image --image-project=images "
        "--boot-disk-size=100GB",
        "gcloud compute instance-groups managed create digits --zone=us-east5-b --project=team "
        "--template=digits --size=8 "
        "--workload-policy=projects/team/regions/us-east5/resourcePolicies/digits "
        "--target-size-policy-mode=bulk --default-action-on-vm-failure=do-nothing",
    ]
    without_spot = group.create_calls("ct6e-standard-4t", "4x8", "tpu-image", "images", spot=False)
    assert not any("SPOT" in word for call in without_spot for word in call)
    assert [shlex.join(call) for call in group.delete_calls()] == [
        "gcloud compute instance-groups managed delete digits --zone=us-east5-b --project=team",
        "gcloud compute instance-templates delete digits --project=team",
        "gcloud compute resource-policies delete digits --region=us-east5 --project=team",
    ]


GROUP = ["--kind=instance_group", "--name=digits", "--zone=us-east5-b", "--project=team"]
# Each call gets a file of its own. The group has two VMs, and a command on `$FAILING` fails to
# start.
GCLOUD = """
number=$(ls {folder} | wc -l)
printf '%s\\0' "$@" > {folder}/$number
case "$*" in
*list-instances*) printf 'digits-x1\\ndigits-a2\\n' ;;
*" $FAILING "*setsid*) exit 3 ;;
*" digits-x1 "*worker-number*) exit 100 ;;
*worker-number*) exit 43 ;;
esac
"""


@pytest.fixture
def calls(tmp_path):
    """A function that runs `dist-ens tpu`, and returns it with the calls of gcloud."""
    folder = tmp_path / "calls"
    folder.mkdir()
    executable(tmp_path / "gcloud", "#!/bin/bash" + GCLOUD.format(folder=folder))

    def run(*words, failing="none"):
        ended = subprocess.run(
            [sys.executable, "-c", "import launch; launch.main()", "tpu", *words],
            env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILING": failing},
            cwd=pathlib.Path(__file__).parent.parent,
            capture_output=True,
            text=True,
        )
        return ended, [arguments_in(file) for file in sorted(folder.iterdir())]

    return run


@pytest.mark.slow
def test_a_command_starts_on_every_vm_of_a_group(calls):
    ended, made = calls("run", *GROUP, "--", "train")
    assert ended.returncode == 0, ended.stderr
    assert shlex.join(made[0]) == (
        "compute instance-groups managed list-instances digits --zone=us-east5-b --project=team "
        "'--format=value(name)'"
    )
    on_vms = made[1:]
    assert [call[:5] for call in on_vms] == [
        ["compute", "ssh", vm, "--zone=us-east5-b", "--project=team"]
        for vm in ("digits-x1", "digits-a2")
    ]
    assert command_in(on_vms[0]) == command_in(on_vms[1])
    assert f"Next: dist-ens tpu follow {' '.join(GROUP[1:])} {GROUP[0]}" in ended.stdout


@pytest.mark.slow
def test_the_worker_0_of_a_group_is_followed(calls):
    ended, made = calls("follow", *GROUP)
    assert ended.returncode == 43  # The code of the command on the second VM.
    assert [call[2] for call in made[1:]] == ["digits-x1", "digits-a2"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (GROUP, ["digits-x1", "digits-a2"]),
        ([*HERE, "--num_slices=2"], ["digits-0", "digits-1"]),
    ],
    ids=["VMs of a group", "slices"],
)
def test_a_command_that_does_not_start_everywhere_is_stopped_where_it_did(calls, flags, names):
    ended, made = calls("run", *flags, "--", "train", failing=names[1])
    assert ended.returncode == 1
    assert (
        f"gcloud ended with exit code 3 on {names[1]}, for the reason that it printed above. The "
        "new command was stopped where it had started."
    ) in ended.stderr
    *starts, first, second = [call for call in made if "list-instances" not in call]
    assert [name for call in starts for name in names if name in call] == names
    assert names[0] in first
    assert names[1] in second
    assert command_in(first) == command_in(second)
    run_id = command_in(first).split(" != ")[1].split()[0]
    assert f"echo {run_id} > " in command_in(starts[0])


@pytest.mark.slow
def test_only_the_run_that_is_named_is_stopped(tmp_path):
    worker = Worker(tmp_path, "sleep 60\n")
    worker.bash(start_line(["train"], "mine"))
    wait_for(worker.record)
    group = int((worker.folder / "pid").read_text())
    assert worker.bash(stop_line("other")).returncode == 0
    assert is_running(group)
    assert worker.bash(stop_line("mine")).returncode == 0
    deadline = time.monotonic() + 20
    while is_running(group):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert worker.bash(stop_line("mine")).returncode == 0  # There is nothing left to stop.


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [("0", 42), ("1", 100), ("", 100)])
def test_a_vm_of_a_group_is_followed_if_it_is_worker_0(tmp_path, number, code):
    worker = Worker(tmp_path, "exit 42\n")
    worker.bash(start_line(["train"], "id"))
    assert worker.exit_code() == 42
    executable(tmp_path / "curl", f"#!/bin/bash\necho {number}\n")
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert worker.bash(follow_worker_0_line(), PATH=path).returncode == code


def test_a_word_is_needed():
    ended = dist_ens("tpu", "folow", *HERE)
    assert ended.returncode == 2
    assert "follow" in ended.stderr
