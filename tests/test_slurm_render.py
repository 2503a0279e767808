"""The script for Slurm, run by a real bash with stand-ins for the commands of Slurm."""

import os
import pathlib
import posixpath
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import dist_ens, start, wait_for
from dist_ens.ground.commands import command_line
from dist_ens.ground.errors import RESTARTED, ExitCode, UserError
from launch import slurm_script
from stand_ins import executable

pytestmark = pytest.mark.quick
COMMAND = ("train", "--config=configs/digits.py", "--workdir=runs/digits")
DEFAULTS = {
    **dict.fromkeys(("tasks_per_node", "cpus_per_task", "time", "partition", "account", "log")),
    **{"name": "dist_ens", "nodes": 1, "gpus_per_node": 0, "grace_secs": 120},
    **{"max_restarts": 100, "configs": [], "setup": None},
}
SWEEP = {
    "command": ("train", "--workdir=runs/sweep", "--config.seed=3"),
    "configs": ["configs/a.py", "more configs/b.py"],
}
FULL = {
    **{"python": "/opt/my env/bin/python", "nodes": 4, "gpus_per_node": 8, "cpus_per_task": 6},
    **{"time": "1-12:00:00", "partition": "gpu", "account": "lab", "name": "digits"},
    **{"log": "logs/%x-%j.log", "grace_secs": 300, "max_restarts": 7},
    "setup": pathlib.Path("/home/me/load modules.sh"),
}
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
    "sleep": "#!/bin/bash\n",
    "python": RECORDER,
}
TASK_1 = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "1"}


