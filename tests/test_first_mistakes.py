"""What people write first and wrongly: each is refused by a sentence that says what to do.

The mistakes of Python are here as functions, and those of the command line as its words.
"""

import re
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
from commands import dist_ens
from dist_ens.ground.errors import RunError, UserError

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
LABELS = np.arange(8, dtype=np.int32) % 3
DATA = {"inputs": X, "labels": LABELS}
NET = nn.Dense(3)

# What no sentence for a user has, with the reason.
SLIPS = {
    r"\{[A-Za-z_][\w.]*[}(\[!:]": "an expression that is not formatted",
    r"<function|<lambda>|<class|<module| object at |0x[0-9a-f]{5}": "the repr of an object",
    r"PyTreeDef|ShapeDtypeStruct|DictKey|ArrayImpl|Tracer\b|:f32\[": "a name of JAX's own",
    r"\b[Aa] (?=[aeio])(?!one\b)": "an before a vowel",
    r"\ban (?=[bcdgjkpqtvwyz])": "a before a consonant",
    r"(?<![\w.,(\[=/-])1 (?!(is|was|has|axis|class|times)\b)[a-z]+s\b": "a plural of one",
    r"  ": "two spaces",
    r"(?<![.'/])\.\.(?![./])|(?<=[\w\])])[.!?]['\")]+[.!?]": "two ends of a sentence",
}


def made(network=NET, optimizer=None, loss=None, **options):
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    loss = de.losses.categorical(3) if loss is None else loss
    return de.Ensemble(network, optimizer, loss, **{"num_members": 2} | options)


def fit(data=DATA, ensemble=None, **options):
    if not {"steps", "epochs"} & options.keys():
        options["steps"] = 1
    return de.fit(made() if ensemble is None else ensemble, data, progress=False, **options)


def linear(params, inputs):
    return inputs @ params["w"]


def weights(key):
    return {"w": jax.random.normal(key, (4, 3))}


def lossless(params, batch):
    return 0.0


def batch_loss(params, model_state, batch, key):
    return ((batch["inputs"] @ params["kernel"]) ** 2).mean(axis=-1), (model_state, {})


def bare_loss(params, model_state, batch, key):
    return ((batch["inputs"] @ params["kernel"]) ** 2).mean()


def with_weights(*shape_and_type):
    """Trains a linear network that has such weights."""
    return fit(ensemble=made((lambda key: {"w": jnp.zeros(*shape_and_type)}, linear)))


def trained():
    return fit(steps=1).state


class Printing:
    def __call__(self, info):
        print(info.step)


def parameters_of(info):
    return info.state.params


def train(*words):
    return ["train", "--config=configs/digits.py", *words]


def with_fields(*fields):
    return train("--workdir=RUN", *(f"--config.{field}" for field in fields))


NAN = X.copy()
NAN[3, 1] = np.nan

