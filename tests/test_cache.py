"""The compilation cache: there by default, never in the way."""

import os
import pathlib
import re
import subprocess
import sys

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

import dist_ens as de
from conftest import COMMAND_ENVIRONMENT
from dist_ens.execution.decision_cache import keep_execution, kept_execution
from dist_ens.processes import compile_cache
from dist_ens.processes.compile_cache import access_of_others

ROOT = pathlib.Path(__file__).parent.parent
ENVIRONMENT = {k: v for k, v in COMMAND_ENVIRONMENT.items() if not k.startswith("JAX_")}
CODE = """
import logging, jax
from dist_ens.processes.compile_cache import use_compile_cache
use_compile_cache()
logging.basicConfig(level=logging.WARNING)
def program(x):
    return (x @ x).sum()
with jax.log_compiles():
    jax.jit(program)(jax.numpy.ones((7, 7)))
print("cached" if jax.config.jax_compilation_cache_dir else "not cached")
"""


def run(cache_home, **variables):
    return subprocess.run(
        [sys.executable, "-c", CODE],
        cwd=ROOT,
        env=ENVIRONMENT | {"XDG_CACHE_HOME": str(cache_home), "JAX_PLATFORMS": "cpu"} | variables,
        capture_output=True,
        text=True,
        check=True,
    )


@pytest.mark.parametrize("own", [{}, {"JAX_COMPILATION_CACHE_DIR": "jax"}], ids=["ours", "own"])
def test_a_second_start_compiles_nothing_anew(tmp_path, own):
    own = {name: str(tmp_path / folder) for name, folder in own.items()}
    first, second = run(tmp_path, **own), run(tmp_path, **own)
    assert first.stdout.strip() == second.stdout.strip() == "cached"
    hit = "Persistent compilation cache hit for 'jit_program'"
    assert hit not in first.stderr
    assert hit in second.stderr
    folder = tmp_path / "dist_ens" / "compiled"
    assert folder.exists() == (not own)
    if not own:
        assert folder.stat().st_mode & 0o777 == 0o700


# The folder that is changed, its owner, its group and its mode. Only root can change the first two.
UNTRUSTED = {
    "open to all": ("compiled", -1, -1, 0o777),
    "below a folder that is open to all": (".", -1, -1, 0o777),
    "open to a group": ("compiled", -1, 12345, 0o770),
    "of another user": ("compiled", 12345, -1, 0o700),
}


@pytest.mark.parametrize("how", UNTRUSTED)
def test_a_cache_that_another_user_could_fill_is_not_trusted(tmp_path, how):
    name, owner, group, mode = UNTRUSTED[how]
    if (owner, group) != (-1, -1) and os.getuid() != 0:
        pytest.skip("only root can give a file to another user")
    folder = tmp_path / "dist_ens" / "compiled"
    folder.mkdir(parents=True, mode=0o700)
    assert access_of_others(folder) is None
    changed = folder.parent / name
    os.chown(changed, owner, group)
    changed.chmod(mode)
    assert re.search("others may write to|belongs to another user", access_of_others(folder))


@pytest.mark.parametrize("is_file", [True, False])
def test_a_cache_that_cannot_be_used_is_off(tmp_path, is_file):
    folder = tmp_path / "dist_ens" / "compiled"
    if is_file:
        (tmp_path / "dist_ens").write_text("a file")
    else:
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    ended = run(tmp_path)
    assert ended.stdout.strip() == "not cached"
    why = "Not a directory" if is_file else f"others may write to {folder}"
    told = f"The compilation cache is disabled, because its folder cannot be used: {why}. Set XDG"
    assert told in ended.stderr


def test_a_second_training_compiles_nothing_anew(tmp_path):
    def programs_after_training(workdir):
        command = [
            *(sys.executable, "-c", "import launch; launch.main()", "train"),
            *("--config=configs/digits.py", f"--workdir={tmp_path / workdir}"),
            *("--config.steps=25", "--config.checkpoint.every_steps=10"),  # calls of 10, 10 and 5
            "--config.execution=vmap",
        ]
        variables = {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        variables["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=0"
        subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | variables, check=True)
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


def test_a_user_without_a_home_folder_has_no_cache(monkeypatch, caplog):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setattr(
        compile_cache.platformdirs, "user_cache_dir", lambda name: f"~/.cache/{name}"
    )
    with caplog.at_level("WARNING"):
        compile_cache.use_compile_cache()
    assert "cannot be used: this user has no home folder. Set XDG_CACHE_HOME" in caplog.text
    keep_execution("program", "loop")
    assert kept_execution("program") is None


@pytest.mark.parametrize(
    ("members", "devices", "options"),
    [
        (4, 1, {}),
        (4, 1, {"execution": "loop"}),
        (4, 1, {"waves": 2}),
        (2, 4, {"failure_policy": "skip"}),
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
