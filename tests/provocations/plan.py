"""How the messages of `dist_ens.plan` and `dist_ens.report` are provoked."""

import importlib.util
import subprocess
import types

import jax
import numpy as np
from dist_ens.config import Experiment

from dist_ens.plan import topology
from dist_ens.plan.planned import Plan, PlannedMesh, of_unsupported
from dist_ens.plan.planner import Planner
from dist_ens.report import page, run_files

_BYTES = {"parameters": 2**30, "model_state": 0, "optimizer": 2**31, "total": 2**35}


def _plan(platform="tpu", max_num_members=None, **mesh):
    best = PlannedMesh(2, 4, 16, 1, platform, "vmap", None, _BYTES, **mesh)
    Plan((best,), max_num_members, True, 1, 16 * 2**30).check_fits()


def too_many_members():
    _plan(max_num_members=8)


def too_many_members_for_the_memory_of_a_host():
    _plan("cpu", max_num_members=8)


def a_network_that_is_too_large():
    _plan()


def devices_that_cannot_all_be_used():
    experiment = Experiment.from_dict(
        {"steps": 1, "num_members": 3, "data": {"global_batch_size": 30}}
    )
    spec = types.SimpleNamespace(num_groups=1)
    Planner(experiment, spec, None, False, None, jax.devices())._ensemble_axes()


def a_topology_that_does_not_exist(monkeypatch):
    def refused(**_):
        raise jax.errors.JaxRuntimeError("NOT_FOUND: no topology 3x5")

    monkeypatch.setattr(topology.topologies, "get_topology_desc", refused)
    topology.Topology.parse("v5e:3x5").devices()


def a_topology_without_libtpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    topology.Topology.parse("v5e:4x4").run_module("launch.plan", [])


def a_topology_of_too_many_cpus():
    topology.Topology.parse("cpu:4096")


def a_topology_of_three_axes():
    topology.Topology.parse("v5e:4x4x4")


def a_topology_of_an_unknown_chip():
    topology.Topology.parse("v5:4x4")


def a_topology_of_gpus():
    topology.Topology.parse("gpu:8")


def a_compiler_that_crashes(monkeypatch):
    ended = types.SimpleNamespace(returncode=-6)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    topology.Topology.parse("cpu:8").run_module("launch.plan", [])


def no_runs_to_report(tmp_path):
    page.write_page(tmp_path / "report.html", [])


def a_run_without_curves(tmp_path):
    run_files.read_run(tmp_path)


def curves_that_are_damaged(tmp_path):
    (tmp_path / run_files.CURVES).write_text('{"steps": [')
    run_files.read_run(tmp_path)


def pictures_that_are_damaged(tmp_path):
    (tmp_path / "pictures.npy").write_bytes(b"GIF89a")
    run_files._read_pictures(tmp_path / "pictures.npy", "dist-ens evaluate")


def pictures_of_two_axes(tmp_path):
    np.save(tmp_path / "pictures.npy", np.zeros((8, 8)))
    run_files._read_pictures(tmp_path / "pictures.npy", "dist-ens evaluate")


def a_mesh_for_which_xla_does_not_compile():
    slices = [types.SimpleNamespace(slice_index=i // 4) for i in range(8)]
    raise of_unsupported("1 x 8", RuntimeError("UNIMPLEMENTED: cross-slice reduce."), slices)
