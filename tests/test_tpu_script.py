"""The script of `dist-ens tpu`: what it asks gcloud to do, and what the workers then do."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import dist_ens, wait_for
from launch.rendered import filled
from stand_ins import HOSTILE, RECORD, arguments_in, executable

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="the workers use programs of Linux"
    ),
]
# Each call gets a file of its own, and its line then runs in the home folder of its worker. The
# group has two VMs. On `$FAILING` no command starts.
GCLOUD = """#!/bin/bash
cd "$STAND_IN" || exit 1
number=$(ls calls | wc -l)
printf '%s\\0' "$@" > "calls/$number"
case "$*" in
*list-instances*) printf 'x1\\na2\\n'; exit ;;
*" ${FAILING:-none} "*setsid*) exit 3 ;;
esac
for word; do
  case $word in
  --command=*) line=${word#--command=} ;;
  digits* | x1 | a2) export HOME=$STAND_IN/$word ;;
  esac
done
cd "$HOME" && PATH=$HOME:$PATH bash -c "$line"
"""
# Also bytes that are not UTF-8, which Python holds as surrogates.
arguments_of_users = st.lists(
    st.one_of(
        st.sampled_from(HOSTILE),
        st.binary(max_size=8).map(lambda each: os.fsdecode(each.replace(b"\0", b""))),
    ),
    max_size=4,
)


class Workers:
    """Home folders as on TPU VMs, with a stand-in for dist-ens that a script ends."""

    def __init__(self, folder: pathlib.Path, script: str = "") -> None:
        self.folder = folder
        (folder / "calls").mkdir()
        executable(folder / "gcloud", GCLOUD)
        for number, name in enumerate(("digits", "digits-0", "digits-1", "a2", "x1")):
            (folder / name / ".local/bin").mkdir(parents=True)
            # The profile of Ubuntu puts commands that pip installed on the PATH of login shells.
            (folder / name / ".profile").write_text('PATH="$HOME/.local/bin:$PATH"\n')
            record = RECORD.format(file='"$HOME"/record')
            executable(folder / name / ".local/bin/dist-ens", record + script)
            # The VM a2 is worker 0 of the group.
            executable(folder / name / "curl", f"#!/bin/bash\necho {number - 3}\n")

    def tpu(self, action, *command, **options):
        """A script of `dist-ens tpu` that has ended."""
        variables = options.pop("variables", {})
        values = {"name": "digits", "zone": "us-west4-a", "project": None, "slices": ["digits"]}
        values |= {"instance_group": False, "action": action, "command": command, "run_id": "mine"}
        return subprocess.run(
            ["bash", "-c", filled("tpu.sh", values | options)],
            env={"PATH": f"{self.folder}:{os.environ['PATH']}", "STAND_IN": str(self.folder)}
            | variables,
            capture_output=True,
            timeout=60,
        )

    def calls(self):
        """Arguments of each call of gcloud."""
        return [arguments_in(file) for file in sorted((self.folder / "calls").iterdir())]

    def file(self, name):
        """A file of a worker, as soon as it is there."""
        wait_for((self.folder / name).exists, lambda: name)
        return self.folder / name

    def exit_code(self, name="digits"):
        """The exit code that a worker has recorded."""
        return int(self.file(f"{name}/.dist_ens/exit_code").read_text())

    def received(self, name="digits"):
        """Arguments of the last command of a worker, which has begun."""
        return arguments_in(self.file(f"{name}/record"))

    def group(self, name="digits"):
        """Number of the process group of a worker's command."""
        return int((self.folder / name / ".dist_ens/pid").read_text())


