"""What a run's folder records, and what may not take its place."""

import dataclasses
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dist_ens.data import source_of_arrays
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
Y = np.arange(200) % 4


def linear(apply):
    return from_functions(lambda key: {"w": jax.random.normal(key, (6, 4))}, apply)


def plain():
    return linear(lambda params, x: x @ params["w"])


def waved():
    return linear(lambda params, x: 10 * jnp.sin(x) @ params["w"])


def scaled(factors):
    """A network that captures an array."""
    return linear(lambda params, x: (x * factors[None]) @ params["w"])


def source(x=X, y=Y, test=(X, Y)):
    return source_of_arrays((x, y), test)


def short(**changes):
    return experiment(num_members=2, steps=8, **changes)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of a network and of data that were given in Python."""
    workdir = tmp_path_factory.mktemp("finished")
    train(short(), workdir, parts=OwnParts(member=plain()), source=source())
    return workdir


def test_a_run_with_parts_from_python_is_opened_with_them_and_goes_on(tmp_path):
    train(short(), tmp_path, parts=OwnParts(member=plain()), source=source())
    finished = open_finished(tmp_path, lambda spec: OwnParts(member=plain()))
    assert (finished.run.parts, finished.run.member_file) == (
        {"network": "plain.<locals>.<lambda>"},
        None,
    )
    assert finished.state.step.tolist() == [8, 8]
    longer = train(
        experiment(num_members=2, steps=16),
        tmp_path,
        parts=OwnParts(member=plain()),
        source=source(),
    )
    assert longer.step == 16


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"member": waved()}, "network of the parts is 'plain.*' there and 'waved"),
        ({"member": scaled(np.ones(6))}, "network of the parts is 'plain.*' there and 'scaled"),
        ({"member": None}, "network of the parts is 'plain.*' there and None here"),
        ({"source": source(x=X + 5)}, "the hash of the train examples is"),
        ({"source": source(y=3 - Y)}, "the hash of the train examples is"),
        ({"source": source(test=(X, 3 - Y))}, "the hash of the test examples is"),
    ],
)
def test_another_part_of_equal_shapes_does_not_go_on_with_a_run(finished, parts, told):
    given = {"member": plain(), "source": source(), **parts}
    own = OwnParts(member=given["member"])
    before = sorted(finished.rglob("*"))
    with pytest.raises(UserError, match=told):
        train(experiment(num_members=2, steps=16), finished, parts=own, source=given["source"])
    assert sorted(finished.rglob("*")) == before


def test_arrays_that_a_network_captures_belong_to_its_step(tmp_path):
    train(short(), tmp_path, parts=OwnParts(member=scaled(np.ones(6, np.float32))), source=source())
    twice = scaled(2 * np.ones(6, np.float32))
    with pytest.raises(UserError, match="the training step computes something else"):
        train(
            experiment(num_members=2, steps=16),
            tmp_path,
            parts=OwnParts(member=twice),
            source=source(),
        )
    with pytest.raises(UserError, match="The parts that were given are not those of the run in"):
        open_finished(tmp_path, lambda spec: OwnParts(member=twice))
    open_finished(tmp_path, lambda spec: OwnParts(member=scaled(np.ones(6, np.float32))))


def test_a_finished_run_is_not_opened_with_another_network(finished):
    with pytest.raises(UserError, match="The parts that were given are not those of the run in"):
        open_finished(finished, lambda spec: OwnParts(member=waved()))
    with pytest.raises(UserError, match="were given in Python, and none are given here"):
        open_finished(finished)


def test_a_named_network_is_not_opened_with_one_that_is_given(tmp_path):
    train(short(), tmp_path, source=source())
    with pytest.raises(UserError, match="The parts that were given are not those of the run in"):
        open_finished(tmp_path, lambda spec: OwnParts(member=plain()))


def test_other_versions_are_said_and_not_refused(finished, tmp_path, capsys):
    workdir = tmp_path / "run"
    train(short(), workdir, parts=OwnParts(member=plain()), source=source())
    step = steps_in(workdir)[-1]
    record = reader(workdir, step).run
    record["versions"]["jax"], record["fingerprint"] = "0.1.2", "0" * 64  # as another JAX traces it
    rewrite(workdir / "checkpoints" / str(step), run=record)
    open_finished(workdir, lambda spec: OwnParts(member=plain()))
    capsys.readouterr()
    train(
        experiment(num_members=2, steps=16),
        workdir,
        parts=OwnParts(member=plain()),
        source=source(),
    )
    told = f"The saved run was made with jax 0.1.2 (here {jax.__version__}). Its training step"
    said = " ".join(capsys.readouterr().out.split())
    assert told in said
    with pytest.raises(UserError, match="network of the parts is"):
        train(
            experiment(num_members=2, steps=24),
            workdir,
            parts=OwnParts(member=waved()),
            source=source(),
        )


class Augmenting:
    """A split that yields its examples a little differently each time."""

    in_memory = False

    def __init__(self, split):
        self.split, self.random = split, np.random.default_rng(0)

    def __len__(self):
        return len(self.split)

    def take(self, indices):
        examples = self.split.take(indices)
        noise = self.random.normal(size=examples["inputs"].shape).astype(np.float32)
        return {**examples, "inputs": examples["inputs"] + noise}


def test_a_split_that_yields_something_else_each_time_has_no_fingerprint_and_goes_on(tmp_path):
    def augmented():
        return dataclasses.replace(source(), train=Augmenting(source().train))

    assert [*augmented().fingerprint] == ["test"]
    train(short(), tmp_path, source=augmented())
    assert train(experiment(num_members=2, steps=16), tmp_path, source=augmented()).step == 16


def test_how_precisely_jax_computes_is_no_part_of_a_step(finished):
    with jax.default_matmul_precision("highest"):
        open_finished(finished, lambda spec: OwnParts(member=plain()))


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x)


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
    assert fingerprint(from_linen(Dense())) != expected
    adversarial = fingerprint(plain(), loss={"adversarial": 0.01})
    assert expected != adversarial == fingerprint(plain(), loss={"adversarial": 0.01})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec",), None),
        (("spec", "num_classes"), "x"),
        (("num_devices",), "x"),
        (("unknown",), 1),
        (("experiment", "optimizer", "learning_rate"), 2e-2),
    ],
    ids=str,
)
def test_a_run_with_another_record_is_refused_in_a_sentence(finished, tmp_path, path, value):
    workdir = tmp_path / "run"
    shutil.copytree(finished, workdir)
    step = steps_in(workdir)[-1]
    record = reader(workdir, step).run
    inner = record
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    rewrite(workdir / "checkpoints" / str(step), run=record)
    with pytest.raises((RunError, UserError)):
        open_finished(workdir, lambda spec: OwnParts(member=plain()))