# What was done, and words that its sentence has.
IN_PYTHON = {
    # The network.
    "a class of linen": (lambda: de.as_member(nn.Dense), "instance"),
    "a number as the network": (lambda: de.as_member(3), "int"),
    "no network": (lambda: de.as_member(), "network"),
    "apply without init": (lambda: de.as_member(apply=linear), "init"),
    "a network and functions": (lambda: de.as_member(NET, init=weights), "either"),
    "an apply of one argument": (lambda: de.as_member(init=weights, apply=lambda p: p), "params"),
    "a network with fewer outputs": (lambda: fit(ensemble=made(nn.Dense(2))), "outputs"),
    "a network for other inputs": (lambda: with_weights((5, 3)), r"float32\[8, 4\]"),
    "parameters that are whole numbers": (lambda: with_weights((4, 3), int), "int32"),
    "a result to choose from": (lambda: de.select(made(), fit(), DATA), "such as result.state"),
    "a result to update": (lambda: made().update(fit(), DATA), "such as result.state"),
    # The ensemble.
    "no members": (lambda: made(num_members=0), "num_members"),
    "half a member": (lambda: made(num_members=2.5), "2.5"),
    "an id twice": (lambda: made(member_ids=[0, 0]), "member_ids"),
    "ids for other members": (lambda: made(member_ids=[0, 1, 2]), "member_ids"),
    "a name as the loss": (lambda: made(loss="nll"), "categorical"),
    "a loss of two arguments": (lambda: made(loss=lossless), "params, batch"),
    "a function as the optimizer": (lambda: made(optimizer=optax.sgd), "optimizer"),
    "an optimizer by name": (lambda: made(optimizer="adam"), "adam"),
    "a method that was not called": (lambda: made(methods=[de.methods.mixup]), "mixup"),
    "a method that is no list": (lambda: made(methods=de.methods.label_smoothing(0.1)), "methods"),
    "an execution misspelt": (lambda: made(execution="vmpa"), "Did you mean 'vmap'"),
    "a failure policy misspelt": (lambda: made(failure_policy="skp"), "skp"),
    "a layout of other members": (lambda: made(layout=de.Layout.make(4)), "num_members"),
    "an axis that does not divide": (lambda: de.Layout.make(4, ensemble_axis=3), "ensemble_axis"),
    "a seed of text": (lambda: made(seed="zero"), "seed"),
    "no ensemble": (lambda: de.fit(None, DATA, steps=1), "Give a dist_ens.Ensemble"),
    # The data.
    "a number as data": (lambda: fit(3), "int"),
    "a class as data": (lambda: fit(dict), "instance"),
    "data without labels": (lambda: fit({"inputs": X}), "labels"),
    "labels of another length": (lambda: fit({"inputs": X, "labels": LABELS[:7]}), "7"),
    "a label out of range": (lambda: fit({"inputs": X, "labels": LABELS + 1}), "3"),
    "labels that are fractions": (lambda: fit({"inputs": X, "labels": LABELS + 0.5}), "labels"),
    "a misspelt key": (lambda: fit(DATA | {"weight": np.ones(8)}), "Did you mean 'weights'"),
    "an input that is NaN": (lambda: fit({"inputs": NAN, "labels": LABELS}, steps=1), "NaN"),
    "lists of numbers as data": (lambda: fit({"inputs": X.tolist(), "labels": LABELS}), "list"),
    "no batches": (lambda: fit([]), "no batch"),
    "batches that end": (lambda: fit(iter([DATA, DATA]), steps=9), "9 steps"),
    "batches of two types": (
        lambda: fit([DATA, DATA | {"inputs": X.astype(int)}], steps=2),
        "first",
    ),
    "a batch larger than the data": (lambda: fit(batch_size=9), "batch_size=9"),
    "a batch size of an iterable": (lambda: fit([DATA], batch_size=8), "batch_size=8"),
    "half a batch": (lambda: fit(batch_size=0.5), "0.5"),
    # `fit`.
    "neither steps nor epochs": (lambda: fit(steps=None), "epochs"),
    "both steps and epochs": (lambda: fit(steps=1, epochs=1), "epochs"),
    "no epochs": (lambda: fit(epochs=0), "epochs"),
    "epochs of an iterable": (lambda: fit([DATA], epochs=2), "steps"),
    "a share in percent": (lambda: fit(validation=10), r"\(0, 1\)"),
    "two kinds of data to score": (lambda: fit(eval_data=DATA, validation=0.5), "validation"),
    "scores without data": (lambda: fit(eval_every=10), "eval_data"),
    "a network in place of the ensemble": (lambda: de.fit(NET, DATA, steps=1), "Ensemble"),
    "a path in place of checkpoints": (lambda: fit(checkpoints="runs/a"), "Checkpoints"),
    "one callback in place of a list": (lambda: fit(callbacks=Printing()), "list"),
    "a callback that is a class": (lambda: fit(callbacks=[Printing]), "instance"),
    "a callback without a hook": (lambda: fit(callbacks=[3]), "begin"),
    "a callback that returns parameters": (lambda: fit(callbacks=[parameters_of]), "State"),
    "early stopping without scores": (
        lambda: fit(callbacks=[de.callbacks.EarlyStopping()]),
        "eval",
    ),
    "a loss of one number": (lambda: fit(ensemble=made(loss=bare_loss)), "model_state"),
    "a loss of each example": (lambda: fit(ensemble=made(loss=batch_loss)), r"\[8\]"),
    "a state of other members": (
        lambda: fit(state=trained()._replace(member_id=jnp.array([4, 5])), steps=2),
        r"\[4, 5\]",
    ),
    "parameters in place of a state": (lambda: fit(state={"w": X}), "State"),
    "fewer steps than the state has seen": (
        lambda: fit(state=trained()._replace(step=jnp.array([9, 9]))),
        "9 steps",
    ),
    # What comes after.
    "a prediction of other inputs": (
        lambda: made().predict(trained(), np.zeros((8, 5), np.float32)),
        "5",
    ),
    "a folder without a run": (lambda: de.load("nowhere"), "nowhere"),
    "a coverage in percent": (
        lambda: de.calibrate(made(), trained(), DATA, conformal="aps", level=90),
        "90",
    ),
    "one metric": (lambda: fit(eval_data=DATA, metrics=de.metrics.Metric("margin")), "metrics"),
}

