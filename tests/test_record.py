"""What a run's folder records, and what may not take its place."""

import dataclasses
import functools
import itertools
import operator
import pathlib
import shutil
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dist_ens.data import ArraySplit, source_of_arrays
from dist_ens.experiment import OwnParts
from dist_ens.experiment.build import build_ensemble, identified
from dist_ens.experiment.loaded import open_finished
from dist_ens.experiment.record import Run
from dist_ens.experiment.train import train
from dist_ens.ground.errors import RunError, UserError
from dist_ens.layout import Layout
from dist_ens.members import from_functions, from_linen
from saving import reader, rewrite, steps_in
from test_train import experiment

X = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
BYTES = X.astype(np.uint8)
Y = np.arange(200) % 4


def linear(apply, name="w"):
    return from_functions(lambda key: {name: jax.random.normal(key, (6, 4))}, apply)


def plain():
    return linear(lambda params, x: x @ params["w"])


def waved():
    return linear(lambda params, x: 10 * jnp.sin(x) @ params["w"])


def scaled(factors, name="w"):
    """A network that captures an array."""
    return linear(lambda params, x: (x * factors[None]) @ params[name], name)


def source(x=X, y=Y, test=(X, Y)):
    return source_of_arrays((x, y), test)


def trained(workdir, steps, member=None, data=None):
    """The result of a run of a network and of data that are given in Python."""
    run, parts = experiment(num_members=2, steps=steps), OwnParts(member=member)
    return train(run, workdir, parts=parts, source=data or source())


def opened(workdir, member):
    config = SimpleNamespace(own_parts=lambda spec: OwnParts(member=member))
    return open_finished(workdir, config=config)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    trained(workdir, 8, plain())
    return workdir


@pytest.fixture
def copied(finished, tmp_path):
    return pathlib.Path(shutil.copytree(finished, tmp_path / "run"))


def test_a_run_with_parts_from_python_is_opened_with_them_and_goes_on(copied):
    found = opened(copied, plain())
    assert found.run.parts == {"network": "plain.<locals>.<lambda>"}
    assert found.run.member_file is None
    assert found.state.step.tolist() == [8, 8]
    assert trained(copied, 16, plain()).step == 16


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"member": waved()}, "network of the parts is 'plain.*' there and 'waved"),
        ({"member": scaled(np.ones(6))}, "network of the parts is 'plain.*' there and 'scaled"),
        ({"member": None}, "network of the parts is 'plain.*' there and None here"),
        ({"source": source(x=X[:150], y=Y[:150])}, "training examples is 200 there and 150 here"),
        ({"source": source(BYTES, test=(BYTES, Y))}, "'float32.*' there and 'uint8.*' here"),
        ({"source": source(x=X + 5)}, "the hash of the train examples is"),
        ({"source": source(y=3 - Y)}, "the hash of the train examples is"),
        ({"source": source(test=(X, 3 - Y))}, "the hash of the test examples is"),
    ],
)
def test_another_part_of_equal_shapes_does_not_go_on_with_a_run(finished, parts, told):
    given = {"member": plain(), "source": source(), **parts}
    before = sorted(finished.rglob("*"))
    with pytest.raises(UserError, match=told):
        trained(finished, 16, given["member"], given["source"])
    assert sorted(finished.rglob("*")) == before


def test_arrays_that_a_network_captures_belong_to_its_step(tmp_path):
    once, twice = (scaled(factor * np.ones(6, np.float32)) for factor in (1, 2))
    trained(tmp_path, 8, once)
    with pytest.raises(UserError, match="the training step computes something else"):
        trained(tmp_path, 16, twice)
    with pytest.raises(RunError, match="The network or the optimizer has changed"):
        trained(tmp_path, 16, scaled(np.ones(6, np.float32), "kernel"))
    with pytest.raises(UserError, match="The parts that were given are not those of the run in"):
        opened(tmp_path, twice)
    opened(tmp_path, scaled(np.ones(6, np.float32)))


def test_a_finished_run_is_not_opened_with_another_network(finished, tmp_path):
    trained(tmp_path, 8)
    for workdir, member in ((finished, waved()), (tmp_path, plain())):
        with pytest.raises(UserError, match="The parts that were given are not those of the run"):
            opened(workdir, member)
    with pytest.raises(UserError, match=r"\(plain.*\) were given in Python\. Give a config file"):
        open_finished(finished)


def rerecorded(workdir, change):
    """Changes the record of a run's last checkpoint by a function."""
    step = steps_in(workdir)[-1]
    record = reader(workdir, step).run
    change(record)
    rewrite(workdir / "checkpoints" / str(step), run=record)


def test_other_versions_are_said_and_not_refused(copied, capsys):
    def of_another_jax(record):
        record["versions"]["jax"], record["fingerprint"] = "0.1.2", "0" * 64

    rerecorded(copied, of_another_jax)
    opened(copied, plain())
    capsys.readouterr()
    trained(copied, 16, plain())
    told = f"The saved run was made with jax 0.1.2 (here {jax.__version__}). Its training step"
    assert told in " ".join(capsys.readouterr().out.split())
    with pytest.raises(UserError, match="network of the parts is"):
        trained(copied, 24, waved())


class Augmenting(ArraySplit):
    """A split that yields other inputs each time."""

    in_memory, drawn = False, itertools.count()

    def take(self, indices):
        return super().take(indices) | {"inputs": self.inputs[indices] + next(self.drawn)}


def test_a_split_that_yields_something_else_each_time_has_no_fingerprint_and_goes_on(tmp_path):
    augmented = dataclasses.replace(source(), train=Augmenting(X, Y))
    assert [*augmented.fingerprint] == ["test"]
    trained(tmp_path, 8, data=augmented)
    assert trained(tmp_path, 16, data=augmented).step == 16


def test_how_precisely_jax_computes_is_no_part_of_a_step(finished):
    with jax.default_matmul_precision("highest"):
        opened(finished, plain())


def test_a_steps_fingerprint_depends_on_the_step_alone():
    def fingerprint(member, num_members=2, devices=1, **changes):
        run = Run(experiment(num_members=num_members, **changes), source().spec, 200)
        layout = Layout.make(num_members, devices=jax.devices()[:devices])
        parts = OwnParts(member=member)
        ensemble = build_ensemble(run, layout, parts)
        return identified(run, ensemble, parts, source()).record.fingerprint

    expected = fingerprint(plain())
    assert fingerprint(plain()) == expected
    assert fingerprint(plain(), num_members=8, devices=8) == expected
    assert fingerprint(plain(), num_members=1, devices=4) == expected
    assert fingerprint(plain(), execution="loop", layout={"waves": 2}) == expected
    assert fingerprint(plain(), optimizer={"learning_rate": 2e-2}) != expected
    assert fingerprint(from_linen(nn.Dense(4))) != expected
    adversarial = fingerprint(plain(), loss={"adversarial": 0.01})
    assert expected != adversarial == fingerprint(plain(), loss={"adversarial": 0.01})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec",), None),
        (("spec", "num_classes"), "x"),
        (("unknown",), 1),
        (("experiment", "optimizer", "learning_rate"), 2e-2),
    ],
    ids=str,
)
def test_a_run_with_another_record_is_refused_in_a_sentence(copied, path, value):
    def change(record):
        *outer, last = path
        functools.reduce(operator.getitem, outer, record)[last] = value

    rerecorded(copied, change)
    with pytest.raises((RunError, UserError)):
        opened(copied, plain())
