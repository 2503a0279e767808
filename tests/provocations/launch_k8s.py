"""How the messages of `dist-ens k8s`, `dist-ens tpu` and `dist-ens sky` are provoked."""

import importlib
import subprocess
import sys
import types

from launch.gcloud import Tpu
from launch.jobset import JobSetSettings, Nodes, SecretVariable, TpuSlices
from launch.sky_task import SkySettings
from launch.yaml_text import yaml_text
from provocations.launch import _command, _own_flags

_TRAIN = ("train", "--config=configs/digits.py", "--workdir=/runs/digits")
_GIVEN = ("--name=digits", "--image=example.com/dist-ens:1")
_STARTED = types.SimpleNamespace(arguments=_TRAIN)


def _settings(*arguments, name="digits", hardware=None, **others):
    hardware = hardware or Nodes(1, 0)
    return JobSetSettings(name, "example.com/dist-ens:1", arguments, hardware, **others)


def _tpu(*arguments, call=None):
    """Runs `dist-ens tpu`, with a function in place of the call of gcloud."""
    with _own_flags():
        sys.modules.pop("launch.tpu", None)
        module = importlib.import_module("launch.tpu")
        try:
            module.subprocess = types.SimpleNamespace(run=call)
            module.cli.parsed(module._ACTION.prepare(["dist-ens", *arguments]))
            module.main()
        finally:
            del sys.modules["launch.tpu"]


def a_topology_that_is_none():
    TpuSlices("tpu-v6e-slice", "16", 4, 1)


def a_topology_that_nodes_do_not_divide():
    TpuSlices("tpu-v6e-slice", "4x4", 3, 1)


def no_slices_of_a_jobset():
    TpuSlices("tpu-v6e-slice", "4x4", 4, 0)


def no_nodes():
    Nodes(0, 8)


def a_secret_that_is_typed():
    SecretVariable.parse("WANDB_API_KEY=5ecret")


def a_name_that_kubernetes_refuses():
    _settings(name="My_Run")


def no_time_to_save():
    _settings(grace_secs=0)


def members_that_do_not_divide_over_slices():
    two = TpuSlices("tpu-v6e-slice", "4x4", 4, 2)
    _settings("train", "--config.num_members=9", hardware=two)


def no_image():
    _command("k8s", "--name=digits")


def nodes_of_two_kinds():
    _command("k8s", *_GIVEN, "--tpu_topology=4x4", "--num_nodes=2")


def a_label_without_a_value():
    _command("k8s", *_GIVEN, "--node_selector=ssd")


def a_workdir_without_storage():
    _command("k8s", *_GIVEN, _COMMAND=_STARTED)


def a_workdir_beside_the_storage():
    _command("k8s", *_GIVEN, "--volume_claim=c", "--mount_path=/data", _COMMAND=_STARTED)


def an_argument_that_is_no_text():
    yaml_text({"args": ["--workdir=K\udcf6ln"]})


def no_nodes_of_skypilot():
    SkySettings("digits", _TRAIN, num_nodes=0)


def a_secret_that_is_typed_for_skypilot():
    SkySettings("digits", _TRAIN, secrets=("WANDB_API_KEY=5ecret",))


def no_slices():
    Tpu("digits", "us-west4-a", num_slices=0)


def a_word_of_tpu_that_is_misspelt():
    _tpu("folow", "--name=digits", "--zone=us-west4-a")


def no_gcloud():
    def absent(call):
        raise FileNotFoundError(2, "No such file or directory")

    _tpu("delete", "--name=digits", "--zone=us-west4-a", call=absent)


def a_gcloud_that_fails():
    failed = subprocess.CompletedProcess([], 3)
    _tpu("delete", "--name=digits", "--zone=us-west4-a", call=lambda _: failed)
