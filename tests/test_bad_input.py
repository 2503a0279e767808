"""Section "Bad input" of the Python API: every mistake is an error message, before it costs."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
import failing
from dist_ens.callbacks import EarlyStopping
from dist_ens.ensemble import Ensemble
from dist_ens.errors import RunError, UserError
from dist_ens.metrics import Metric
from dist_ens.state import refuse_lists

EXAMPLES, CLASSES = 16, 3
_RANDOM = np.random.default_rng(0)
DATA = {
    "inputs": _RANDOM.normal(size=(EXAMPLES, 4)).astype(np.float32),
    "labels": _RANDOM.integers(0, CLASSES, EXAMPLES).astype(np.int32),
}


def init(key, inputs):
    return {"w": jax.random.normal(key, (4, CLASSES))}, ()


def apply(params, model_state, inputs, key, train):
    return inputs @ params["w"], model_state


def nll_of(params, batch):
    logits = batch["inputs"] @ params["w"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])


def loss_fn(params, model_state, batch, key):
    return nll_of(params, batch).mean(), (model_state, {})


def layout_of(rows=2, columns=1):
    return de.Layout.make(2, ensemble_axis=rows, devices=jax.devices()[: rows * columns])


def classifier(**options):
    """An ensemble with an objective."""
    options = {"layout": layout_of(), "execution": "vmap"} | options
    objective = de.losses.categorical(CLASSES)
    return de.Ensemble((init, apply), optax.sgd(0.1), objective, num_members=2, **options)


def with_loss(loss, **options):
    """An ensemble with a loss function, which cannot predict."""
    options = {"layout": layout_of(), "execution": "vmap"} | options
    return de.Ensemble(de.as_member(init=init), optax.sgd(0.1), loss, num_members=2, **options)


def fit(ensemble, data=DATA, **options):
    return failing.fit(ensemble, data, **{"steps": 8} | options)


@pytest.fixture
def no_update(monkeypatch):
    """The update of an ensemble must not be called, nor compiled."""

    def refuse(ensemble):
        raise AssertionError("an update was asked for")

    monkeypatch.setattr(Ensemble, "update_steps", property(refuse))


# Optimizers and networks


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.adam, "The optimizer is the function adam, not an optimizer. Call it: adam("),
        (optax.GradientTransformation, "The optimizer is the class GradientTransformation, not an"),
        (optax.MultiSteps, "The optimizer is the class MultiSteps, not an optimizer. Call it:"),
        (
            optax.nadam,
            "The optimizer is the function adam, not an optimizer. Call it: adam(",
        ),
        (1e-3, "The optimizer is a float, which lacks init and update. Give one of Optax's"),
        (None, "The optimizer is None, which lacks init and update. Give one of Optax's"),
    ],
    ids=["function", "class", "wrapper", "partial", "number", "nothing"],
)
def test_what_is_no_optimizer_is_refused(optimizer, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        de.Ensemble((init, apply), optimizer, loss_fn, num_members=2)


@pytest.mark.parametrize(
    "network",
    [
        (init, lambda params, inputs: inputs),
        (lambda a, b, c: None, apply),
        3,
        "mlp",
        None,
    ],
    ids=["apply", "init", "number", "text", "nothing"],
)
def test_what_is_no_network_is_refused(network):
    with pytest.raises(UserError, match=r"^(The function (apply|init)|No network|as_member did n)"):
        de.Ensemble(network, optax.sgd(0.1), loss_fn, num_members=2)


# Batches and data


SHORT = DATA | {"labels": DATA["labels"][:-1]}
OBJECTS = DATA | {"names": np.array(["cat"] * EXAMPLES)}
TOO_LARGE = DATA | {"inputs": np.full((EXAMPLES, 4), 1e300)}
TOO_LONG = DATA | {"labels": np.full(EXAMPLES, 2**40)}
SCALAR = DATA | {"scale": 1.0}

BAD_DATA = {
    "short": (SHORT, "The arrays of the data have different lengths: the data['inputs'] [16, 4], "),
    "objects": (OBJECTS, "the data['names'] has the type <U3, which holds no numbers. Convert it"),
    "float64": (TOO_LARGE, "the data['inputs']: the value 1e+300 at index (0, 0) does not fit in"),
    "int64": (TOO_LONG, "the data['labels']: the value 1099511627776 at index 0 does not fit in "),
}


@pytest.mark.usefixtures("no_update")
@pytest.mark.parametrize("kind", BAD_DATA)
@pytest.mark.parametrize("given", ["data", "eval_data", "evaluate"])
def test_bad_arrays_are_refused(kind, given):
    data, message = BAD_DATA[kind]
    ensemble = classifier()
    use = {
        "data": lambda: fit(ensemble, data),
        "eval_data": lambda: fit(ensemble, eval_data=data),
        "evaluate": lambda: de.evaluate(ensemble, ensemble.init(DATA), data),
    }[given]
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        use()


BAD_BATCHES = {
    "short": (SHORT, "The arrays of {batch} have different lengths: ['inputs'] float32[16, 4], "),
    "objects": (OBJECTS, "Leaf ['names'] of {batch} has the type <U3, which holds no numbers."),
    "float64": (TOO_LARGE, "Leaf ['inputs'] of {batch}: the value 1e+300 at index (0, 0) does "),
    "int64": (TOO_LONG, "Leaf ['labels'] of {batch}: the value 1099511627776 at index 0 does no"),
    "scalar": (SCALAR, "The arrays of {batch} have different lengths: ['inputs'] float32[16, 4], "),
}


@pytest.mark.usefixtures("no_update")
@pytest.mark.parametrize("kind", BAD_BATCHES)
def test_a_bad_first_batch_of_an_iterable_is_refused(kind):
    data, message = BAD_BATCHES[kind]
    expected = message.format(batch="batch 0")
    # Any pytree of arrays is a batch of a loss function.
    has_arrays = kind in ("short", "scalar")
    for ensemble in (classifier(), *(() if has_arrays else (with_loss(loss_fn),))):
        with pytest.raises(UserError, match=f"^{re.escape(expected)}"):
            fit(ensemble, lambda: iter([data]))


@pytest.mark.parametrize("kind", BAD_BATCHES)
def test_a_bad_later_batch_of_an_iterable_is_refused(kind):
    data, message = BAD_BATCHES[kind]
    expected = message.format(batch="batch 7")
    with pytest.raises(UserError, match=f"^{re.escape(expected)}"):
        fit(classifier(), itertools.chain([DATA] * 7, [data]), steps=9)


BAD_UPDATES = {
    "short": (
        SHORT,
        "The labels have the shape [15], and the network returned [16, 3], of which categ",
    ),
    "objects": (OBJECTS, "The batch['names'] has the type <U3, which holds no numbers. Convert"),
    "float64": (TOO_LARGE, "The batch['inputs']: the value 1e+300 at index (0, 0) does not fit in"),
    "int64": (TOO_LONG, "The batch['labels']: the value 1099511627776 at index 0 does not fit in"),
    "empty": ({}, "The objective categorical takes batches with the key 'inputs': got nothing"),
    "no labels": (
        {"inputs": DATA["inputs"]},
        "The objective categorical takes batches with the key 'labels': got 'inputs'.",
    ),
}


@pytest.mark.parametrize("kind", BAD_UPDATES)
def test_update_refuses_a_bad_batch(kind):
    data, message = BAD_UPDATES[kind]
    ensemble = classifier()
    state = ensemble.init(DATA)
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        ensemble.update(state, data)
    assert not state.params["w"].is_deleted()


def test_a_batch_of_another_structure_at_step_7_is_refused():
    batches = itertools.chain([DATA] * 7, [{"inputs": DATA["inputs"]}])
    message = r"^The batch of step 7 is a pytree {'inputs': \*}, and the first was "
    with pytest.raises(UserError, match=message):
        fit(classifier(), batches, steps=9)


def test_a_batch_of_another_shape_at_step_7_is_refused():
    wider = DATA | {"inputs": np.zeros((EXAMPLES, 5), np.float32)}
    message = r"^Leaf \['inputs'\] of the batch of step 7 is float32\[16, 5\], and that of the fir"
    with pytest.raises(UserError, match=message):
        fit(classifier(), itertools.chain([DATA] * 7, [wider]), steps=9)


def test_an_iterator_that_ends_early_is_an_error():
    message = r"^The data iterator ended after 5 batches, and the run has 9 steps. Give an iterable"
    with pytest.raises(RunError, match=message):
        fit(classifier(), iter([DATA] * 5), steps=9)


def test_an_iterable_that_cannot_be_started_again_is_an_error():
    once = iter([DATA] * 5)
    message = r"^The data yielded no batch when it was started again after step 5. Give an iterable"
    with pytest.raises(RunError, match=message):
        fit(classifier(), lambda: once, steps=9)


@pytest.mark.usefixtures("no_update")
@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ([], {}, "The data yielded no batch. Give an iterable of at least one."),
        (3, {}, "The data is an int. Give a dict of arrays, a source of dist_ens.data, an iterab"),
        ([DATA], {"batch_size": 8}, "batch_size=8 was given with an iterable, whose batches have"),
        (DATA, {"batch_size": 17}, "batch_size=17 is not between 1 and the 16 training examples"),
        (DATA, {"batch_size": 2.5}, "batch_size is 2.5. Give a whole number of at least 1."),
        ([DATA], {"steps": None, "epochs": 1}, "epochs=1 needs data whose number of examples i"),
        (
            [DATA],
            {"eval_data": DATA, "eval_every": "epoch"},
            "eval_every='epoch' needs data whose n",
        ),
        (
            DATA,
            {"eval_every": "epochs"},
            "eval_every is 'epochs'. Give a whole number of steps, or",
        ),
        ([DATA], {"validation": 0.5}, "validation=0.5 holds examples out of arrays or a source"),
        (DATA, {"validation": 1.5}, "validation is 1.5. Give a share of the examples in (0, 1)."),
        (DATA, {"epochs": 1}, "fit takes exactly one of steps and epochs: got steps=8, epochs=1."),
        (DATA, {"steps": -1}, "steps"),
        (DATA, {"checkpoints": "runs/a"}, "checkpoints is a str. Give a folder as dist_ens.Check"),
        (DATA, {"state": 3}, "The given state is an int. Give a State"),
        (DATA, {"callbacks": [3]}, "The callback 3 has none of the methods of a callback"),
        (DATA, {"callbacks": print}, "callbacks is a builtin_function_or_method. Give a list"),
        (DATA, {"eval_data": 3}, "The data is an int. Give a dict of arrays, a source of"),
    ],
)
def test_fit_refuses_bad_arguments(data, options, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        fit(classifier(), data, **options)


@pytest.mark.usefixtures("no_update")
@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (dict, {}, "The data is the class dict, not data. Give an instance: dict(...)."),
        (
            DATA,
            {"callbacks": EarlyStopping},
            "callbacks is the class EarlyStopping. Give a list of",
        ),
        (
            DATA,
            {"callbacks": [EarlyStopping]},
            "callbacks holds the class EarlyStopping, not a callback. Give an instance: "
            "EarlyStopping(...).",
        ),
        (
            DATA,
            {"checkpoints": de.Checkpoints},
            "checkpoints is the class Checkpoints. Give a fold",
        ),
        (DATA, {"state": de.State}, "The given state is the class State. Give a State"),
        (
            DATA,
            {"metrics": [de.metrics.Metric], "validation": 0.5},
            "metrics holds the class Metric, not a Metric. Make one of a function",
        ),
    ],
)
def test_fit_refuses_a_class_in_place_of_its_instance(data, options, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        fit(classifier(), data, **options)


class TakesNothing:
    """A class that makes neither a loss nor a method."""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"loss": TakesNothing},
            "The loss is the class TakesNothing, not a function. Give an inst",
        ),
        ({"layout": de.Layout}, "layout is the class Layout, not a Layout. Make one with Layout.m"),
        ({"optimizer": TakesNothing}, "The optimizer is the class TakesNothing, not an optimizer."),
        ({"methods": [TakesNothing]}, "methods holds the class TakesNothing, which cannot be call"),
        ({"methods": TakesNothing}, "methods is the class TakesNothing, not a tuple."),
    ],
)
def test_an_ensemble_refuses_a_class_in_place_of_its_instance(options, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        dataclasses.replace(classifier(), **options)


OF_LISTS = {name: leaf.tolist() for name, leaf in DATA.items()}


@pytest.mark.usefixtures("no_update")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (OF_LISTS, "Leaf ['inputs'] of {} is a list of numbers or texts, not an array. Convert it"),
        (DATA | {"labels": OF_LISTS["labels"]}, "Leaf ['labels'] of {} is a list of numbers or"),
        (DATA | {"names": ["a", "b"]}, "Leaf ['names'] of {} is a list of numbers or texts, not"),
        (DATA | {"labels": 1.0}, "Leaf ['labels'] of {} is 1.0, not an array. Give an array with"),
        ((DATA["inputs"], OF_LISTS["labels"]), "Leaf [1] of {} is a list of numbers or texts, not"),
    ],
)
def test_lists_in_place_of_arrays_are_named(data, message):
    ensemble, told = classifier(), message.format
    state = ensemble.init(DATA)
    for options in ({}, {"batch_size": 8}, {"validation": 0.5}):
        with pytest.raises(UserError, match=f"^{re.escape(told('the data'))}"):
            fit(ensemble, data, **options)
    given_as = [(data, "the data")]
    if "list" in message:  # Numbers in batches have messages of their own.
        given_as.append(([DATA, data], "batch 1 of the data"))
        with pytest.raises(UserError, match=f"^{re.escape(told('batch 0'))}"):
            fit(ensemble, [data])
    for given, name in given_as:
        with pytest.raises(UserError, match=f"^{re.escape(told(name))}"):
            de.evaluate(ensemble, state, given)
        with pytest.raises(UserError, match=f"^{re.escape(told(name))}"):
            fit(ensemble, eval_data=given)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (OF_LISTS["inputs"], "The argument inputs is a list of numbers or texts, not an array. C"),
        ({"x": OF_LISTS["inputs"]}, "Leaf ['x'] of the argument inputs is a list of numbers or te"),
        (
            1.0,
            "The argument inputs is 1.0, not an array. Give an array with one row for each",
        ),
    ],
)
def test_lists_in_place_of_inputs_are_named(inputs, message):
    ensemble = classifier()
    state = ensemble.init(DATA)
    for predict in (ensemble.predict, ensemble.apply):
        with pytest.raises(UserError, match=f"^{re.escape(message)}"):
            predict(state, inputs)


def test_lists_of_arrays_are_pytrees_of_arrays():
    refuse_lists({"inputs": [DATA["inputs"], (DATA["labels"], np.float32(1.0))]}, "the data")
    refuse_lists([[DATA["inputs"]], [DATA["labels"]]], "the data")
    refuse_lists([jax.ShapeDtypeStruct((2,), "int32"), [], None], "the data")


def test_one_of_a_kind_is_in_the_singular():
    def one_output(params, inputs):
        return inputs @ params["w"][:, :1]

    network = (lambda key: {"w": jax.random.normal(key, (4, CLASSES))}, one_output)
    objective = de.losses.squared_error()
    ensemble = de.Ensemble(network, optax.sgd(0.1), objective, num_members=1)
    state = fit(ensemble, DATA | {"labels": np.ones(EXAMPLES)}, steps=1).state
    with pytest.raises(UserError, match=r"^The run has 1 step already, and 0 are asked for\."):
        fit(ensemble, DATA | {"labels": np.ones(EXAMPLES)}, state=state, steps=0)
    with pytest.raises(UserError, match=r"squared_error takes 1 output in the last axis\."):
        fit(dataclasses.replace(classifier(), loss=objective))
    with pytest.raises(UserError, match=r"the ensemble has 1 member\. Use positions from 0 to 0\."):
        de.select_members(state, [1])


def test_fit_refuses_what_is_no_ensemble():
    with pytest.raises(UserError, match=r"^ensemble is a tuple. Give a dist_ens.Ensemble, made of"):
        fit((init, apply))


# Callbacks


def test_a_callback_that_raises_is_named():
    def breaks(info):
        if info.step == 3:
            raise ValueError("no such column")

    message = (
        r"^The callback .*breaks raised ValueError at step 3: no such column. Correct the callback"
    )
    with pytest.raises(RunError, match=message) as raised:
        fit(classifier(), steps=5, steps_per_call=1, callbacks=[breaks])
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize("hook", ["begin", "evaluated", "write"])
def test_a_method_of_a_callback_that_raises_is_named(hook):
    class Breaks:
        pass

    def method(*args):
        raise KeyError("loss")

    setattr(Breaks, hook, method)
    message = rf"^The callback .*Breaks.{hook} raised KeyError: 'loss'. Correct the callback"
    with pytest.raises(RunError, match=message):
        fit(classifier(), steps=2, eval_data=DATA, callbacks=[Breaks()])


def test_a_callback_that_returns_another_structure_is_refused():
    def changes(info):
        return info.state._replace(params={"v": info.state.params["w"]})

    message = r"^The callback .*changes returned a state of another structure: .*\.params\['v'\]"
    with pytest.raises(UserError, match=message):
        fit(classifier(), callbacks=[changes])


def test_a_callback_that_returns_no_state_is_refused():
    message = r"^The callback .*<lambda> returned an int. Return None, a State, or"
    with pytest.raises(UserError, match=message):
        fit(classifier(), callbacks=[lambda info: 1])


def test_early_stopping_of_an_unknown_score_is_refused():
    stopping = EarlyStopping("nll")
    stopping.metric = "f1"
    with pytest.raises(UserError, match="^EarlyStopping waits for 'f1', and the scores are"):
        fit(classifier(), eval_data=DATA, eval_every=4, callbacks=[stopping])


# Metrics, predictions and folders


@pytest.mark.parametrize(
    "statistic",
    [
        lambda prediction, labels: prediction["log_probs"][:-1, 0],
        lambda prediction, labels: prediction["log_probs"],
        lambda prediction, labels: jnp.float32(1),
        lambda prediction: prediction["log_probs"][:, 0],
    ],
    ids=["short", "wide", "scalar", "signature"],
)
def test_a_metric_of_the_wrong_length_is_refused(statistic):
    ensemble = classifier()
    metric = Metric("own", statistic)
    with pytest.raises(UserError, match=r"^The (statistic of the )?metric 'own' r"):
        de.evaluate(ensemble, ensemble.init(DATA), DATA, metrics=[metric])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (3, "The data is an int. Give a dict of arrays, a source of dist_ens.data, or an iterable"),
        ([], "The data has no batches. Give at least one."),
        (
            {"x": DATA["inputs"]},
            "The objective categorical takes data with the key 'inputs': got 'x'.",
        ),
    ],
    ids=["number", "nothing", "keys"],
)
def test_evaluate_refuses_bad_data(data, message):
    ensemble = classifier()
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        de.evaluate(ensemble, ensemble.init(DATA), data)


@pytest.mark.parametrize("method", ["predict", "apply"])
def test_a_network_without_apply_does_not_predict(method):
    ensemble = with_loss(loss_fn)
    state = ensemble.init(DATA)
    message = "^This ensemble cannot predict: its member has no apply. Give one to as_member"
    with pytest.raises(UserError, match=message):
        getattr(ensemble, method)(state, DATA["inputs"])


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.zeros((0, 4), np.float32), "The inputs have no examples. Give at least one."),
        (np.full((2, 4), 1e300), "The inputs: the value 1e+300 at index (0, 0) does not fit"),
        (np.array(["a", "b"]), "The inputs has the type <U1, which holds no numbers."),
        ((np.zeros((2, 4)), np.zeros((3, 4))), "The inputs have leaves of shapes [2, 4], [3, 4]."),
    ],
    ids=["none", "float64", "objects", "short"],
)
def test_predict_refuses_bad_inputs(inputs, message):
    ensemble = classifier()
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        ensemble.predict(ensemble.init(DATA), inputs)


def test_a_batch_that_does_not_divide_over_the_data_axis_is_refused():
    ensemble = classifier(layout=layout_of(1, 2))
    state = ensemble.init(DATA)
    odd = {name: leaf[:7] for name, leaf in DATA.items()}
    message = r"^Leaf \['inputs'\] of the batch has 7 rows, shape \[7, 4\], and the data axis has 2"
    for batch in (odd, jax.tree.map(jnp.asarray, odd)):
        with pytest.raises(UserError, match=message):
            ensemble.update(state, batch)


def test_an_argument_of_another_number_of_members_is_refused():
    message = r"^Argument 0\['w'\] has the shape \[3\], and its axis 0 should hold the 2 members"
    with pytest.raises(UserError, match=message):
        de.lift(lambda m: m["w"], layout=layout_of(), in_specs=("members",))({"w": np.ones(3)})


BAD_OPTIONS = [
    (
        {"methods": (de.methods.mixup(0.2), de.methods.bootstrap())},
        "The method mixup would mix out-of-bag examples into those of the member, which bootstrap",
    ),
    (
        {"methods": de.methods.bootstrap()},
        "methods is the function bootstrap.<locals>.method, not a",
    ),
    ({"methods": 3}, "methods is 3, not a tuple. Give a tuple of methods"),
    (
        {"methods": (de.methods.bootstrap,)},
        "methods holds the function bootstrap, which makes a method and is none. Call it, su",
    ),
    ({"methods": ("mixup",)}, "methods holds 'mixup', which cannot be called with a loss"),
    ({"compute_dtype": "bfloat17"}, "compute_dtype='bfloat17' is unknown. Did you mean 'bfloat16'"),
    ({"compute_dtype": 3}, "compute_dtype='3' is unknown."),
    ({"dropout_samples": -1}, "dropout_samples is -1. Give a whole number from 1 to 65,536"),
    ({"dropout_samples": 2.0}, "dropout_samples is 2.0. Give a whole number"),
    ({"member_ids": [0.5, 1.5]}, "An id in member_ids is 0.5. Give a whole number from 0"),
    ({"member_ids": 3}, "member_ids is 3. Give a list with one id for each member."),
    ({"member_ids": [0, 0]}, "member_ids is [0, 0] for 2 members."),
    ({"seed": 2**32}, "seed is 4294967296. Give a whole number from 0 to 4,294,967,295."),
    ({"waves": 0}, "waves is 0. Give a whole number from 1"),
    ({"microbatches": True}, "microbatches is True. Give a whole number from 1"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_an_ensemble_is_not_made_with_a_bad_argument(options, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        classifier(**options)


def test_types_and_ids_of_other_libraries_are_arguments():
    ensemble = classifier(compute_dtype=jnp.bfloat16, member_ids=np.array([5, 3]))
    assert ensemble.compute_dtype == "bfloat16"
    assert ensemble.member_ids == (5, 3)
    assert ensemble.ids.tolist() == [5, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ensemble_axis": 0}, "^ensemble_axis is 0. Give a whole number from 1"),
        ({"ensemble_axis": 2.0}, "^ensemble_axis is 2.0. Give a whole number from 1"),
        ({"devices": []}, "^devices is empty. Give at least one device"),
    ],
)
def test_a_layout_is_not_made_with_a_bad_argument(options, message):
    with pytest.raises(UserError, match=message):
        de.Layout.make(4, **options)


def test_arrays_that_lie_on_the_device_already_are_checked_too():
    one = de.Layout.make(2, devices=jax.devices()[:1])
    message = r"^Argument 0\['w'\] has the shape \[3\], and its axis 0 should hold the 2 members"
    with pytest.raises(UserError, match=message):
        de.lift(lambda m: m["w"], layout=one, in_specs=("members",))({"w": jnp.ones(3)})
    ensemble = classifier(layout=one)
    state = ensemble.init(DATA)
    batch = {"inputs": jnp.asarray(DATA["inputs"]), "labels": jnp.asarray(DATA["labels"][:-1])}
    with pytest.raises(UserError, match=r"^The labels have the shape \[15\], and the network ret"):
        ensemble.update(state, batch)


def test_an_empty_folder_is_not_loaded(tmp_path):
    message = r"^There is no checkpoint in .*. Give the folder of a run, which has a folder checkp"
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(UserError, match=message):
            de.load(folder)


def test_evaluate_leaves_out_what_the_objective_does_not_read():
    ensemble = classifier()
    state = ensemble.init(DATA)
    more = DATA | {"group": np.arange(EXAMPLES)}
    assert (
        de.evaluate(ensemble, state, more).ensemble == de.evaluate(ensemble, state, DATA).ensemble
    )
