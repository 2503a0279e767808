"""The task of SkyPilot that `dist-ens sky` writes."""

import os
import pathlib
import shlex
import subprocess

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import dist_ens
from dist_ens.cluster_environment import detect
from launch.sky_task import SkySettings, run_script, task
from launch.yaml_text import yaml_text
from stand_ins import HOSTILE, RECORD, arguments_in, executable

pytestmark = pytest.mark.quick
# SkyPilot lists the addresses of the nodes, one on each line, that of rank 0 first.
NODES = {
    "SKYPILOT_NODE_IPS": "10.0.0.7\n10.0.0.3\n",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
}


def received(script: str, folder: pathlib.Path) -> list[str]:
    """The arguments that dist-ens gets when a node runs a script."""
    record = folder / "record"
    executable(folder / "dist-ens", RECORD.format(file=record))
    path = f"{folder}:{os.environ['PATH']}"
    subprocess.run(["bash", "-c", script], cwd=folder, env={**NODES, "PATH": path}, check=True)
    return arguments_in(record)


def next_commands(output: str) -> list[str]:
    """The commands that a person types next, without their comments."""
    lines = output.partition("Next:\n")[2].splitlines()
    return [line.strip().partition("  # ")[0] for line in lines]


texts = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(texts, max_size=4))
def test_a_node_gets_the_arguments_that_the_user_typed(tmp_path_factory, arguments):
    made = SkySettings("digits", ("train", *arguments), num_nodes=2)
    script = yaml.safe_load(yaml_text(task(made)))["run"]
    assert received(script, tmp_path_factory.mktemp("node")) == [
        "train",
        *arguments,
    ]


def test_a_node_finds_the_others_by_the_variables_of_skypilot():
    found = detect(NODES | {"SKYPILOT_TASK_ID": "sky-managed-digits-7"}, has_kubernetes=False)
    assert (found.num_processes, found.process_id) == (2, 1)
    host, _, port = found.coordinator_address.partition(":")
    assert host == "10.0.0.7"
    other = detect(NODES | {"SKYPILOT_TASK_ID": "sky-managed-digits-8"}, has_kubernetes=False)
    assert other.coordinator_address != f"{host}:{port}"  # Each job has a port of its own.


@pytest.mark.slow
@pytest.mark.parametrize("output", [(), ("--output=my task.yaml", "--dry_run")])
def test_the_next_commands_write_the_file_that_they_start(output, tmp_path):
    flags = ("--name=digits", "--num_nodes=2", *output)
    ended = dist_ens("sky", *flags, "--", "train", "--config.x=a b")
    assert ended.returncode == 0, ended.stderr
    file = "'my task.yaml'" if output else "task.yaml"
    commands = next_commands(ended.stderr)
    assert commands[:2] == [
        f"dist-ens sky --name=digits --num_nodes=2 {quoted_flag(file)} -- train '--config.x=a b'",
        f"sky jobs launch {file}",
    ]
    words = shlex.split(commands[0])[1:]
    there = tmp_path / shlex.split(file)[0]
    written = dist_ens(*(word.replace("--output=", f"--output={tmp_path}/") for word in words))
    assert written.returncode == 0, written.stderr
    assert there.read_text() == ended.stdout


def quoted_flag(file: str) -> str:
    return f"'--output={file[1:]}" if file[0] == "'" else f"--output={file}"


def test_the_script_ends_with_the_exit_code_of_the_command(tmp_path):
    executable(tmp_path / "dist-ens", "#!/bin/bash\nexit 42\n")
    for num_nodes in (1, 2):
        script = run_script(SkySettings("digits", ("train",), num_nodes=num_nodes))
        path = f"{tmp_path}:{os.environ['PATH']}"
        ended = subprocess.run(["bash", "-c", script], env={**NODES, "PATH": path})
        assert ended.returncode == 42


def test_the_file_says_all_that_was_asked_for(tmp_path):
    file = tmp_path / "task.yaml"
    flags = ["--num_nodes=2", "--accelerators=H100:8", "--infra=gcp/us-central1", "--spot"]
    flags += ["--bucket=s3://runs", "--secret_env=WANDB_API_KEY,HF_TOKEN", f"--output={file}"]
    command = ["train", "--config=configs/digits.py", "--workdir=/runs/digits"]
    ended = dist_ens("sky", "--name=digits", *flags, "--", *command)
    assert ended.returncode == 0, ended.stderr
    made = yaml.safe_load(file.read_text())
    assert made.pop("run").endswith(" --config=configs/digits.py --workdir=/runs/digits\n")
    assert made == {
        "name": "digits",
        "num_nodes": 2,
        "resources": {
            "accelerators": "H100:8",
            "infra": "gcp/us-central1",
            "use_spot": True,
            "job_recovery": {"recover_on_exit_codes": [42]},
        },
        "workdir": ".",
        "file_mounts": {"/runs": {"source": "s3://runs", "mode": "MOUNT"}},
        "secrets": {"WANDB_API_KEY": None, "HF_TOKEN": None},
        "setup": "pip install .",
    }
    launch = f"sky jobs launch --secret WANDB_API_KEY --secret HF_TOKEN {file}"
    assert launch in ended.stdout


def test_a_workdir_that_would_be_lost_is_refused():
    ended = dist_ens("sky", "--name=digits", "--", "train", "--workdir=runs/digits")
    assert ended.returncode == 2
    assert "Add --bucket." in ended.stderr