def is_running(group):
    """Whether a process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


SSH, ZONE = "compute tpus tpu-vm ssh", "--zone=us-west4-a"
SLICES = ["digits-0", "digits-1"]


@pytest.mark.parametrize(
    ("options", "names", "call"),
    [
        ({"project": "team"}, ["digits"], f"{SSH} {{}} {ZONE} --project=team --worker=all"),
        ({"slices": SLICES}, SLICES, f"{SSH} {{}} {ZONE} --worker=all"),
        ({"instance_group": True}, ["x1", "a2"], f"compute ssh {{}} {ZONE}"),
    ],
    ids=["one slice", "two slices", "instance group"],
)
def test_a_command_starts_on_every_worker(options, names, call, tmp_path):
    workers = Workers(tmp_path)
    assert workers.tpu("run", "train", "--x", **options).returncode == 0
    made = [" ".join(each).partition(" --command")[0] for each in workers.calls()]
    assert [each for each in made if "list-instances" not in each] == [*map(call.format, names)]
    for name in names:
        assert workers.exit_code(name) == 0
        assert workers.received(name) == ["train", "--x"]


@settings(max_examples=15, deadline=None)
@given(arguments_of_users)
def test_a_worker_gets_the_arguments_that_the_user_typed(tmp_path_factory, arguments):
    workers = Workers(tmp_path_factory.mktemp("workers"))
    ended = workers.tpu("run", "train", *arguments)
    assert ended.returncode == 0, ended.stderr
    assert workers.exit_code() == 0
    assert workers.received() == ["train", *arguments]
    assert not (workers.folder / "digits/x").exists()


@pytest.mark.slow
@pytest.mark.parametrize("instance_group", [False, True])
def test_a_detached_command_is_followed_on_worker_0_to_its_exit_code(instance_group, tmp_path):
    workers = Workers(tmp_path, "echo trained; echo warned >&2; sleep 1; exit 42\n")
    followed = workers.tpu("follow")
    assert followed.returncode == 2
    assert followed.stderr == b"No command was started on this TPU.\n"
    began = time.monotonic()
    assert workers.tpu("run", "train", instance_group=instance_group).returncode == 0
    assert time.monotonic() - began < 0.9
    followed = workers.tpu("follow", instance_group=instance_group)
    assert (followed.returncode, followed.stdout) == (42, b"trained\nwarned\n")
    if instance_group:
        assert [call[2] for call in workers.calls()[-2:]] == ["x1", "a2"]
    else:
        assert "--worker=0" in workers.calls()[-1]


@pytest.mark.slow
def test_a_second_command_is_refused_while_one_runs(tmp_path):
    workers = Workers(tmp_path, '[ "$2" != first ] || sleep 60\n')
    workers.tpu("run", "train", "first")
    assert workers.received() == ["train", "first"]
    refused = workers.tpu("run", "train", "second", run_id="other")
    assert refused.returncode == 1
    assert b"still runs" in refused.stderr
    assert is_running(workers.group())  # Only a command that was started is stopped.
    os.killpg(workers.group(), signal.SIGKILL)
    # A killed command has recorded no exit code: 134 is that of a lost host.
    assert workers.tpu("follow").returncode == 134
    assert workers.tpu("run", "train", "third").returncode == 0
    assert workers.exit_code() == 0


def test_variables_of_slices_that_are_gone_do_not_reach_a_command(tmp_path):
    workers = Workers(tmp_path, "env | grep MEGASCALE\n")
    stale = {"MEGASCALE_NUM_SLICES": "4", "MEGASCALE_SLICE_ID": "3"}
    workers.tpu("run", "train", variables=stale)
    assert workers.exit_code() == 1  # grep found nothing
    assert (workers.folder / "digits/.dist_ens/log").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "names"),
    [({"instance_group": True}, ["x1", "a2"]), ({"slices": SLICES}, SLICES)],
    ids=["VMs of a group", "slices"],
)
def test_a_command_that_does_not_start_everywhere_is_stopped_where_it_did(options, names, tmp_path):
    workers = Workers(tmp_path, "sleep 60\n")
    ended = workers.tpu("run", "train", variables={"FAILING": names[1]}, **options)
    assert ended.returncode == 1
    assert f"The command did not start on {names[1]}" in ended.stderr.decode()
    wait_for(lambda: not is_running(workers.group(names[0])), lambda: ended.stderr)


@pytest.mark.slow
def test_the_script_is_printed_and_gcloud_is_looked_for(tmp_path):
    flags = ["--name=digits", "--zone=us-west4-a"]
    printed = dist_ens("tpu", "run", *flags, "--dry_run", "--", "train", *HOSTILE)
    assert printed.returncode == 0, printed.stderr
    workers = Workers(tmp_path)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "STAND_IN": str(tmp_path)}
    subprocess.run(["bash", "-c", printed.stdout], env=environment, check=True)
    assert workers.received() == ["train", *HOSTILE]
    shellcheck = [pathlib.Path(sys.executable).with_name("shellcheck"), "--exclude=SC2086", "-"]
    subprocess.run(shellcheck, input=printed.stdout, text=True, check=True)
    told = (
        "--workdir='runs/a' is lost with the TPU, unless it is on a shared disk. gs://BUCKET/PATH"
    )
    for workdir, is_told in (("runs/a", True), ("gs://my-bucket/a", False)):
        command = ["train", f"--workdir={workdir}"]
        printed = dist_ens("tpu", "run", *flags, "--dry_run", "--", *command)
        assert (told in printed.stderr) is is_told
    assert "Did you mean 'follow'" in dist_ens("tpu", "folow", *flags).stderr