ON_THE_COMMAND_LINE = {
    "no verb": ([], "needs a verb"),
    "a verb misspelt": (["trian"], "'trian' is not a verb"),
    "no folder": (["train", "--config=configs/digits.py"], "--workdir is missing"),
    "no config": (["train", "--workdir=RUN"], "--config is missing"),
    "a config that is absent": (["train", "--config=absent.py", "--workdir=RUN"], "absent.py' is"),
    "a config that is a folder": (["train", "--config=configs", "--workdir=RUN"], "is not a file"),
    "a field misspelt": (with_fields("optimizer.learnin_rate=1"), "optimizer.learning_rate"),
    "a field without --config": (train("--workdir=RUN", "--num_members=4"), "num_members"),
    "a flag misspelt": (train("--confg=x"), "confg"),
    "a text in place of a number": (with_fields("steps=many"), "many"),
    "no members": (with_fields("num_members=0"), "num_members"),
    "a model misspelt": (with_fields("model.name=mpl"), "'mlp'"),
    "a loss misspelt": (with_fields("loss.name=gausian"), "gaussian"),
    "an order misspelt": (with_fields("data.examples=premuted"), "permuted"),
    "steps and epochs": (with_fields("steps=1", "epochs=1"), "exactly one"),
    "a learning rate of zero": (with_fields("optimizer.learning_rate=0"), "learning_rate"),
    "a loss of targets for classes": (with_fields("loss.name=squared_error"), "categorical"),
    "data that are absent": (with_fields("data.source=npz:absent.npz"), "absent.npz"),
    "a folder without a run to score": (["evaluate", "--workdir=RUN"], "no checkpoint"),
    "a folder without a run to report": (["report", "RUN"], "curves.json"),
    "absent inputs": (["predict", "--workdir=RUN", "--input=x.npy", "--output=p.npz"], "x.npy"),
    "a file in place of the folder": (train("--workdir=README.md"), "Nothing can be written in"),
}


def read(sentence: str, words: str) -> None:
    """Checks that a sentence has the words, an end, and no slip."""
    assert re.search(words, sentence), sentence
    assert sentence.endswith((".", "!", "?")), sentence
    assert "\n" not in sentence, sentence
    assert not {why for slip, why in SLIPS.items() if re.search(slip, sentence)}, sentence


@pytest.mark.parametrize("mistake", IN_PYTHON)
def test_a_first_mistake_in_python_is_told_in_a_sentence(mistake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make, words = IN_PYTHON[mistake]
    assert isinstance(make, types.FunctionType)
    with pytest.raises((UserError, RunError)) as raised:
        make()
    read(str(raised.value), words)


@pytest.mark.parametrize("mistake", ON_THE_COMMAND_LINE)
def test_a_first_mistake_on_the_command_line_is_told_in_a_sentence(mistake, tmp_path):
    words, expected = ON_THE_COMMAND_LINE[mistake]
    run = tmp_path / "run"
    ended = dist_ens(*(word.replace("RUN", str(run)) for word in words))
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not run.exists()
    read(ended.stderr.strip().splitlines()[-1], expected)
