"""The script for Slurm, run by a real bash with stand-ins for the commands of Slurm."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import dist_ens
from conftest import COMMAND_ENVIRONMENT
from dist_ens.errors import UserError
from dist_ens.exit_codes import RESTARTED, ExitCode
from launch.slurm_script import Job, render
from launch.started_command import shell_line
from stand_ins import executable

pytestmark = pytest.mark.quick
ROOT = pathlib.Path(__file__).parent.parent
COMMAND = ("train", "--config=configs/digits.py", "--workdir=runs/digits")
PLAIN = Job(COMMAND, python="python")
SWEEP = Job(
    ("train", "--workdir=runs/sweep", "--config.seed=3"),
    python="python",
    configs=("configs/a.py", "more configs/b.py"),
)
FULL = Job(
    COMMAND,
    python="/opt/my env/bin/python",
    nodes=4,
    gpus_per_node=8,
    cpus_per_task=6,
    time="1-12:00:00",
    partition="gpu",
    account="lab",
    name="digits",
    log="logs/%x-%j.log",
    grace_secs=300,
    max_restarts=7,
    setup=pathlib.Path("/home/me/load modules.sh"),
)
# `srun FLAGS… bash -c TASK FIRST COMMAND…` starts the command as often as SLURM_NTASKS says. It
# ends as srun does, with the highest code of the tasks.
SRUN = r"""#!/bin/bash
while [[ $1 == --* ]]; do echo "$1" >> "$STAND_IN/flags.txt"; shift; done
highest=0
for ((i = 0; i < ${SLURM_NTASKS:-1}; i++)); do
  SLURM_PROCID=$i "$@"
  code=$?
  ((code > highest)) && highest=$code
done
exit $highest
"""
RECORDER = r"""#!/bin/bash
printf '%s\0' "$@" > "$STAND_IN/arguments.txt"
codes=(${CODES:-0})
exit "${codes[SLURM_PROCID]}"
"""
STAND_INS = {
    "srun": SRUN,
    "squeue": '#!/bin/bash\necho "${STATE:-RUNNING}"\n',
    "scontrol": '#!/bin/bash\necho "$@" >> "$STAND_IN/scontrol.txt"\n',
    "python": RECORDER,
}


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory):
    """A folder with the commands that a script calls; they write what they are told into it."""
    folder = tmp_path_factory.mktemp("stand_ins")
    for name, text in STAND_INS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(script, stand_ins, **variables):
    """The ended script, the arguments of its command, and those of scontrol."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("arguments", "scontrol", "flags"):
            (stand_ins / f"{name}.txt").unlink(missing_ok=True)
        environment = {
            "PATH": f"{stand_ins}{os.pathsep}{os.environ['PATH']}",
            "STAND_IN": str(stand_ins),
            "SLURM_JOB_ID": "7",
        }
        ended = subprocess.run(
            ["bash"],
            input=script.encode(),
            cwd=folder,
            env=environment | variables,
            capture_output=True,
        )
        assert not os.listdir(folder)
    arguments = os.fsdecode((stand_ins / "arguments.txt").read_bytes()).split("\0")[:-1]
    requeued = stand_ins / "scontrol.txt"
    return ended, arguments, requeued.read_text().split() if requeued.exists() else []


def test_the_lines_for_sbatch_are_those_of_the_flags():
    lines = [line for line in render(FULL).splitlines() if line.startswith("#SBATCH")]
    assert lines == [
        "#SBATCH --job-name=digits",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=lab",
        "#SBATCH --nodes=4",
        "#SBATCH --ntasks-per-node=8",  # one for each GPU
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=6",
        "#SBATCH --time=1-12:00:00",
        "#SBATCH --output=logs/%x-%j.log",
        "#SBATCH --open-mode=append",
        "#SBATCH --signal=TERM@300",
        "#SBATCH --requeue",
    ]


def test_without_flags_a_job_has_one_process_and_a_log_with_its_id():
    lines = render(PLAIN).splitlines()
    assert "#SBATCH --ntasks-per-node=1" in lines
    assert "#SBATCH --output=dist_ens-%j.log" in lines
    assert not [line for line in lines if "gpus" in line or "time" in line]


def test_one_process_can_have_all_gpus_of_a_node():
    job = Job(COMMAND, python="python", gpus_per_node=8, tasks_per_node=1)
    lines = render(job).splitlines()
    assert {"#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8"} < {*lines}


@pytest.mark.parametrize("job", [PLAIN, SWEEP, FULL], ids=["plain", "sweep", "full"])
def test_bash_and_shellcheck_accept_the_script(job, tmp_path):
    (tmp_path / "job.sh").write_text(render(job))
    subprocess.run(["bash", "-n", tmp_path / "job.sh"], check=True)
    shellcheck = pathlib.Path(sys.executable).with_name("shellcheck")
    # The code of a task is in single quotes on purpose, and --setup is a file of the user.
    command = [shellcheck, "--exclude=SC2016,SC1091", tmp_path / "job.sh"]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


