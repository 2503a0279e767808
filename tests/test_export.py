"""Exported predictions: the numbers of `predict`, read where dist_ens cannot be imported."""

import dataclasses
import sys

import flax.linen as nn
import jax
import jax.export
import numpy as np
import optax
import pytest

import dist_ens as de
from commands import process
from dist_ens.evaluation.calibration import Predictor
from dist_ens.evaluation.conformal import ConformalRule
from dist_ens.experiment import LoadedRun
from dist_ens.experiment.chosen import KeptChoice
from dist_ens.experiment.exported import exported
from dist_ens.models import batch_ensemble, lenet5

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
