"""The public names: what they cost to import, and that both doors lead to the same engine."""

import json
import os
import subprocess
import sys

import numpy as np
import optax
import pytest

import dist_ens as de
from dist_ens.experiment.build import build
from dist_ens.experiment.train import train
from saving import assert_same
from test_train import experiment

pytestmark = pytest.mark.quick

EVERY_ROOM_FIRST = """
import importlib, inspect, json, pkgutil
import dist_ens
rooms = [module.name for module in pkgutil.walk_packages(dist_ens.__path__, "dist_ens.")]
for room in rooms:
    importlib.import_module(room)
kinds = {}
for name in dist_ens.__all__:
    value = getattr(dist_ens, name)
    kinds[name] = "module" if inspect.ismodule(value) else "class or function"
    assert inspect.ismodule(value) or callable(value), name
print(json.dumps([rooms, kinds]))
"""


def python(*words):
    """Returns what a fresh Python prints to standard output and standard error."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=True, env=environment
    )
    return ended.stdout, ended.stderr


@pytest.mark.slow
def test_no_room_has_the_name_of_a_public_function():
    # A room of that name would take the function's place as soon as it is imported.
    rooms, kinds = json.loads(python("-c", EVERY_ROOM_FIRST)[0].splitlines()[-1])
    assert len(rooms) > 100
    modules = {name for name, kind in kinds.items() if kind == "module"}
    assert modules == {"callbacks", "data", "hyper", "losses", "methods", "metrics", "models"}
    assert sorted(kinds) == sorted(de.__all__)


def test_importing_the_package_imports_no_library():
    imported = python("-X", "importtime", "-c", "import dist_ens")[1]
    modules = {line.rpartition("|")[2].strip() for line in imported.splitlines()}
    assert "dist_ens" in modules
    packages = {module.partition(".")[0] for module in modules}
    assert not packages & {"jax", "jaxlib", "numpy", "flax", "optax", "orbax", "grain", "sklearn"}
    assert not {module for module in modules if module.startswith("dist_ens.")}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'dist_ens' has no attribute 'evalute'"):
        de.evalute  # noqa: B018


# The command line and Python


@pytest.mark.slow
def test_fit_gives_the_bits_of_the_command_line(tmp_path):
    model, layout = {"name": "mlp_bn_dropout"}, {"ensemble_axis": 4}
    asked = experiment(steps=20, steps_per_call=5, model=model, layout=layout)
    trained, parts = train(asked, tmp_path), build(asked)
    result = de.fit(parts.ensemble, **parts.arguments, progress=False)
    assert_same(result.state, trained.state)
    assert result.scores.ensemble == trained.scores.ensemble
    assert result.scores.members == trained.scores.members
    # The same parts, made in Python.
    network, loss = parts.ensemble.member, de.losses.categorical(10)
    options = {"layout": de.Layout.make(4, ensemble_axis=4), "execution": "vmap"}
    ensemble = de.Ensemble(network, optax.adam(1e-2), loss, num_members=4, **options)
    source = parts.source
    data, test = (split.take(np.arange(len(split))) for split in (source.train, source.test))
    options = {"steps": 20, "batch_size": 32, "steps_per_call": 5, "progress": False}
    result = de.fit(ensemble, data, eval_data=test, **options)
    assert_same(result.state, trained.state)
    # The test split is taken in batches of 1,000, not of 100: sums are rounded otherwise.
    assert result.scores.ensemble == pytest.approx(trained.scores.ensemble, rel=1e-5)