WORDS = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    | st.sampled_from("\"'`$(){};&|<>\\!*?~#\n\t\r -="),
    max_size=30,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(words=st.lists(WORDS, max_size=5))
def test_the_command_gets_its_arguments_byte_for_byte(stand_ins, words):
    ended, arguments, _ = run(render(Job(("train", *words), python="python")), stand_ins)
    assert ended.returncode == 0, ended.stderr
    assert arguments == ["-P", "-m", "launch.train", *words]


@settings(max_examples=30, deadline=None)
@given(folder=WORDS, name=WORDS.filter(lambda name: "/" not in name and name.strip(".")))
def test_a_task_of_a_sweep_gets_its_config_and_its_workdir_byte_for_byte(stand_ins, folder, name):
    command = ("train", f"--workdir={folder}", "--config.seed=3")
    job = Job(command, python="python", configs=("a.py", f"configs/{name}"))
    ids = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
    ended, arguments, _ = run(render(job), stand_ins, **ids)
    assert ended.returncode == 0, ended.stderr
    workdir = pathlib.PurePath(folder) / pathlib.PurePath(name).stem
    own = [f"--config=configs/{name}", f"--workdir={workdir}"]
    assert arguments == ["-P", "-m", "launch.train", *own, "--config.seed=3"]


def test_srun_ends_all_tasks_when_one_fails_and_gets_the_cpus(stand_ins, tmp_path):
    (tmp_path / "setup.sh").write_text("export CODES=3\n")
    job = Job(COMMAND, python="python", cpus_per_task=6, setup=tmp_path / "setup.sh")
    ended, _, _ = run(render(job), stand_ins)
    assert ended.returncode == 3
    assert (stand_ins / "flags.txt").read_text().split() == [
        "--kill-on-bad-exit=1",
        "--cpus-per-task=6",
    ]


