"""Exported predictions: the numbers of `predict`, read where dist_ens cannot be imported."""

import dataclasses
import json
import sys

import flax.linen as nn
import jax
import jax.export
import numpy as np
import optax
import pytest

import dist_ens as de
from commands import dist_ens, process
from dist_ens.evaluation.calibration import Predictor
from dist_ens.evaluation.conformal import ConformalRule, uniform_of
from dist_ens.experiment import LoadedRun
from dist_ens.experiment.chosen import KeptChoice
from dist_ens.experiment.exported import exported
from dist_ens.experiment.train import train
from dist_ens.ground.errors import UserError
from dist_ens.models import batch_ensemble, lenet5
from test_own_arrays import TARGETS, X, experiment, saved

SIZES = (1, 7, 1000)
FEATURES, CLASSES = 4, 3
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(1000, FEATURES)).astype(np.float32)
# Read by a Python without the folder of the repository, in an empty folder.
READER = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("dist_ens", "launch", "flax", "optax"):
            raise ImportError(name)

sys.meta_path.insert(0, Forbidden())
import jax, jax.export, numpy as np

found, inputs = {}, np.load(sys.argv[1])
for file in sys.argv[3:]:
    name = file.rpartition("/")[2]
    call = jax.jit(jax.export.deserialize(bytearray(open(file, "rb").read())).call)
    for size in SIZES:
        given = {n.partition("|")[2]: v[:size] for n, v in inputs.items() if n.startswith(name)}
        result = call(given[""] if "" in given else given)
        for path, leaf in jax.tree_util.tree_leaves_with_path(result):
            found[f"{name}|{size}|{jax.tree_util.keystr(path)}"] = leaf
