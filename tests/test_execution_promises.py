"""Each execution keeps what docs/concepts/execution.md promises, on every shipped config."""

import functools
import itertools
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import fast_xla
from conftest import COMMAND_ENVIRONMENT
from dist_ens.ensemble import update_steps
from dist_ens.execution.spec import LOWERINGS as KNOWN
from dist_ens.execution.spec import MEMBER_EXECUTIONS
from execution_grid import (
    ALONE,
    CALLS,
    FOUR,
    LOWERINGS,
    MESHES,
    PAIR,
    SIX,
    SIX_ON_TWO,
    THREE,
    Grid,
    executions_of,
    relative_difference,
)
from marked import long
from test_hlo import CONFIGS

ROOT = pathlib.Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "concepts" / "execution.md").read_text()
# The page says: "its loss differs by at most 0.001 %, and its gradient by at most 0.01 %".
OF_LOSS, OF_GRADIENT = (
    float(percent) / 100
    for percent in re.search(
        r"its loss differs by at most ([\d.]+) %, and its gradient by at most ([\d.]+) %",
        " ".join(PAGE.split()),
    ).groups()
)
NAMES = [config.stem for config in CONFIGS]
QUICK = ("digits", "mnist_mlp", "mnist_bn_dropout", "uci")  # They compile in a second each.


def promise(execution, num_members, num_devices):
    """A key of the meshes on which a member has the same bits by the page; None without one."""
    way = execution.partition("+")[0]
    if way == "loop":
        return "any mesh"
    num_chunks, rest = divmod(num_members // num_devices, 2)
    is_kept = way == "map" or (way == "chunk:2" and num_chunks > 1 and not rest)
    return num_devices if is_kept else None


def test_the_page_has_a_promise_for_every_way():
    table = PAGE[PAGE.index("| execution |") :]
    assert [name for name in MEMBER_EXECUTIONS if f"`{name}" not in table] == []
    assert {name.partition(":")[0] for name in MESHES} == {*MEMBER_EXECUTIONS}
    lowered = {word for names in LOWERINGS.values() for name in names for word in name.split("+")}
    assert lowered >= {*KNOWN}


@functools.cache
def grid_of(config):
    """The grid in this process, in which XLA compiles soon."""
    grid = Grid(config, most=6)
    return grid, grid.trained("loop", *PAIR)


@pytest.mark.parametrize(
    ("config", "mesh"),
    [
        *((name, SIX_ON_TWO) for name in (*QUICK, "mnist_lenet")),
        *((name, ALONE) for name in QUICK),
        *long(*((name, SIX_ON_TWO) for name in ("charlm", "cifar_resnet"))),
    ],
)
def test_a_member_has_the_same_bits_by_loop_among_2_on_1_device_among_6_on_2_and_alone(
    config, mesh, monkeypatch
):
    grid, reference = grid_of(config)
    looped = []

    class Counted(update_steps.Loop):
        def __call__(self, *args):
            looped.append(self)
            return super().__call__(*args)

    monkeypatch.setattr(update_steps, "Loop", Counted)
    # XLA's thread pool is that of this process, so that its size is the same for both.
    assert grid.trained("loop", *mesh) == reference
    assert len(looped) == CALLS
    assert len(set(looped)) == 1  # one loop took all calls


@pytest.mark.parametrize("config", [*QUICK[::2], *long(*QUICK[1::2])])
@pytest.mark.parametrize(("way", "some", "more"), [("map", PAIR, THREE), ("chunk:2", FOUR, SIX)])
def test_a_member_has_the_same_bits_in_a_larger_ensemble_on_the_same_device(
    config, way, some, more
):
    grid, (_, reference) = grid_of(config)
    arrays, losses = grid.trained(way, *some)
    assert (arrays, losses) == grid.trained(way, *more)
    assert relative_difference(losses, reference) <= OF_LOSS


@functools.cache
def smooth_gradient_of(config):
    return grid_of(config)[0].smooth_gradient("loop", *PAIR)


@pytest.mark.parametrize(
    ("config", "way"),
    [
        *itertools.product(("digits", "uci"), ("map", "vmap", "unroll")),
        ("mnist_bn_dropout", "vmap"),
        *long(*itertools.product(("mnist_mlp",), ("map", "vmap", "unroll"))),
        *long(*itertools.product(("mnist_bn_dropout",), ("map", "unroll"))),
        ("digits", "vmap+flat"),
        ("uci", "vmap+aligned"),
    ],
)
def test_a_members_first_step_is_that_of_the_loop_up_to_the_tolerance(config, way):
    grid, (_, reference) = grid_of(config)
    _, losses = grid.trained(way, *PAIR)
    assert losses[1] != losses[0]  # The steps after the first see an update.
    assert relative_difference(losses, reference) <= OF_LOSS  # In these configs of all three steps.
    gradient = smooth_gradient_of(config)
    assert np.abs(gradient).max() > 0
    assert relative_difference(grid.smooth_gradient(way, *PAIR), gradient) <= OF_GRADIENT


@functools.cache
def measured(config, folder):
    """The grid of a config, compiled as for a user, in a process of its own."""
    file, log = folder / f"{config}.json", folder / f"{config}.log"
    with log.open("w") as output:
        ended = subprocess.run(
            [sys.executable, "tests/execution_grid.py", config, str(file)],
            cwd=ROOT,
            # XLA compiles as for a user, since other programs may have other bits.
            env=COMMAND_ENVIRONMENT
            | {
                "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}",
                "XLA_FLAGS": fast_xla.devices(8),
                "JAX_PLATFORMS": "cpu",
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=3600,
        )
    assert ended.returncode == 0, log.read_text()
    return json.loads(file.read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("grid")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("config", "execution"), [(name, each) for name in NAMES for each in executions_of(name)]
)
def test_every_execution_keeps_its_promise_on_every_shipped_config(config, execution, folder):
    found = measured(config, folder)[execution]
    promised = {}
    for num_members, num_devices, bits, difference in found["bits"]:
        assert difference <= OF_LOSS
        if (key := promise(execution, num_members, num_devices)) is not None:
            assert promised.setdefault(key, bits) == bits
    assert found["gradient"] <= OF_GRADIENT
