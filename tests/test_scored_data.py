"""Data that `evaluate` scores: its labels, weights and kinds, and whose members score it."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import dist_ens as de
from dist_ens.data import ArraySplit, Source, Spec, Standardization
from dist_ens.ground.errors import UserError
from dist_ens.metrics import Metric

pytestmark = pytest.mark.quick

EXAMPLES = 8
INPUTS = np.linspace(-1, 1, 3 * EXAMPLES, dtype=np.float32).reshape(EXAMPLES, 3)


def linear(num_outputs):
    return (
        lambda key: {"w": np.linspace(-1, 1, 3 * num_outputs, dtype=np.float32).reshape(3, -1)},
        lambda params, inputs: inputs @ params["w"],
    )


def ensemble_of(objective, num_members=2, **options):
    network = linear(objective.num_outputs)
    return de.Ensemble(network, optax.sgd(0.1), objective, num_members=num_members, **options)


def data_with(labels, **others):
    return {"inputs": INPUTS, "labels": labels, **others}


GAUSSIAN, CATEGORICAL = de.losses.gaussian(), de.losses.categorical(3)
CLASSES = np.arange(EXAMPLES, dtype=np.int32) % 3
TARGETS = CLASSES.astype(np.float32)


@pytest.mark.parametrize(
    "objective",
    [
        *(GAUSSIAN, CATEGORICAL),
        pytest.param(de.losses.squared_error(), marks=pytest.mark.long),
        pytest.param(de.losses.quantiles(), marks=pytest.mark.long),
    ],
    ids=lambda objective: objective.name,
)
def test_a_column_of_labels_is_trained_on_and_scored_like_its_numbers(objective):
    labels = TARGETS if objective.num_classes is None else CLASSES
    layout = de.Layout.make(2, ensemble_axis=1, devices=jax.devices()[:2])
    ensemble, weights = ensemble_of(objective, layout=layout), np.arange(1.0, EXAMPLES + 1)
    flat = data_with(labels, weights=weights)
    column = data_with(labels[:, None], weights=weights[:, None])
    states, scores = [], []
    for data in (flat, column):
        result = de.fit(ensemble, data, steps=2, eval_data=data, progress=False)
        states.append(np.asarray(result.state.params["w"]))
        scores += [result.scores.ensemble, de.evaluate(ensemble, result.state, flat).ensemble]
        scores.append(de.evaluate(ensemble, result.state, column).ensemble)
    np.testing.assert_allclose(states[0], states[1], rtol=1e-6)
    for each in scores:
        # Scores that cancel to zero, such as the mutual information, have the error of float32.
        assert each == pytest.approx(scores[0], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: de.losses.mse(outputs[:, :1], targets),
        lambda outputs, targets: de.losses.gaussian_nll(outputs[:, :2], targets),
        lambda outputs, targets: de.losses.beta_nll(outputs[:, :2], targets, beta=0.5),
        lambda outputs, targets: de.losses.pinball(outputs, targets, levels=(0.1, 0.5, 0.9)),
        lambda outputs, targets: de.metrics.regression_values(
            outputs[None, :, 0], jnp.ones((1, EXAMPLES)), targets, as_one=True
        )["nll"],
    ],
    ids=["mse", "gaussian_nll", "beta_nll", "pinball", "regression_values"],
)
def test_a_column_of_targets_never_broadcasts_to_a_square(loss):
    targets = jnp.arange(1.0, EXAMPLES + 1)
    np.testing.assert_array_equal(loss(INPUTS, targets[:, None]), loss(INPUTS, targets))
    with pytest.raises(UserError, match=r"together they would have \[8, 8\]"):
        loss(INPUTS, targets[:, None, None])


EYE = np.eye(3, dtype=np.int32)[CLASSES]


@pytest.mark.parametrize(
    ("objective", "changes", "message"),
    [
        (GAUSSIAN, {"labels": np.zeros((EXAMPLES, 2))}, r"The labels .* \[examples, 2\]"),
        (CATEGORICAL, {"labels": EYE}, "One-hot rows are converted to classes by ar"),
        (CATEGORICAL, {"labels": TARGETS}, "The labels have the type float32, and cl"),
        (GAUSSIAN, {"weights": np.ones((EXAMPLES, 3))}, r"The weights .* \[examples, 3\], and t"),
    ],
)
def test_labels_and_weights_that_do_not_fit_are_refused(objective, changes, message):
    ensemble, right = ensemble_of(objective), data_with(CLASSES)
    wrong, steps = right | changes, []
    with pytest.raises(UserError, match=message):
        de.evaluate(ensemble, ensemble.init(right), wrong)
    options = {"eval_data": wrong, "callbacks": [steps.append], "progress": False}
    with pytest.raises(UserError, match=message):  # Before anything is trained.
        de.fit(ensemble, right, steps=1, **options)
    assert not steps


def test_rows_that_mark_several_classes_are_not_trained_on():
    tags = 1.0 * (EYE + np.roll(EYE, 1, axis=1))
    with pytest.raises(UserError, match="do not sum to 1.* one label"):
        de.fit(ensemble_of(CATEGORICAL), data_with(tags), steps=1, progress=False)


@pytest.mark.parametrize("num_inputs", [3, 4])
def test_one_example_without_its_batch_is_told_and_a_batch_of_one_is_predicted(num_inputs):
    # The network takes 4 inputs of one example as well as a batch, and returns no row for each.
    network = (lambda key: {"w": np.ones((num_inputs, 2), np.float32)}, linear(2)[1])
    ensemble = de.Ensemble(network, optax.sgd(0.1), GAUSSIAN, num_members=2)
    inputs = np.ones((EXAMPLES, num_inputs), np.float32)
    state = ensemble.init({"inputs": inputs, "labels": np.zeros(EXAMPLES)})
    for use in (ensemble.predict, ensemble.apply):
        for one in (inputs[0], jnp.asarray(inputs[0])):
            with pytest.raises(UserError, match=r"a single example as \[1, "):
                use(state, one)
    assert ensemble.predict(state, inputs[:1]).mean.tolist() == [num_inputs]


@pytest.mark.parametrize(("value", "told"), [(np.nan, "NaN"), (-np.inf, "infinity")])
def test_inputs_that_are_not_finite_are_refused_with_their_index(value, told):
    ensemble, right = ensemble_of(CATEGORICAL), data_with(CLASSES)
    state, wrong = ensemble.init(right), right | {"inputs": INPUTS.copy()}
    wrong["inputs"][2:4, 1] = value
    message = rf" has {told}, in 2 of 8 examples, the first at index \(2, 1\)\. Remove"
    for name, use in (
        ("data", lambda: de.fit(ensemble, wrong, steps=1, validation=0.5, progress=False)),
        ("eval_data", lambda: de.fit(ensemble, right, steps=1, eval_data=wrong, progress=False)),
        ("data", lambda: de.evaluate(ensemble, state, wrong)),
        ("inputs", lambda: ensemble.predict(state, wrong["inputs"])),
    ):
        with pytest.raises(UserError, match=f"{name}.*{message}"):
            use()


@pytest.mark.slow
@pytest.mark.parametrize("dropout_samples", [None, 2])
def test_a_text_has_a_label_for_each_position(dropout_samples):
    network = (
        lambda key: {"w": np.float32(3)},
        lambda params, x: params["w"] * jnp.stack([x, x], axis=-1),
    )
    options = {"num_members": 2, "dropout_samples": dropout_samples}
    ensemble = de.Ensemble(network, optax.sgd(0.1), de.losses.categorical(2), **options)
    labels = np.zeros((EXAMPLES, 3), np.int32)
    state = ensemble.init(data_with(labels))
    scores = de.evaluate(ensemble, state, data_with(labels), intervals=False)
    assert scores.ensemble["nll"] == pytest.approx(np.log(2))  # of two equal logits
    told = r"shape \[examples, 3, 2\].* rows?.*: shape \[examples, 3\]"
    with pytest.raises(UserError, match=told):
        de.evaluate(ensemble, state, data_with(labels[:, 0]))


# Once compiled


@pytest.fixture
def compiled():
    """How often the compiler was asked, in a list that grows."""
    times = []

    def count(event, *_, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            times.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    yield times
    jax.monitoring.unregister_event_duration_listener(count)


def mean_square(params, model_state, batch, key):
    error = batch["inputs"] @ params["w"][:, 0] - batch["labels"]
    return jnp.square(error).mean(), (model_state, {})


@pytest.mark.slow
@pytest.mark.parametrize("loss", [de.losses.gaussian(standardize=True), mean_square])
def test_a_second_evaluation_compiles_nothing_and_keeps_no_state(compiled, loss):
    ensemble = de.Ensemble(linear(2), optax.sgd(0.1), loss, num_members=2)
    data = data_with(np.arange(EXAMPLES, dtype=np.float32))
    own = () if loss is mean_square else (Metric("first", lambda p, labels: labels),)
    first, second = (ensemble.init(data) for _ in range(2))
    expected = de.evaluate(ensemble, first, data, metrics=own, batch_size=4)
    assert compiled
    compiled.clear()
    alive = weakref.ref(first.params["w"])
    del first
    gc.collect()
    assert alive() is None
    scores = de.evaluate(ensemble, second, data, metrics=own, batch_size=4)
    assert scores.members == expected.members
    assert not compiled


@pytest.mark.slow
def test_other_metrics_are_scored_after_the_first_ones():
    ensemble, data = ensemble_of(GAUSSIAN), data_with(np.full(EXAMPLES, 2.0, np.float32))
    state = ensemble.init(data)
    for factor in (1, 3):
        metric = Metric("scaled", lambda p, labels, by=factor: by * labels)
        scores = de.evaluate(ensemble, state, data, metrics=[metric], intervals=False)
        assert scores.ensemble["scaled"] == pytest.approx(2 * factor)


# Kinds of data


class Frame:
    """A table that has `take` and a length, and yields the names of its columns."""

    def __len__(self):
        return EXAMPLES

    def __iter__(self):
        return iter(["inputs", "labels"])

    def take(self, indices):
        raise TypeError("take() of a table takes an axis")


class Batches(Frame):
    """A data set of another library: batches, and a `take` of its own meaning."""

    def __iter__(self):
        for rows in (slice(0, 5), slice(5, 8)):
            yield {name: leaf[rows] for name, leaf in data_with(TARGETS).items()}


@pytest.mark.slow
def test_an_iterable_with_a_take_of_its_own_is_read_as_batches_and_a_table_is_refused():
    ensemble, data = ensemble_of(GAUSSIAN), data_with(TARGETS)
    state = ensemble.init(data)
    expected = de.evaluate(ensemble, state, data, intervals=False)
    scores = de.evaluate(ensemble, state, Batches(), intervals=False)
    assert scores.members == expected.members
    told = "^The data is a Frame, and its item 0 is no batch, but holds <U6"
    with pytest.raises(UserError, match=told):
        de.evaluate(ensemble, state, Frame())


# Units


@pytest.mark.slow
def test_scores_of_a_source_that_standardises_are_in_the_targets_own_unit():
    # Members that predict the training mean, 10, and targets 10, 14, 6, 10.
    standardization = Standardization(((0.0,) * 3,), ((1.0,) * 3,), (10.0,), (4.0,))
    spec = Spec((3,), "float32", (), None, standardization=standardization)
    split = ArraySplit(INPUTS[:4], np.array([0, 1, -1, 0], np.float32))
    source = Source(spec, split, split)
    network = (lambda key: {"w": np.zeros((3, 1))}, linear(1)[1])
    ensemble = de.Ensemble(network, optax.sgd(0.0), de.losses.squared_error(), num_members=2)
    result = de.fit(ensemble, source, steps=1, batch_size=4, eval_data=source, progress=False)
    # sqrt((0 + 16 + 16 + 0) / 4)
    assert result.scores.ensemble["rmse"] == pytest.approx(np.sqrt(8))
    scores = de.evaluate(ensemble, result.state, source, intervals=False)
    assert scores.ensemble["rmse"] == pytest.approx(np.sqrt(8))


def test_groups_of_a_source_are_those_of_the_ensemble():
    split = ArraySplit(INPUTS, np.zeros(EXAMPLES, np.float32))
    source = Source(Spec((3,), "float32", (), None, num_groups=2), split, split)
    ensemble = ensemble_of(GAUSSIAN)
    told = "^The source has num_groups=2, and the ensemble has num_groups=1"
    with pytest.raises(UserError, match=told):
        de.evaluate(ensemble, ensemble.init(data_with(TARGETS)), source)


# Members


@pytest.mark.slow
def test_a_subset_of_the_members_is_scored_and_predicts():
    network = (lambda key: {"w": jax.random.normal(key, (3, 2))}, linear(2)[1])
    ensemble = de.Ensemble(network, optax.sgd(0.1), GAUSSIAN, num_members=4)
    data = data_with(TARGETS)
    state = ensemble.init(data)
    everyone = de.evaluate(ensemble, state, data, intervals=False)
    for positions in ([2, 0], [1]):
        chosen = de.select_members(state, positions)
        scores = de.evaluate(ensemble, chosen, data, intervals=False)
        assert [m["member_id"] for m in scores.members] == positions
        for scored, position in zip(scores.members, positions, strict=True):
            assert scored == pytest.approx(everyone.members[position], rel=1e-5)
        outputs = ensemble.apply(state, INPUTS)[np.array(positions)]
        np.testing.assert_allclose(ensemble.apply(chosen, INPUTS), outputs, rtol=1e-5)
        mean = ensemble.predict(chosen, INPUTS).mean
        np.testing.assert_allclose(mean, outputs[..., 0].mean(0), rtol=1e-5)
        stepped, _ = ensemble.update(chosen, data)
        assert stepped.step.tolist() == [1] * len(positions)


@pytest.mark.parametrize(("labels", "expected"), [(1, 1000), (16, 1000), (256, 64), (20_000, 1)])
def test_examples_of_many_labels_are_scored_a_few_at_a_time(labels, expected):
    seen = set()

    def apply(params, inputs):
        seen.add(len(inputs))
        return jnp.stack([inputs, params["w"] * inputs], axis=-1)

    network = (lambda key: {"w": jnp.ones(())}, apply)
    layout = de.Layout.make(1, devices=jax.devices()[:1])
    objective = de.losses.categorical(2)
    ensemble = de.Ensemble(network, optax.sgd(0.1), objective, num_members=1, layout=layout)
    data = {"inputs": np.zeros((3, labels)), "labels": np.zeros((3, labels), np.int32)}
    state = ensemble.init(data)
    seen.clear()
    de.evaluate(ensemble, state, data, intervals=False)
    assert seen == {expected}


@pytest.mark.parametrize(
    ("unit", "fits"), [(1e-17, True), (1e17, True), (1e-20, False), (1e20, False)]
)
def test_labels_whose_variances_float32_does_not_hold_are_refused(unit, fits):
    ensemble = ensemble_of(de.losses.gaussian(standardize=True), num_members=1)
    data = data_with(TARGETS * unit)
    if fits:
        state = de.fit(ensemble, data, steps=2, progress=False).state
        assert 0 < ensemble.predict(state, INPUTS).total.max() < np.inf
        return
    with pytest.raises(UserError, match="float32 does not hold the variances of their predictions"):
        de.fit(ensemble, data, steps=2, progress=False)