def render(command=COMMAND, python="python", **changes):
    return slurm_script.render(command, python, **DEFAULTS | changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A function that runs a script with stand-ins for the commands that it calls.

    It returns the ended script, the arguments of its command, and those of scontrol.
    """
    folder, there = tmp_path_factory.mktemp("stand_ins"), tmp_path_factory.mktemp("empty")
    for name, text in STAND_INS.items():
        executable(folder / name, text)

    def run(script, **variables):
        for record in folder.glob("*.txt"):
            record.unlink()
        environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        ended = subprocess.run(
            ["bash"],
            input=script.encode(),
            cwd=there,
            env=environment | {"STAND_IN": str(folder), "SLURM_JOB_ID": "7"} | variables,
            capture_output=True,
        )
        assert not os.listdir(there)
        read = [folder / f"{name}.txt" for name in ("arguments", "scontrol", "flags")]
        texts = [os.fsdecode(file.read_bytes()) if file.exists() else "" for file in read]
        return ended, texts[0].split("\0")[:-1], *map(str.split, texts[1:])

    return run


def test_the_lines_for_sbatch_are_those_of_the_flags():
    def lines(**options):
        return [line for line in render(**options).splitlines() if line.startswith("#SBATCH")]

    assert lines(**FULL) == [
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
    plain = lines()
    assert {"#SBATCH --ntasks-per-node=1", "#SBATCH --output=dist_ens-%j.log"} < {*plain}
    assert not [line for line in plain if "gpus" in line or "time" in line]
    one_process = lines(gpus_per_node=8, tasks_per_node=1)
    assert {"#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8"} < {*one_process}


@pytest.mark.parametrize("options", [{}, SWEEP, FULL], ids=["plain", "sweep", "full"])
def test_bash_and_shellcheck_accept_the_script(options):
    shellcheck = pathlib.Path(sys.executable).with_name("shellcheck")
    # The code of a task is in single quotes on purpose, and --setup is a file of the user.
    for command in (["bash", "-n"], [shellcheck, "--exclude=SC2016,SC1091", "-"]):
        subprocess.run(command, input=render(**options), text=True, check=True)


WORDS = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"])
    | st.sampled_from("\"'`$(){};&|<>\\!*?~#\n\t\r -="),
    max_size=30,
)
NAMES = WORDS.filter(lambda name: "/" not in name and name.strip("."))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(words=st.lists(WORDS, max_size=5), folder=WORDS, name=NAMES)
def test_a_command_gets_its_arguments_byte_for_byte(run, words, folder, name):
    ended, arguments, *_ = run(render(("train", *words)))
    assert ended.returncode == 0, ended.stderr
    assert arguments == ["-P", "-m", "launch.train", *words]
    command = ("train", f"--workdir={folder}", "--config.seed=3")
    ended, arguments, *_ = run(render(command, configs=["a.py", f"configs/{name}"]), **TASK_1)
    assert ended.returncode == 0, ended.stderr
    workdir = posixpath.join(folder, pathlib.PurePath(name).stem)
    own = [f"--config=configs/{name}", f"--workdir={workdir}"]
    assert arguments == ["-P", "-m", "launch.train", *command[1:], *own]


@pytest.mark.parametrize("given", [["--workdir", "runs/s"], ["-workdir=x", "--workdir=runs/s"]])
def test_a_task_of_a_sweep_has_files_of_its_own(run, given):
    command = ("predict", *given, "--input=x.npy", "--output", "runs/p.npz")
    _, arguments, *_ = run(render(command, configs=["a.py", "b.py"]), **TASK_1)
    # The last value of a flag counts.
    assert arguments[-3:] == ["--config=b.py", "--workdir=runs/s/b", "--output=runs/p_b.npz"]
    in_bucket = ("train", "--workdir=s3://my-bucket/s", "--output=gs://my-bucket/p.npz")
    _, arguments, *_ = run(render(in_bucket, configs=["a.py", "b.py"]), **TASK_1)
    assert arguments[-2:] == ["--workdir=s3://my-bucket/s/b", "--output=gs://my-bucket/p_b.npz"]


def test_srun_gets_the_flags_after_a_setup_without_which_the_job_ends(run, tmp_path):
    (tmp_path / "setup.sh").write_text("export CODES=3\n")
    ended, *_, flags = run(render(cpus_per_task=6, setup=tmp_path / "setup.sh"))
    assert ended.returncode == 3
    assert flags == ["--kill-on-bad-exit=1", "--cpus-per-task=6"]
    ended, arguments, *_ = run(render(setup=tmp_path / "no such file.sh"))
    assert (ended.returncode, arguments) == (ExitCode.USAGE, [])
    assert b"This node cannot read the file of --setup: " in ended.stderr


@pytest.mark.parametrize("code", sorted({*map(int, ExitCode), *RESTARTED, 127}))
def test_the_job_ends_with_the_code_and_is_requeued_if_a_launcher_restarts_it(run, code):
    ended, _, requeued, _ = run(render(), CODES=str(code))
    assert ended.returncode == code
    assert requeued == (["requeue", "7"] if code in (42, 134, 137, 139, 143) else [])


# srun itself returns the highest code.
@pytest.mark.parametrize(
    ("variables", "code", "requeued", "message"),
    [
        ({"CODES": "42", "STATE": "COMPLETING"}, 42, "", "does not requeue it"),
        ({"CODES": "137", "SLURM_RESTART_COUNT": "2"}, 137, "requeue 7", "restart 3 of at most 3."),
        ({"CODES": "137", "SLURM_RESTART_COUNT": "3"}, 137, "", "after 3 restarts, the limit of"),
        ({"CODES": "0 43 42 137", "SLURM_NTASKS": "4"}, 43, "", ""),
        ({"CODES": "0 42 1 143", "SLURM_NTASKS": "4"}, 42, "requeue 7", ""),
        ({"CODES": "42", **TASK_1}, 42, "requeue 5_1", ""),
    ],
    ids=["Slurm ends it", "last restart", "no restart left", "first 43", "first 42", "sweep"],
)
def test_a_job_is_requeued_if_that_helps(run, variables, code, requeued, message):
    sweep = SWEEP if "SLURM_ARRAY_JOB_ID" in variables else {}
    ended, _, called, _ = run(render(max_restarts=3, **sweep), **variables)
    assert (ended.returncode, called) == (code, requeued.split())
    assert message in ended.stdout.decode()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        *(({"name": value}, "--name cannot be") for value in ("a\nb", "a b", "a'b", "a#b", "a\\b")),
        ({"gpus_per_node": 8, "tasks_per_node": 4}, "--gpus_per_node=8: use 8 or 1"),
        ({"configs": ["a/x.py", "b/x.py"]}, "use files with different names"),
        ({"configs": ["a.py"], "command": ("train",)}, "Add --workdir=WORKDIR after --"),
    ],
)
def test_what_slurm_would_read_in_another_way_is_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        render(**options)


@pytest.mark.slow
def test_the_command_prints_or_writes_the_script_and_the_next_command(tmp_path):
    script = render(python=sys.executable, nodes=2, name="digits")
    flags, output = ("--nodes=2", "--name=digits"), f"--output={tmp_path}/job.sh"
    line = command_line(*COMMAND)
    for before, own in (((), ()), (("submit", "--dry_run"), (output,))):
        ended = dist_ens("slurm", *before, *own, *flags, "--", *COMMAND)
        following = " ".join(["dist-ens slurm submit", *own, *flags, "--", line])
        assert ended == (0, script, f"Next:\n  {following}\n")
    assert not list(tmp_path.iterdir())
    ended = dist_ens("slurm", "render", *flags, output, "--", *COMMAND)
    assert ended == (0, "", f"Next:\n  sbatch {tmp_path}/job.sh\n")
    assert (tmp_path / "job.sh").read_text() == script


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sbatch", "mark", "number", "sentence"),
    [
        ("echo 7", "following", signal.SIGTERM, "Job 7 is left running. To follow it: tail -F "),
        ("echo 7", "following", signal.SIGINT, "Job 7 is left running. To follow it: tail -F "),
        ("touch submitting; sleep 60", "submitting", signal.SIGTERM, "may be submitted already."),
    ],
    ids=["SIGTERM", "SIGINT", "SIGTERM during sbatch"],
)
def test_a_signal_to_submit_leaves_the_job_running(sbatch, mark, number, sentence, tmp_path):
    executable(tmp_path / "sbatch", f"#!/bin/bash\ncat > /dev/null\n{sbatch}\n")
    shown = "JobState=RUNNING ExitCode=0:0\\n   StdOut=job.log"
    executable(tmp_path / "scontrol", f"#!/bin/bash\ntouch following\nprintf '{shown}\\n'\n")
    path, words = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, ["slurm", "submit", "--", *COMMAND]
    run = start(words, folder=tmp_path, name="log", environ=path, cwd=tmp_path)
    log = (tmp_path / "log_err_0").read_text
    wait_for((tmp_path / mark).exists, log)
    if mark == "following":
        wait_for(lambda: "Its log is" in log(), log)
    run.send(number)
    assert run.codes(20) == [ExitCode.INTERRUPTED]  # No launcher would submit the job again.
    last = log().splitlines()[-1]
    assert last.startswith(f"Ended by {number.name}.")
    assert sentence in last
