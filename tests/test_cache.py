"""The compilation cache: there by default, never in the way."""

import os
import re

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import dist_ens as de
from commands import python
from conftest import COMMAND_ENVIRONMENT
from dist_ens.ensemble.select_execution import keep_execution, kept_execution
from dist_ens.processes import compile_cache
from dist_ens.processes.compile_cache import access_of_others

CODE = """
import logging, jax
from dist_ens.processes.compile_cache import use_compile_cache
use_compile_cache()
logging.basicConfig(level=logging.WARNING)
def program(x):
    return (x @ x).sum()
with jax.log_compiles():
    jax.jit(program)(jax.numpy.ones((7, 7)))
"""


def run(cache_home, code=CODE, *words, **variables):
    """What a process reports that may compile."""
    no_cache = {name: None for name in COMMAND_ENVIRONMENT if name.startswith("JAX_")}
    own = no_cache | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(cache_home)} | variables
    ended = python("-c", code, *words, **own)
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


def test_a_second_start_compiles_nothing_anew(tmp_path):
    first, second = run(tmp_path), run(tmp_path)
    hit = "Persistent compilation cache hit for 'jit_program'"
    assert hit not in first
    assert hit in second
    assert (tmp_path / "dist_ens" / "compiled").stat().st_mode & 0o777 == 0o700
    own = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax")}
    assert hit not in run(tmp_path / "unused", **own)
    assert [*(tmp_path / "jax").iterdir()]
    assert not (tmp_path / "unused").exists()


# The folder that is changed, its owner, its group and its mode. Only root can change the first two.
@pytest.mark.parametrize(
    ("name", "owner", "group", "mode"),
    [
        ("compiled", -1, -1, 0o777),
        (".", -1, -1, 0o777),
        ("compiled", -1, 12345, 0o770),
        ("compiled", 12345, -1, 0o700),
    ],
    ids=["open to all", "below an open one", "open to a group", "of another user"],
)
def test_a_cache_that_another_user_could_fill_is_not_trusted(tmp_path, name, owner, group, mode):
    if (owner, group) != (-1, -1) and os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    folder = tmp_path / "dist_ens" / "compiled"
    folder.mkdir(parents=True, mode=0o700)
    assert access_of_others(folder) is None
    changed = folder.parent / name
    os.chown(changed, owner, group)
    changed.chmod(mode)
    assert re.search("others may write to|belongs to another user", access_of_others(folder))


def test_a_cache_that_cannot_be_used_is_off(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    before = jax.config.values["jax_compilation_cache_dir"]
    open_to_all = tmp_path / "open" / "dist_ens" / "compiled"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "dist_ens").write_text("a file")
    whys = {"open": f"others may write to {open_to_all}", "file": "Not a directory"}
    for home, why in whys.items():
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        compile_cache.use_compile_cache()
        told = f"is disabled, because its folder cannot be used: {why}. Set XDG_CACHE_HOME or"
        assert told in caplog.text
    of_nobody = lambda name: f"~/.cache/{name}"  # noqa: E731
    monkeypatch.setattr(compile_cache.platformdirs, "user_cache_dir", of_nobody)
    compile_cache.use_compile_cache()
    assert "cannot be used: this user has no home folder. Set XDG_CACHE_HOME" in caplog.text
    keep_execution("program", "loop")
    assert kept_execution("program") is None
    assert jax.config.values["jax_compilation_cache_dir"] == before


@pytest.mark.long
def test_a_second_training_compiles_nothing_anew(tmp_path):
    def programs_after_training(workdir):
        words = ["train", "--config=configs/digits.py", f"--workdir={tmp_path / workdir}"]
        # Calls of 10, 10 and 5.
        words += ["--config.steps=25", "--config.checkpoint.every_steps=10"]
        words += ["--config.execution=vmap", "--config.num_members=2"]
        words += ["--config.model.hidden_sizes=(8,)"]
        own = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
        run(tmp_path, "import launch; launch.main()", *words, **own)
        folder = tmp_path / "dist_ens" / "compiled"
        return {path.name for path in folder.iterdir() if path.name.endswith("-cache")}

    first = programs_after_training("first")
    assert len([name for name in first if name.startswith("jit_update")]) == 2
    assert programs_after_training("second") == first


def test_what_the_cache_has_spared_is_never_less_than_nothing():
    before = compile_cache.spared_secs()
    for secs in (-3.0, 2.0, -1.0):
        jax.monitoring.record_event_duration_secs(
            "/jax/compilation_cache/compile_time_saved_sec", secs
        )
    jax.monitoring.record_event_duration_secs("/another", 5.0)
    assert compile_cache.spared_secs() == before + 2.0


def test_the_longest_compilation_is_that_inside_with_what_the_cache_has_spared():
    with compile_cache.LongestCompilation() as longest:
        jax.jit(lambda x: x + 1)(np.ones(3)).block_until_ready()
        assert 0 < longest.secs < 50
        spared = "/jax/compilation_cache/compile_time_saved_sec"
        jax.monitoring.record_event_duration_secs(spared, 50.0)
    jax.monitoring.record_event_duration_secs(spared, 60.0)
    assert longest.secs == 50.0


@pytest.mark.parametrize(
    ("members", "devices", "options"),
    [
        (4, 1, {"waves": 2}),
        (2, 4, {"failure_policy": "skip"}),
        pytest.param(4, 1, {"execution": "loop"}, marks=pytest.mark.long),
    ],
)
def test_a_second_fit_of_an_ensemble_compiles_nothing(members, devices, options):
    ensemble = de.Ensemble(
        nn.Dense(2),
        optax.adam(0.01),
        de.losses.gaussian(standardize=True),
        num_members=members,
        layout=de.Layout.make(members, devices=jax.devices()[:devices]),
        **options,
    )
    x = np.random.default_rng(0).normal(size=(64, 3))
    lowered: list[str] = []

    def note(event: str, secs: float, **facts: str) -> None:
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            lowered.append(facts["fun_name"])

    jax.monitoring.register_event_duration_secs_listener(note)
    for has_run in (False, True):
        lowered.clear()
        data = {"inputs": x, "labels": x[:, 0] + has_run}
        result = de.fit(ensemble, data, steps=6, validation=0.25, progress=False)
        ensemble.predict(result.state, x[:3])
        assert bool(lowered) is not has_run, lowered
    de.fit(ensemble, data, steps=12, state=result.state, validation=0.25, progress=False)
    assert not lowered
