"""What `fit` is given is checked before anything is trained, and what was trained is not lost."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dist_ens as de
from dist_ens.callbacks import EarlyStopping, Report
from dist_ens.data import Source, Spec, TreeSplit
from dist_ens.evaluation.label_checks import check_keys
from dist_ens.ground.errors import RunError, UserError
from dist_ens.metrics import Metric
from dist_ens.sampling import Order
from dist_ens.training import Door, FitArguments
from dist_ens.training.data import OrderedSplit
from dist_ens.training.preparing import prepared
from test_bad_input import (
    CLASSES,
    DATA,
    classifier,
    ensemble_of,
    fit,
    layout_of,
    loss_fn,
    nll_of,
    with_loss,
)
from test_bad_input import no_update as no_update


def hit(prediction, labels):
    return (prediction["log_probs"].argmax(-1) == labels) * 1.0


def regression(*, standardize=True, **options):
    """An ensemble of linear networks, whose labels are standardised by default."""
    network = (
        lambda key, inputs: ({"w": jax.random.normal(key, (4, 1))}, ()),
        lambda params, model_state, inputs, key, train: (inputs @ params["w"], model_state),
    )
    return ensemble_of(network, de.losses.squared_error(standardize=standardize), **options)


CLASS_LABELS, EXAMPLES = DATA["labels"], len(DATA["labels"])
ORDERED = OrderedSplit(TreeSplit(DATA), de.data.shared().order(EXAMPLES, 4), 0)
OTHER_KEY = {"x": DATA["inputs"], "labels": CLASS_LABELS}
SCORED, ONE_NUMBER = {"eval_data": DATA}, Metric("own", lambda p, y: jnp.float32(1))
WAITS = "EarlyStopping waits for 'f1', and the scores during training are accuracy, nll, "
REFUSED = [
    (DATA | {"labels": CLASS_LABELS[:, None, None]}, {}, "The labels have the shape [examples, 1,"),
    (DATA | {"weights": -np.ones(EXAMPLES)}, {}, "16 of 16 weights are negative or"),
    (DATA | {"weights": np.zeros(EXAMPLES)}, {}, "All weights are 0, so no example counts."),
    # What needs examples with positions.
    (ORDERED, {}, "The data is an OrderedSplit. Give a dict"),
    (ORDERED, {"batch_size": 8}, "batch_size=8 needs examples with positions"),
    ([DATA], {"order": de.data.permuted()}, "order=OrderRule("),
    ([DATA], {"validation": 0.5}, "validation=0.5 needs examples"),
    ([DATA], {"eval_every": "epoch"}, "eval_every='epoch' needs examples"),
    # What cannot be scored.
    (DATA, {"eval_data": OTHER_KEY}, "The objective categorical takes data with the key 'inp"),
    (DATA, SCORED | {"metrics": [ONE_NUMBER]}, "The metric 'own' returns values of shape [] for"),
    (DATA, SCORED | {"eval_every": 4, "callbacks": [EarlyStopping("f1")]}, WAITS),
    (
        DATA,
        {"callbacks": [Report("absent")]},
        "Report shows the scores of the evaluation data, and",
    ),
]


@pytest.mark.usefixtures("no_update")
@pytest.mark.parametrize(("data", "options", "message"), REFUSED)
def test_what_cannot_be_trained_on_or_scored_is_refused_before_training(data, options, message):
    with pytest.raises(UserError, match=f"^{re.escape(message)}"):
        fit(classifier(), data, **options)


def test_an_auxiliary_value_does_not_take_the_place_of_a_metric_of_the_library():
    def named(name, value):
        def loss(params, model_state, batch, key):
            loss, (model_state, _) = loss_fn(params, model_state, batch, key)
            return loss, (model_state, {name: value(loss)})

        return fit(with_loss(loss), steps=1)

    assert named("loss", lambda loss: loss).step == 1  # The same value is no other.
    for name in ("loss", "is_frozen"):
        with pytest.raises(UserError, match=f"^The loss returned an auxiliary value '{name}'"):
            named(name, lambda loss: 2 * loss)


def test_other_keys_of_the_data_are_allowed():
    for key in ("widths", "heights", "sample_ids", "inputs_2", 3, "label"):
        check_keys(classifier().objective, [*DATA, key])


NUMBERS = DATA | {"labels": np.arange(EXAMPLES, dtype=np.float32)}


def with_labels(value, *rows):
    """The data whose labels are numbers, with another value in some rows."""
    labels = NUMBERS["labels"].copy()
    labels[[*rows]] = value
    return NUMBERS | {"labels": labels}


@pytest.mark.usefixtures("no_update")
@pytest.mark.parametrize(
    ("value", "name", "standardize"), [(np.nan, "NaN", False), (-np.inf, "infinity", True)]
)
def test_labels_that_are_not_finite_are_refused_with_their_row(value, name, standardize):
    ensemble, wrong = regression(standardize=standardize), with_labels(value, 5, 7)
    told = rf"have {name} in row 5 of {EXAMPLES} \(2 such rows in all\)\. Remove these rows"
    with pytest.raises(UserError, match=f"^The labels {told}"):
        fit(ensemble, wrong)
    with pytest.raises(UserError, match=f"^The labels of the evaluation data {told}"):
        fit(ensemble, NUMBERS, eval_data=wrong)


def test_labels_that_are_all_equal_are_not_divided_by_their_deviation():
    equal = DATA | {"labels": np.full(EXAMPLES, 3.0, np.float32)}
    rounded = {"inputs": DATA["inputs"][:12], "labels": np.full(12, 1.1, np.float32)}
    assert rounded["labels"].std() > 0  # The mean is rounded.
    for data in (equal, rounded):
        with pytest.raises(UserError, match="^All labels are equal"):
            fit(regression(), data)
    assert np.isfinite(fit(regression(standardize=False), equal).state.params["w"]).all()


def test_labels_that_are_not_finite_are_not_scored():
    ensemble, wrong = regression(), with_labels(np.nan, 5)
    state = ensemble.init(NUMBERS)
    with pytest.raises(UserError, match=f"^The labels have NaN in row 5 of {EXAMPLES} "):
        de.evaluate(ensemble, state, wrong, batch_size=4)
    # An example of weight 0 may have any label, but a gradient of NaN times 0 is NaN.
    wrong["weights"] = (np.arange(EXAMPLES) != 5) * 1.0
    assert np.isfinite(de.evaluate(ensemble, state, wrong).ensemble["rmse"])
    with pytest.raises(UserError, match="^The labels have NaN in row 5"):
        fit(ensemble, wrong)
    fit(ensemble, NUMBERS, eval_data=wrong, steps=1)


def test_an_objective_may_take_labels_that_are_missing():
    whole = de.losses.squared_error()

    def of_known(outputs, labels):
        is_known = ~jnp.isnan(labels)
        return jnp.where(is_known, whole.example_loss(outputs, jnp.where(is_known, labels, 0)), 0)

    objective = dataclasses.replace(whole, example_loss=of_known)
    result = fit(regression().replace(loss=objective), with_labels(np.nan, 5), steps=2)
    assert np.isfinite(result.state.params["w"]).all()


@pytest.mark.parametrize("steps", [1, 8])  # A run of 1 step streams the split, 8 put it on devices.
def test_labels_of_a_split_that_is_not_in_memory_are_checked_when_they_are_read(steps):
    class Files:
        in_memory = False

        def __len__(self):
            return EXAMPLES

        def take(self, indices):
            labels = np.where(indices == wrong, -1, CLASS_LABELS[indices])
            return {"inputs": DATA["inputs"][indices], "labels": labels.astype(np.int32)}

    source = Source(Spec((4,), "float32", (), CLASSES), Files(), Files())
    wrong = None
    assert fit(classifier(), source, steps=steps, batch_size=4).step == steps
    order = Order(EXAMPLES, 4)
    wrong = order.indices(order.cursor(0, range(1)), np.arange(4))[0, 2]  # of the first batch
    with pytest.raises(UserError, match=r"^The labels of the training data lie in \[-1, [012]\]"):
        fit(classifier(), source, steps=steps, batch_size=4)


def test_labels_that_are_no_classes_are_not_scored():
    ensemble = classifier()
    state = ensemble.init(DATA)
    for wrong in (CLASS_LABELS - 1, CLASS_LABELS + CLASSES):
        with pytest.raises(UserError, match=r"^The labels lie in \[.*, and the objective has 3 cl"):
            de.evaluate(ensemble, state, DATA | {"labels": wrong})
    # An example of weight 0 may have any label.
    weights, labels = np.arange(EXAMPLES) > 0.0, CLASS_LABELS.copy()
    labels[0] = -1
    de.evaluate(ensemble, state, DATA | {"labels": labels, "weights": weights.astype(float)})


def test_the_scores_of_an_evaluation_are_known_before_training():
    class Begins:
        def begin(self, run):
            self.directions = run.directions

    begins, metric = Begins(), Metric("hit", hit, direction="higher")
    result = fit(classifier(), eval_data=DATA, metrics=[metric], callbacks=[begins])
    assert list(begins.directions) == list(result.scores.ensemble)
    expected = {"hit": "higher", "nll": "lower", "entropy": None}
    assert begins.directions | expected == begins.directions
    result = fit(with_loss(loss_fn), eval_data=DATA, callbacks=[begins])
    assert begins.directions == {"loss": "lower"}
    assert result.scores.mean_member.keys() == {"loss"}


def test_data_in_columns_and_members_in_waves_can_be_scored():
    layout = de.Layout.make(4, ensemble_axis=2, devices=jax.devices()[:4])
    ensemble = classifier().replace(num_members=4, layout=layout, waves=2)
    scores = fit(ensemble, steps=1, eval_data=DATA, metrics=[Metric("hit", hit)]).scores.ensemble
    assert scores["hit"] == scores["accuracy"]


def breaks(*_):
    raise KeyError("what nobody could know before")


@pytest.mark.parametrize(
    "options",
    [
        {"metrics": [Metric("own", hit, reduce=breaks)]},
        {"callbacks": [types.SimpleNamespace(evaluated=breaks)]},
    ],
    ids=["metric", "callback"],
)
def test_the_state_is_saved_when_an_evaluation_fails(tmp_path, options):
    ensemble, checkpoints = classifier(), de.Checkpoints(tmp_path, every_secs=None)
    with pytest.raises(RunError, match="what nobody could know before"):
        fit(ensemble, steps=4, checkpoints=checkpoints, eval_data=DATA, **options)
    result = fit(ensemble, steps=4, checkpoints=checkpoints)
    assert result.steps_per_second == 0  # nothing was trained again
    expected = fit(ensemble, steps=4).state.params["w"]
    np.testing.assert_array_equal(result.state.params["w"], expected)


def test_a_given_state_is_still_there_after_a_run_on_other_devices():
    one, two = (
        de.Layout.make(2, ensemble_axis=1, devices=jax.devices()[:count]) for count in (1, 2)
    )
    for begun, goes_on in ((one, two), (two, one)):
        state = fit(classifier(layout=begun), steps=2).state
        fit(classifier(layout=goes_on), steps=6, state=state)
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("steps", [0, 2])
def test_a_state_that_has_all_steps_already_is_returned(steps):
    auto = classifier(execution="auto")
    state = fit(classifier(), steps=steps).state if steps else auto.init(DATA)
    result = fit(auto, steps=steps, state=state)
    assert result.step == steps
    np.testing.assert_array_equal(result.state.params["w"], state.params["w"])


@pytest.mark.parametrize(
    ("scored", "ends"),
    [
        # An epoch of 16 examples in batches of 6 is 2.67 steps, two are 5.33.
        ({"eval_data": DATA}, [3, 6]),
        # Of these 12 are trained on.
        pytest.param({"validation": 0.25}, [2, 4], marks=pytest.mark.long),
    ],
)
def test_epochs_of_arrays_end_at_the_step_that_sees_their_last_example(scored, ends, tmp_path):
    options = {"steps": None, "batch_size": 6, "eval_every": "epoch"} | scored
    found = []
    for epochs in (1, 2):  # The second run resumes the first.
        checkpoints = de.Checkpoints(tmp_path)
        result = fit(classifier(), epochs=epochs, checkpoints=checkpoints, **options)
        assert result.step == ends[epochs - 1]
        found += [record["step"] for record in result.history if "train/loss" not in record]
    assert found == ends


def test_a_run_that_was_saved_without_a_step_chooses_its_execution_when_it_is_resumed(tmp_path):
    state = fit(classifier(), steps=2).state
    auto, checkpoints = classifier(execution="auto"), de.Checkpoints(tmp_path, every_secs=None)
    for steps in (2, 3):
        result = fit(auto, steps=steps, state=state, checkpoints=checkpoints)
        assert result.step == steps
    assert result.ensemble.execution != "auto"


LABELS = 100 + 10 * np.random.default_rng(1).normal(size=16).astype(np.float32)
TARGETS = {"inputs": DATA["inputs"], "labels": LABELS}


def test_the_labels_of_a_given_state_at_step_0_are_standardised():
    ensemble = regression()
    new = fit(ensemble, TARGETS).state
    given = fit(ensemble, TARGETS, state=ensemble.init(TARGETS)).state
    jax.tree.map(np.testing.assert_array_equal, given.params, new.params)
    np.testing.assert_allclose(given.model_state["label_mean"], np.full(2, LABELS.mean()), 1e-6)


def test_networks_that_were_trained_elsewhere_predict_and_train_with_standardised_labels():
    ensemble = regression()
    state = ensemble.state_of([{"w": np.full((4, 1), k, np.float32)} for k in (1, 3)])
    # The networks predict sums of inputs, times 1 and 3; nothing is scaled yet.
    mean = ensemble.predict(state, DATA["inputs"]).mean
    np.testing.assert_allclose(np.ravel(mean), 2 * DATA["inputs"].sum(axis=1), rtol=1e-4)
    trained = fit(ensemble, TARGETS, steps=1, state=state)
    mean, std = LABELS.mean(), LABELS.std()
    expected = mean + std * (DATA["inputs"] @ np.mean(trained.state.params["w"], axis=0))
    found = trained.ensemble.predict(trained.state, DATA["inputs"]).mean
    np.testing.assert_allclose(np.ravel(found), np.ravel(expected), rtol=1e-4)
    # A state that was taken apart is put together as it was.
    parts = de.unstack_members(trained.state.model_state)
    again = ensemble.state_of(de.unstack_members(trained.state.params), parts)
    assert jax.tree.structure(again.model_state) == jax.tree.structure(trained.state.model_state)


@pytest.mark.parametrize("inputs", [1.0, 1e30])  # The square of 1e30 is infinite in float32.
def test_members_that_diverged_are_named_at_the_end(inputs):
    data, told = NUMBERS | {"inputs": np.full((EXAMPLES, 4), inputs, np.float32)}, []
    fit(regression(standardize=False), data, steps=2, say=told.append)
    expected = "2 members of 2 diverged, with the ids"
    assert any(sentence.startswith(expected) for sentence in told) == (inputs > 1)


def test_a_member_keeps_to_its_group_in_an_order_that_is_not_shuffled():
    order = de.data.shared(shuffle=False).order(6, 4, num_groups=2)
    found = order.indices(order.cursor(0, range(2)), np.arange(4), np.int32([1]))
    assert found.tolist() == [[6, 7, 8, 9], [10, 11, 6, 7]]  # Group 1 has the examples 6 to 11.


def test_the_default_batch_is_at_most_an_epoch_of_the_order_divided_over_the_columns():
    for columns, size in ((1, 12), (8, 8)):  # An epoch has 12 of the 16 examples.
        ensemble = classifier(layout=layout_of(1, columns))
        given = FitArguments(ensemble=ensemble, data=DATA, steps=1, order=de.data.kfold(5))
        assert prepared(given, Door()).info.batch_size == size


def test_a_key_that_only_a_loss_function_or_a_method_can_read_is_left_out_for_an_objective():
    data = DATA | {"extra": np.zeros((EXAMPLES, 2), np.float32)}
    smooth = classifier(methods=[de.methods.label_smoothing(0.1)])
    for ensemble, keys in (
        (classifier(), {*DATA}),
        (smooth, {*data}),
        (with_loss(loss_fn), {*data}),
    ):
        given = FitArguments(ensemble=ensemble, data=data, steps=1)
        assert prepared(given, Door()).data.batch.keys() == keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Rows:
    inputs: jax.Array
    labels: jax.Array


def test_data_of_every_kind_is_scored_as_it_is_trained_on():
    def loss(params, model_state, batch, key):
        return nll_of(params, vars(batch)).mean(), (model_state, {})

    ensemble, rows = with_loss(loss), Rows(**DATA)
    for data in (rows, [rows], lambda: iter([rows])):
        result = fit(ensemble, data, eval_data=data)
        assert de.evaluate(ensemble, result.state, data).members == result.scores.members
    for none in (5, lambda: 5):
        for use in (fit, lambda _, data: de.evaluate(ensemble, result.state, data)):
            with pytest.raises(UserError, match="^The data is an int. Give a dict of arrays"):
                use(ensemble, none)


def test_a_state_that_was_donated_to_an_update_is_refused_wherever_a_state_is_taken():
    ensemble = classifier()
    state = ensemble.init(DATA)
    ensemble.update(state, DATA)
    for takes in (
        lambda: fit(ensemble, state=state),
        lambda: ensemble.update(state, DATA),
        lambda: ensemble.predict(state, DATA["inputs"]),
        lambda: de.evaluate(ensemble, state, DATA),
        lambda: de.calibrate(ensemble, state, DATA),
        lambda: state.select([0]),
        lambda: de.State.concatenate([state]),
    ):
        with pytest.raises(UserError, match="^The state was given to an update before"):
            takes()
