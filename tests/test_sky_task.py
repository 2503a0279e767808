"""The task of SkyPilot that `dist-ens sky` writes."""

import os
import pathlib
import subprocess

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from commands import dist_ens
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
        "--coordinator_address=10.0.0.7:8476",
        "--num_processes=2",
        "--process_id=1",
        *arguments,
    ]


@pytest.mark.parametrize(
    "made",
    [
        SkySettings("digits", ("train", *HOSTILE)),
        SkySettings("digits", ("train", *HOSTILE), num_nodes=4, accelerators="tpu-v6e-16"),
    ],
    ids=["one node", "hosts of a TPU, which JAX finds"],
)
def test_no_address_is_given_where_none_is_needed(tmp_path, made):
    assert received(run_script(made), tmp_path) == ["train", *HOSTILE]


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