def test_a_setup_that_is_not_on_the_node_ends_the_job(stand_ins, tmp_path):
    (stand_ins / "arguments.txt").unlink(missing_ok=True)
    job = Job(COMMAND, python="python", setup=tmp_path / "no such file.sh")
    environment = {"PATH": f"{stand_ins}{os.pathsep}{os.environ['PATH']}"}
    ended = subprocess.run(
        ["bash"],
        input=render(job),
        cwd=tmp_path,
        env=environment | {"STAND_IN": str(stand_ins), "SLURM_JOB_ID": "7"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == ExitCode.USAGE
    assert ended.stderr == (
        f"This node cannot read the file of --setup: {tmp_path}/no such file.sh\n"
    )
    assert not (stand_ins / "arguments.txt").exists()  # The command was not started.


@pytest.mark.parametrize("given", [["--workdir", "runs/s"], ["-workdir=x", "--workdir=runs/s"]])
def test_a_sweep_reads_its_flags_as_the_command_does(stand_ins, given):
    command = ("predict", *given, "--input=x.npy", "--output", "runs/p.npz")
    job = Job(command, python="python", configs=("a.py", "b.py"))
    ids = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}
    ended, arguments, _ = run(render(job), stand_ins, **ids)
    assert ended.returncode == 0, ended.stderr
    # Each task writes a file of its own.
    own = ["--config=b.py", "--workdir=runs/s/b", "--output=runs/p_b.npz"]
    assert arguments == ["-P", "-m", "launch.predict", *own, "--input=x.npy"]


@pytest.fixture
def no_waiting(stand_ins):
    """`sleep` returns at once."""
    (stand_ins / "sleep").write_text("#!/bin/bash\n")
    (stand_ins / "sleep").chmod(0o755)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("code", sorted({*map(int, ExitCode), *RESTARTED, 127}))
def test_the_job_ends_with_the_code_and_is_requeued_if_a_launcher_restarts_it(stand_ins, code):
    ended, _, requeued = run(render(PLAIN), stand_ins, CODES=str(code))
    assert ended.returncode == code
    assert requeued == (["requeue", "7"] if code in (42, 134, 137, 139, 143) else [])


@pytest.mark.usefixtures("no_waiting")
def test_a_job_that_slurm_ends_is_not_requeued(stand_ins):
    ended, _, requeued = run(render(PLAIN), stand_ins, CODES="42", STATE="COMPLETING")
    assert (ended.returncode, requeued) == (42, [])
    assert b"does not requeue it" in ended.stdout


@pytest.mark.usefixtures("no_waiting")
def test_the_restarts_are_counted_and_end(stand_ins):
    script = render(Job(COMMAND, python="python", max_restarts=3))
    ended, _, requeued = run(script, stand_ins, CODES="137", SLURM_RESTART_COUNT="2")
    assert requeued == ["requeue", "7"]
    assert b"restart 3 of at most 3." in ended.stdout
    ended, _, requeued = run(script, stand_ins, CODES="137", SLURM_RESTART_COUNT="3")
    assert (ended.returncode, requeued) == (137, [])
    assert b"after 3 restarts, the limit of --max_restarts" in ended.stdout


@pytest.mark.usefixtures("no_waiting")
def test_the_first_task_that_fails_gives_the_code(stand_ins):
    # srun itself returns 137, the highest.
    tasks = {"CODES": "0 43 42 137", "SLURM_NTASKS": "4"}
    ended, _, requeued = run(render(PLAIN), stand_ins, **tasks)
    assert (ended.returncode, requeued) == (43, [])
    tasks = {"CODES": "0 42 1 143", "SLURM_NTASKS": "4"}
    ended, _, requeued = run(render(PLAIN), stand_ins, **tasks)
    assert (ended.returncode, requeued) == (42, ["requeue", "7"])


@pytest.mark.usefixtures("no_waiting")
def test_only_the_preempted_task_of_a_sweep_is_requeued(stand_ins):
    ids = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0", "CODES": "42"}
    _, _, requeued = run(render(SWEEP), stand_ins, **ids)
    assert requeued == ["requeue", "5_0"]


@pytest.mark.parametrize("value", ["two\nlines", "a b", "a'b", 'a"b', "a#b", "a\\b", "", "\u202e"])
@pytest.mark.parametrize("field", ["name", "partition", "account", "time", "log"])
def test_a_value_that_sbatch_would_read_in_another_way_is_refused(field, value):
    with pytest.raises(UserError, match=f"^--{field} cannot be "):
        render(Job(COMMAND, python="python", **{field: value}))


@pytest.mark.slow
def test_the_command_prints_the_script_and_the_next_command():
    flags = ("--nodes=2", "--name=digits")
    ended = dist_ens("slurm", *flags, "--", *COMMAND)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == render(Job(COMMAND, python=sys.executable, nodes=2, name="digits"))
    assert (
        ended.stderr
        == f"Next: dist-ens slurm submit --nodes=2 --name=digits -- {shell_line(COMMAND)}\n"
    )


@pytest.mark.slow
def test_the_command_writes_the_script(tmp_path):
    ended = dist_ens("slurm", "render", f"--output={tmp_path}/job.sh", "--", *COMMAND)
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert ended.stderr == f"Next: sbatch {tmp_path}/job.sh\n"
    assert (tmp_path / "job.sh").read_text() == render(Job(COMMAND, python=sys.executable))


def test_a_dry_run_submits_nothing_and_writes_nothing(tmp_path):
    output = f"--output={tmp_path}/job.sh"
    ended = dist_ens("slurm", "submit", "--dry_run", output, "--", *COMMAND)
    assert ended.returncode == 0, ended.stderr
    assert re.match("#!/bin/bash\n", ended.stdout)
    assert ended.stderr == f"Next: dist-ens slurm submit {output} -- {shell_line(COMMAND)}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sbatch", "number"),
    [
        ("echo 7", signal.SIGTERM),
        ("echo 7", signal.SIGINT),
        ("touch submitting; sleep 60", signal.SIGTERM),
    ],
    ids=["SIGTERM", "SIGINT", "SIGTERM during sbatch"],
)
def test_a_signal_to_submit_leaves_the_job_running_and_says_so(sbatch, number, tmp_path):
    executable(tmp_path / "sbatch", f"#!/bin/bash\ncat > /dev/null\n{sbatch}\n")
    shown = "JobState=RUNNING ExitCode=0:0\\n   StdOut=job.log"
    executable(tmp_path / "scontrol", f"#!/bin/bash\ntouch following\nprintf '{shown}\\n'\n")
    submit = subprocess.Popen(
        [sys.executable, "-m", "launch.slurm", "submit", "--", *COMMAND],
        env=COMMAND_ENVIRONMENT
        | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        mark = tmp_path / ("following" if sbatch == "echo 7" else "submitting")
        deadline = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(0.5)  # Until the message about the log.
        submit.send_signal(number)
        submit.wait(20)
    finally:
        with contextlib.suppress(ProcessLookupError):  # Nothing of it is left.
            os.killpg(submit.pid, signal.SIGKILL)
    assert submit.returncode == ExitCode.INTERRUPTED  # No launcher would submit the job again.
    told = submit.stderr.read().splitlines()[-1]
    if sbatch == "echo 7":
        assert told == (
            f"Ended by {number.name}. Job 7 is left running. To follow it: tail -F job.log. To "
            "cancel it: scancel 7."
        )
    else:
        assert told == (
            f"Ended by {number.name}. The job may be submitted already. Look for it before you "
            "submit it again: squeue --me."
        )
