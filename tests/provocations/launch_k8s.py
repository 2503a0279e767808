"""How the messages of `dist-ens k8s`, `dist-ens tpu` and `dist-ens sky` are provoked."""

import importlib
import subprocess
import sys
import types

from launch.gcloud import QueuedResource, num_vms
from launch.jobset import JobSetSettings, Nodes, SecretVariable, TpuSlices
from launch.programs import run_program
from launch.sky_task import SkySettings
from launch.yaml_text import yaml_text
from provocations.launch import _command, _own_flags

_TRAIN = ("train", "--config=configs/digits.py", "--workdir=/runs/digits")
_GIVEN = ("--name=digits", "--image=example.com/dist-ens:1")
_HERE = ("--name=digits", "--zone=us-west4-a")
_GROUP = (*_HERE, "--project=team", "--kind=instance_group")
_STARTED = types.SimpleNamespace(arguments=_TRAIN)


def _settings(*arguments, name="digits", hardware=None, **others):
    hardware = hardware or Nodes(1, 0)
    return JobSetSettings(name, "example.com/dist-ens:1", arguments, hardware, **others)


def _tpu(*arguments, ended=None):
    """Runs `dist-ens tpu`, with a function of a call in place of gcloud."""
    with _own_flags():
        sys.modules.pop("launch.tpu", None)
        module = importlib.import_module("launch.tpu")
        try:
            module.run_program = lambda call, *_, **__: ended(call)
            module.signals = types.SimpleNamespace(leave_running=lambda _: None)
            module.cli.parsed(module._ACTION.prepare(["dist-ens", *arguments]))
            module.main()
        finally:
            del sys.modules["launch.tpu"]


def _codes(**codes):
    """A stand-in for gcloud, which ends with a code if a text is part of its call."""
    found = {text.replace("_", "-"): code for text, code in codes.items()}

    def ended(call):
        code = next((code for text, code in found.items() if text in " ".join(call)), 0)
        return subprocess.CompletedProcess(call, code, "digits-x1\n", "The project is unknown.")

    return ended


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
    QueuedResource("digits", "us-west4-a", num_slices=0)


def vms_that_do_not_divide_a_slice():
    num_vms("ct6e-standard-4t", "3x3")


def a_word_of_tpu_that_is_misspelt():
    _tpu("folow", *_HERE)


def a_flag_of_the_other_kind_of_tpu():
    _tpu("create", *_HERE, "--machine_type=ct6e-standard-4t")


def no_gcloud():
    run_program(["no-gcloud", "compute"], "Install the Google Cloud CLI.")


def a_gcloud_that_does_not_create():
    _tpu("create", *_HERE, "--accelerator_type=v", "--runtime_version=v", ended=_codes(create=3))


def a_gcloud_that_creates_a_part():
    flags = ("--machine_type=ct6e-standard-4t", "--tpu_topology=4x4", "--image_family=tpu")
    _tpu("create", *_GROUP, *flags, ended=_codes(instance_groups=3))


def a_gcloud_that_starts_nothing():
    _tpu("run", *_HERE, "--", "train", ended=_codes(setsid=3))


def a_worker_that_cannot_be_stopped():
    _tpu("run", *_HERE, "--", "train", ended=_codes(tpu_vm=255))


def a_group_without_worker_0():
    _tpu("follow", *_GROUP, ended=_codes(worker_number=100))


def a_group_that_gcloud_does_not_list():
    _tpu("follow", *_GROUP, ended=_codes(list_instances=1))


def a_gcloud_that_does_not_delete():
    _tpu("delete", *_HERE, ended=_codes(delete=3))