assert "dist_ens" not in sys.modules
np.savez(sys.argv[2], **found)
"""


class Mlp(nn.Module):
    """`len(x)` must be a number, so that its rows are exported one by one."""

    out: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(8)(x if self.dropout else x.reshape(len(x), -1)))
        return nn.Dense(self.out)(nn.Dropout(self.dropout, deterministic=not train)(x))


def made(objective, network=None, inputs=INPUTS, num_members=4, **options):
    """An ensemble on four devices, and a state whose members differ."""
    network = network or Mlp(getattr(objective, "num_outputs", 1))
    ensemble = de.Ensemble(network, optax.sgd(0.1), objective, num_members=num_members, **options)
    batch = {"inputs": jax.tree.map(lambda leaf: leaf[:2], inputs)}
    return ensemble, ensemble.init(batch)


def of_ensemble(ensemble, state, inputs=INPUTS, weights=None, calibration=None):
    """An export with all outputs, and what it must equal."""
    found = exported(
        ensemble, state, inputs, weights=weights, calibration=calibration, members=True
    )
    given = {"weights": weights, "calibration": calibration}
    return found, lambda x: ensemble.predict(state, x, **given), inputs


def of_run(run, path, **options):
    found = run.export(path, members=True, **options)
    return found, lambda x: run.predict(x, **options), INPUTS


def trained_in_python(folder):
    loss = de.losses.categorical(CLASSES)
    ensemble, _ = made(loss)
    data = {"inputs": INPUTS, "labels": np.array(["ant", "bee", "cat"])[INPUTS[:, :3].argmax(1)]}
    de.fit(ensemble, data, steps=20, progress=False, checkpoints=de.Checkpoints(folder / "run"))
    return of_run(de.load(folder / "run", ensemble=ensemble), folder / "file")


def real_targets(folder):
    ensemble, state = made(de.losses.gaussian(standardize=True))
    held = {"label_mean": np.full(4, 1000, "f"), "label_std": np.full(4, 50, "f")}
    scale = ensemble.layout.put(held, "members")
    return of_ensemble(ensemble, state._replace(model_state={**state.model_state, **scale}))


def calibrated(method, conformal):
    def case(folder):
        ensemble, state = made(de.losses.categorical(CLASSES))
        data = {"inputs": INPUTS + 0.1, "labels": RANDOM.integers(0, CLASSES, 1000)}
        weights = [0.5, 0, 0.2, 0.3]
        options = {"method": method, "conformal": conformal, "level": 0.8, "weights": weights}
        calibration = de.calibrate(ensemble, state, data, **options)
        return of_ensemble(ensemble, state, weights=weights, calibration=calibration)

    return case


def left_out_of_folds(folder):
    ensemble, state = made(de.losses.squared_error())
    rows = {
        "residuals": RANDOM.random(50),
        "out_of_bag": np.arange(50) % 4 == np.arange(4)[:, None],
    }
    rule = ConformalRule("cv+", rows)
    predictor = Predictor.of(ensemble, state)
    calibration = de.Calibration(predictor=predictor, conformal=rule, level=0.8)
    return of_ensemble(ensemble, state, calibration=calibration)


def of_members_that_count(choice):
    """Of a member that is frozen, or of those that were chosen with weights."""

    def case(folder):
        ensemble, state = made(de.losses.categorical(CLASSES), failure_policy="skip")
        frozen = ensemble.layout.put(np.array([False, True, False, False]), "members")
        state = state._replace(failures=state.failures._replace(is_frozen=frozen))
        run = LoadedRun(None, ensemble, state, 0, choice=choice, inputs=INPUTS)
        found, predict, inputs = of_run(run, folder / "file")
        assert found.description["member_ids"] == [*(choice.member_ids or (0, 2, 3))]
        return found, predict, inputs

    return case


def convolutional(folder):
    images = RANDOM.normal(size=(1000, 12, 12)).astype(np.float32)
    return of_ensemble(*made(de.losses.categorical(3), lenet5((12, 12), 3), images), images)


def function_of_a_dict(folder):
    network = (
        lambda key: {"w": jax.random.normal(key, (FEATURES, 2))},
        lambda params, inputs: {"y": (inputs["a"] + inputs["b"]) @ params["w"]},
    )
    inputs = {"a": INPUTS, "b": INPUTS[::-1].copy()}
    ensemble, state = made(lambda params, state, batch, key: (0.0, (state, {})), network, inputs)
    return of_ensemble(ensemble, state, inputs)


CASES = {
    "classes": trained_in_python,
    "real targets": real_targets,
    "quantiles": lambda folder: of_ensemble(*made(de.losses.quantiles())),
    "temperature and lac": calibrated("temperature", "lac"),
    "vector and aps": calibrated("vector", "aps"),
    "isotonic and raps": calibrated("isotonic", "raps"),
    "cv+": left_out_of_folds,
    "a frozen member": of_members_that_count(KeptChoice()),
    "chosen members": of_members_that_count(KeptChoice((2, 3), (0.75, 0.25))),
    "convolutions": convolutional,
    "heads": lambda folder: of_ensemble(
        *made(
            de.losses.of_heads(de.losses.categorical(3)),
            batch_ensemble(Mlp(3), heads=3),
            num_members=2,
        )
    ),
    "dropout": lambda folder: of_ensemble(
        *made(de.losses.categorical(3), Mlp(3, dropout=0.5), dropout_samples=5)
    ),
    "a loss function of a dict": function_of_a_dict,
}


@pytest.fixture(scope="module")
def made_and_read(tmp_path_factory):
    """Exports of all cases with what they must equal, and what one process reads of them."""
    folder, cases, given = tmp_path_factory.mktemp("exported"), {}, {}
    for name, case in CASES.items():
        cases[name] = case(tmp_path_factory.mktemp("case"))
        found, _, inputs = cases[name]
        (folder / name).write_bytes(found.content)
        each = inputs if isinstance(inputs, dict) else {"": inputs}
        given |= {f"{name}|{part}": leaf for part, leaf in each.items()}
    return cases, read(folder, given, [str(folder / name) for name in CASES])


def read(folder, given, files):
    """What a process without dist_ens computes of files."""
    np.savez(folder / "given.npz", **given)
    empty = folder / "empty"
    empty.mkdir()
    script = READER.replace("SIZES", str(SIZES))
    paths = [folder / "given.npz", folder / "found.npz", *files]
    ended = process(sys.executable, "-I", "-c", script, *paths, cwd=empty)
    assert ended.returncode == 0, ended.stderr
    return dict(np.load(folder / "found.npz"))


def assert_is_prediction(found, prediction):
    """Checks arrays by their paths against the fields of a prediction that are not None."""
    fields = {f.name: getattr(prediction, f.name) for f in dataclasses.fields(prediction)}
    leaves = jax.tree_util.tree_leaves_with_path(
        {n: v for n, v in fields.items() if n not in ("unit", "class_names")}
    )
    expected = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    assert {*found} == {*expected}
    for name, leaf in expected.items():
        if leaf.dtype == bool:
            np.testing.assert_array_equal(found[name], leaf, name)
        else:
            largest = np.abs(leaf).max()
            np.testing.assert_allclose(found[name], leaf, 1e-5, 1e-5 * largest, err_msg=name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_a_process_without_dist_ens_predicts_what_predict_returns(made_and_read, name, size):
    cases, everything = made_and_read
    _, predict, inputs = cases[name]
    prefix = f"{name}|{size}|"
    found = {n.removeprefix(prefix): v for n, v in everything.items() if n.startswith(prefix)}
    assert_is_prediction(found, predict(jax.tree.map(lambda leaf: leaf[:size], inputs)))


def test_a_program_is_one_of_one_device_for_every_platform(made_and_read):
    for found, _, _ in made_and_read[0].values():
        program = jax.export.deserialize(bytearray(found.content))
        assert (program.platforms, program.nr_devices) == (("cpu", "cuda", "tpu"), 1)
        text = program.mlir_module().lower()
        assert "batch" in text
        assert not any(word in text for word in ("shard", "sdy.", "spmd"))


def test_a_description_says_what_is_in_the_file(made_and_read):
    cases, _ = made_and_read
    found = cases["classes"][0].description
    assert found["inputs"] == {"inputs": {"shape": ["batch", 4], "dtype": "float32"}}
    assert found["outputs"]["mean"] == {"shape": ["batch", 3], "dtype": "float32"}
    assert found["outputs"]["members"]["shape"] == [4, "batch", 3]
    assert (found["unit"], found["member_ids"]) == ("nats", [0, 1, 2, 3])
    assert found["class_names"] == ["ant", "bee", "cat"]
    assert found["weights"] is found["calibration"] is found["conformal"] is None
    found = cases["vector and aps"][0].description
    assert (found["calibration"], found["weights"]) == ("vector", [0.5, 0, 0.2, 0.3])
    assert found["conformal"] == {"method": "aps", "level": 0.8}
    assert cases["cv+"][0].description["outputs"]["interval.1"]["shape"] == ["batch"]
    assert cases["heads"][0].description["member_ids"] == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]


def test_a_command_exports_a_table_in_its_units_with_all_that_the_run_keeps(tmp_path):
    # The first column is far from 0: float32 holds its mean with an error of 0.03 deviations.
    x = np.stack([1e6 + np.round(4 * X[:, 0]) / 4 + 0.3, X[:, 1]], axis=1)
    config = saved(tmp_path, x=x, y=TARGETS)
    whole = experiment(config.source, "gaussian")
    data = dataclasses.replace(whole.data, validation=0.4)
    train(dataclasses.replace(whole, data=data, num_members=3), tmp_path / "run")
    folder = ["--workdir", tmp_path / "run"]
    file = tmp_path / "m.jaxexport"
    for words in (
        ["members", tmp_path / "run", "choose", "--size=3", "--metric=rmse"],
        ["evaluate", *folder, "--calibration=variance", "--conformal=cqr", "--level=0.8"],
        ["export", *folder, f"--output={file}", "--calibrated", "--conformal=0.75", "--members"],
    ):
        ended = dist_ens(*words)
        assert ended.returncode == 0, ended.stderr
    assert "m.jaxexport: aleatoric, epistemic, interval.0, interval.1, mean" in ended.stdout
    assert "on cpu, cuda, tpu." in ended.stdout
    run = de.load(tmp_path / "run")
    assert len({*run.choice.weights}) == 2  # The two that were chosen count differently.
    rows = np.float32(np.resize(x, (1000, 2)))
    everything = read(tmp_path, {f"{file.name}|": rows}, [str(file)])
    for size in SIZES:
        prefix = f"{file.name}|{size}|"
        found = {n.removeprefix(prefix): v for n, v in everything.items() if n.startswith(prefix)}
        expected = run.predict(rows[:size], calibrated=True, conformal=0.75)
        assert_is_prediction(found, expected)
        deviation = np.asarray(expected.std).min()
        assert np.abs(found["['mean']"] - expected.mean).max() < 1e-3 * deviation
    described = json.loads((tmp_path / "m.jaxexport.json").read_text())
    assert (described["unit"], described["calibration"]) == ("target", "variance")
    assert described["conformal"] == {"method": "cqr", "level": 0.75}
    assert described["member_ids"] == run.ensemble.ids[run._pooled_positions()].tolist()


def test_what_cannot_be_exported_is_said_in_one_sentence(tmp_path, monkeypatch):
    loss = de.losses.categorical(CLASSES)

    def refused(words, *args, **options):
        with pytest.raises(UserError, match=words):
            exported(*args, **options)

    ensemble, state = made(loss, num_groups=2)
    refused("The 2 groups of members", ensemble, state, INPUTS)
    ensemble, state = made(loss)
    refused(r"inputs float32\[1, 5\]", ensemble, state, np.ones((1, 5), np.float32))
    refused(r"The inputs are float32\[\]", ensemble, state, np.float32(0))
    refused("platforms are gpu. Give", ensemble, state, INPUTS, platforms=["gpu"])
    refused(
        "fitted for another prediction",
        *(ensemble, state, INPUTS),
        weights=[1, 1, 1, 0],
        calibration=de.Calibration(predictor=Predictor.of(ensemble, state)),
    )

    class Host(nn.Module):
        @nn.compact
        def __call__(self, x):
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return nn.Dense(3)(jax.pure_callback(np.asarray, shape, x, vmap_method="sequential"))

    refused("jax.export cannot export this ensemble", *made(loss, Host()), INPUTS)
    run = LoadedRun(None, ensemble, state, 0)
    with pytest.raises(UserError, match="Give inputs="):
        run.export(tmp_path / "m")
    with pytest.raises(UserError, match="keeps no calibration"):
        run.export(tmp_path / "m", calibrated=True, inputs=INPUTS)
    monkeypatch.setitem(sys.modules, "flatbuffers", None)
    refused(r"pip install 'dist-ens\[export\]'", ensemble, state, INPUTS)


def test_the_number_of_an_example_is_uniform_and_has_the_same_bits_in_jax():
    found = uniform_of(INPUTS)
    traced = jax.jit(uniform_of)
    np.testing.assert_array_equal(found, traced(INPUTS))
    # Whole numbers differ in few bits. The standard error of a share of 1000 is at most 0.016.
    numbers = np.arange(1000)
    for rows in (
        INPUTS,
        numbers[:, None],
        np.eye(1000),
        np.stack([numbers // 32, numbers % 32], 1),
    ):
        found = np.sort(uniform_of(rows))
        assert np.abs(found - (np.arange(1000) + 0.5) / 1000).max() < 0.06  # Kolmogorov, 0.1 %
        assert len(np.unique(found)) > 995
    zeros = np.array([[0.0, 1.0], [-0.0, 1.0], [1.0, 0.0]], np.float32)
    first, second, swapped = traced(zeros)
    assert first == second != swapped
    both = traced({"a": INPUTS[:, :2], "b": INPUTS[:, 2:]})
    assert (both != traced({"a": INPUTS[:, 2:], "b": INPUTS[:, :2]})).all()
