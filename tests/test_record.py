"""What a run's folder records, and what may not take its place."""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dist_ens.checkpoint.manifest import MANIFEST, Manifest
from dist_ens.data import source_of_arrays
from dist_ens.errors import RunError, UserError
from dist_ens.experiment import OwnParts
from dist_ens.experiment.build import build_ensemble, identified
from dist_ens.experiment.record import Run
from dist_ens.experiment.train import train
from dist_ens.experiment.workdir import open_finished
from dist_ens.layout import Layout
from dist_ens.members import from_functions, from_linen
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


def newest_of(workdir):
    return max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))


def rewritten(workdir, record):
    """Gives a run another record, with the right checksum."""
    folder = newest_of(workdir)
    changed = dataclasses.replace(Manifest.read(folder), run=record)
    (folder / MANIFEST).write_bytes(changed.to_bytes())


def record_of(workdir):
    return dict(Manifest.read(newest_of(workdir)).run)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of a network and of data that were given in Python."""
    workdir = tmp_path_factory.mktemp("finished")
    train(short(), workdir, parts=OwnParts(member=plain()), source=source())
    return workdir


def test_a_run_with_parts_from_python_is_opened_with_them_and_goes_on(tmp_path):
    train(short(), tmp_path, parts=OwnParts(member=plain()), source=source())
    finished = open_finished(tmp_path, lambda spec: OwnParts(member=plain()))
    assert (finished.run.network, finished.run.member_file) == ("plain.<locals>.<lambda>", None)
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
        ({"member": waved()}, "the training step of the network is 'plain.*' there and 'waved"),
        ({"member": scaled(np.ones(6))}, "the training step of the network"),
        ({"member": None}, "the network is 'plain.*' there and 'mlp"),
        ({"source": source(x=X + 5)}, "the train examples' fingerprint"),
        ({"source": source(y=3 - Y)}, "the train examples' fingerprint"),
        ({"source": source(test=(X, 3 - Y))}, "the test examples' fingerprint"),
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
    with pytest.raises(UserError, match="the training step of the network"):
        train(
            experiment(num_members=2, steps=16),
            tmp_path,
            parts=OwnParts(member=twice),
            source=source(),
        )
    with pytest.raises(UserError, match="compute another training step"):
        open_finished(tmp_path, lambda spec: OwnParts(member=twice))
    open_finished(tmp_path, lambda spec: OwnParts(member=scaled(np.ones(6, np.float32))))


def test_a_finished_run_is_not_opened_with_another_network(finished):
    with pytest.raises(
        UserError, match=r"The parts that were given \(waved.*another training step than"
    ):
        open_finished(finished, lambda spec: OwnParts(member=waved()))
    with pytest.raises(UserError, match="were given in Python, and none are given here"):
        open_finished(finished)


def test_a_named_network_is_not_opened_with_one_that_is_given(tmp_path):
    train(short(), tmp_path, source=source())
    with pytest.raises(UserError, match=r"'mlp', by model\.name, and other parts are given: plain"):
        open_finished(tmp_path, lambda spec: OwnParts(member=plain()))


def test_other_versions_are_said_and_not_refused(finished, tmp_path, capsys):
    workdir = tmp_path / "run"
    train(short(), workdir, parts=OwnParts(member=plain()), source=source())
    record = record_of(workdir)
    record["versions"]["jax"], record["step"] = "0.1.2", "0" * 64  # as another JAX traces it
    record["network"] = "before"
    rewritten(workdir, record)
    open_finished(workdir, lambda spec: OwnParts(member=plain()))
    capsys.readouterr()
    train(
        experiment(num_members=2, steps=16),
        workdir,
        parts=OwnParts(member=plain()),
        source=source(),
    )
    told = f"The run was begun with jax 0.1.2 (here {jax.__version__}), so that its training step"
    said = " ".join(capsys.readouterr().out.split())
    assert told in said
    assert (
        "Its network was before, and here it is plain.<locals>.<lambda>. The run resumes as" in said
    )
    with pytest.raises(UserError, match="the training step of the network"):  # of this version
        train(
            experiment(num_members=2, steps=24),
            workdir,
            parts=OwnParts(member=waved()),
            source=source(),
        )


def test_a_run_of_before_there_were_fingerprints_is_read(finished, tmp_path):
    train(short(), tmp_path, source=source())
    record = record_of(tmp_path)
    for name in ("network", "step", "versions", "examples"):
        del record[name]
    rewritten(tmp_path, record)
    run = open_finished(tmp_path).run
    assert (run.network, run.step, run.versions, run.examples) == (None,) * 4
    assert train(experiment(num_members=2, steps=16), tmp_path, source=source()).step == 16


def test_a_network_from_python_of_before_there_were_fingerprints_goes_on(tmp_path):
    train(short(), tmp_path, parts=OwnParts(member=plain()), source=source())
    record = record_of(tmp_path)
    for name in ("network", "step", "versions", "examples"):
        del record[name]
    rewritten(tmp_path, record)
    open_finished(tmp_path, lambda spec: OwnParts(member=plain()))
    longer = experiment(num_members=2, steps=16)
    assert train(longer, tmp_path, parts=OwnParts(member=plain()), source=source()).step == 16


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
        return identified(run, ensemble, parts, source(), run.batch(32)).step

    expected = fingerprint(plain())
    assert fingerprint(plain()) == expected
    assert fingerprint(plain(), num_members=8, devices=8) == expected
    assert fingerprint(plain(), num_members=1, devices=4) == expected
    assert fingerprint(plain(), execution="loop", layout={"waves": 2}) == expected
    assert fingerprint(plain(), optimizer={"learning_rate": 2e-2}) != expected
    assert fingerprint(from_linen(Dense())) != expected
    adversarial = fingerprint(plain(), loss={"adversarial": 0.01})
    assert expected != adversarial == fingerprint(plain(), loss={"adversarial": 0.01})


# Records that no run wrote

HOSTILE = [
    None,
    -1,
    0,
    1.5,
    True,
    "x",
    "",
    "nonsense",
    [],
    {},
    [[]],
    {"a": 1},
    10**18,
    10**400,
    float("nan"),
    [-1],
    ["x"],
]


def paths_in(value, prefix=()):
    """The way to every value in nested JSON."""
    if prefix:
        yield prefix
    if isinstance(value, dict):
        for name in value:
            yield from paths_in(value[name], (*prefix, name))


def with_value(record, path, value):
    copy = json.loads(json.dumps(record))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    return copy


def read(record):
    """What becomes of a record: the run, or what is said of it."""
    try:
        return Run.from_dict(record)
    except RunError as error:
        return str(error)


def test_no_field_of_a_record_is_believed_without_a_look(finished):
    record = record_of(finished)
    found = [
        (path, value, read(with_value(record, path, value)))
        for path in paths_in(record)
        for value in HOSTILE
        if path[-1] != "input_dtype"  # NumPy says what is no type.
    ]
    said = [what for _, _, what in found if isinstance(what, str)]
    assert all(what.startswith("The record of a run cannot be read: ") for what in said)
    assert max(map(len, said)) < 1000
    for _, _, run in found:
        if isinstance(run, Run):  # what is accepted is of its type: it is written as it was read
            assert repr(read(json.loads(json.dumps(run.to_dict())))) == repr(run)  # NaN too
    taken = {".".join(path): value for path, value, what in found if isinstance(what, Run)}
    assert len(said) > 5 * (len(found) - len(said)), taken


@pytest.mark.parametrize("value", [None, [], "x", 3, [1], {}])
def test_a_record_that_is_none_is_refused(finished, value):
    with pytest.raises(RunError, match="The record of a run cannot be read"):
        Run.from_dict(value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec",), None),
        (("spec",), -1),
        (("spec", "num_classes"), "x"),
        (("spec", "num_classes"), 10**9),
        (("spec", "input_shape"), [10**9, 10**9]),
        (("spec", "num_groups"), 3),
        (("num_devices",), -1),
        (("execution",), "nonsense"),
        (("experiment", "num_members"), 10**18),
        (("experiment", "num_members"), 2**31 - 1),
        (("experiment", "evaluation", "global_batch_size"), 10**18),
        (("experiment", "evaluation", "dropout_samples"), 10**18),
        (("experiment", "optimizer", "learning_rate"), 2e-2),
    ],
    ids=str,
)
def test_a_run_with_another_record_is_refused_and_leaves_no_traceback(tmp_path, path, value):
    train(short(), tmp_path, parts=OwnParts(member=plain()), source=source())
    rewritten(tmp_path, with_value(record_of(tmp_path), path, value))
    with pytest.raises((RunError, UserError)):
        open_finished(tmp_path, lambda spec: OwnParts(member=plain()))
