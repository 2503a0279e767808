"""The estimators of scikit-learn: what they compute, and how often they compile."""

import copy
import io
import pickle
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import joblib
import numpy as np
import optax
import pandas as pd
import pytest
import scipy.sparse
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_iris, load_wine
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import (
    GridSearchCV,
    cross_val_predict,
    cross_val_score,
    train_test_split,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import dist_ens as de
from dist_ens.ground.errors import UserError
from dist_ens.sklearn import EnsembleClassifier, EnsembleRegressor


@pytest.fixture(scope="module")
def wine():
    x, y = load_wine(return_X_y=True)
    return StandardScaler().fit_transform(x), y


@pytest.fixture(scope="module")
def diabetes():
    x, y = load_diabetes(return_X_y=True)
    return train_test_split(StandardScaler().fit_transform(x), y, random_state=0)


@pytest.fixture
def compiled():
    """The number of programs that XLA has compiled, in a list of one."""
    count = [0]

    def listen(event, duration, **_):
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield count
    jax.monitoring.unregister_event_duration_listener(listen)


def test_probabilities_are_those_of_the_ensemble_that_fit_trains(wine):
    x, y = wine
    classifier = EnsembleClassifier(3, model=(16,), steps=50, batch_size=32, random_state=5)
    probs = classifier.fit(x, y).predict_proba(x)
    mlp = de.models.mlp((13,), 3, hidden_sizes=(16,))
    seed = int(np.random.RandomState(5).randint(np.iinfo(np.int32).max))
    ensemble = de.Ensemble(
        mlp, optax.adam(1e-3), de.losses.categorical(3), num_members=3, seed=seed
    )
    data = {"inputs": x.astype(np.float32), "labels": y}
    state = de.fit(ensemble, data, steps=50, batch_size=32, progress=False).state
    np.testing.assert_allclose(probs, ensemble.predict(state, x).mean, rtol=2e-4, atol=1e-6)


def test_a_grid_over_seeds_and_learning_rates_compiles_the_update_once(wine, compiled):
    x, y = wine
    x, y = x[:175], y[:175]  # Five folds of equal length.
    base = EnsembleClassifier(2, model=(8,), steps=20, batch_size=25)
    first = base.set_params(random_state=9).fit(x[:140], y[:140])
    first.predict(x[:35])
    before = compiled[0]
    grid = {"random_state": [0, 1], "learning_rate": [1e-3, 1e-2]}
    search = GridSearchCV(clone(base), grid, cv=5, refit=False).fit(x, y)
    assert len(search.cv_results_["params"]) == 4
    # 20 fits and their predictions find every program that the first fit has compiled.
    assert compiled[0] - before <= 2


def test_labels_may_be_texts_and_rows_a_frame():
    bunch = load_iris(as_frame=True)
    labels = bunch.target_names[bunch.target]
    classifier = EnsembleClassifier(2, learning_rate=1e-2, random_state=0).fit(bunch.data, labels)
    assert classifier.classes_.tolist() == ["setosa", "versicolor", "virginica"]
    assert list(classifier.feature_names_in_) == list(bunch.data.columns)
    assert (classifier.predict(bunch.data) == labels).mean() > 0.95
    with pytest.raises(ValueError, match="feature names"):
        classifier.predict(bunch.data.rename(columns=str.upper))


def test_a_weight_is_the_number_of_times_that_a_row_is_there(wine, diabetes):
    x, _ = wine
    draw = np.random.default_rng(0)
    for kind, inputs, labels in (
        (EnsembleClassifier, x[:60], np.arange(60) % 3),
        (EnsembleRegressor, diabetes[0][:60], diabetes[2][:60]),
    ):
        weights = draw.integers(0, 4, 60)
        # All rows are one batch, so that both take the same steps.
        estimator = kind(2, model=(8,), steps=30, batch_size=500, random_state=0)
        weighted = clone(estimator).fit(inputs, labels, sample_weight=weights)
        repeated = clone(estimator).fit(
            np.repeat(inputs, weights, axis=0), np.repeat(labels, weights)
        )
        by_weight, by_row = (
            each.predict_proba(inputs) if hasattr(each, "predict_proba") else each.predict(inputs)
            for each in (weighted, repeated)
        )
        np.testing.assert_array_equal(by_weight, by_row)
        with pytest.raises(ValueError, match="[Nn]egative values"):
            clone(estimator).fit(inputs, labels, sample_weight=weights - 1)


def test_class_weights_move_the_share_of_the_rare_class(wine):
    _, y = wine
    rows = np.concatenate([np.flatnonzero(y == 0), np.flatnonzero(y == 1)[:6]])
    noisy = np.random.default_rng(0).normal(size=(len(rows), 3))
    plain, balanced = (
        EnsembleClassifier(2, model=(8,), learning_rate=1e-2, class_weight=weight, random_state=0)
        .fit(noisy, y[rows])
        .predict_proba(noisy)[:, 1]
        .mean()
        for weight in (None, "balanced")
    )
    assert plain < 0.25
    assert 0.3 < balanced < 0.7


def test_an_interval_holds_the_share_of_targets_that_it_states(diabetes):
    x, x_test, y, y_test = diabetes
    for calibration in (None, "cqr", "variance"):
        regressor = EnsembleRegressor(
            4, max_epochs=30, calibration=calibration, validation_fraction=0.3, random_state=0
        ).fit(x, y)
        low, high = regressor.predict_interval(x_test, coverage=0.8).T
        inside = ((low <= y_test) & (y_test <= high)).mean()
        assert 0.65 < inside < 0.95, calibration  # 111 rows: 0.8 and its error of 0.04.
    mean, std = regressor.predict(x_test, return_std=True)
    assert (std > 0).all()
    assert np.corrcoef(mean, y_test)[0, 1] > 0.5


def test_early_stopping_takes_fewer_steps_and_a_calibration_holds_rows_out(wine):
    x, y = wine[0], wine[1].copy()
    y[::9] = 0  # Without an error, no temperature is the best.
    options = dict(model=(64,), learning_rate=3e-2, max_epochs=400, random_state=0)
    classifier = EnsembleClassifier(
        2, early_stopping=True, validation_fraction=0.3, calibration="temperature", **options
    ).fit(x, y)
    assert classifier.n_iter_ < 400  # Of one step each: 124 rows are less than a batch.
    assert set(classifier.calibration_.parameters) == {"temperature"}


def test_partial_fit_goes_on_from_where_it_was(wine):
    x, y = wine
    classifier = EnsembleClassifier(2, learning_rate=1e-2, batch_size=32, random_state=0)
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        classifier.partial_fit(x, y)
    scores = [classifier.partial_fit(x, y, classes=[0, 1, 2]).score(x, y) for _ in range(10)]
    assert scores[0] < scores[-1]
    assert scores[-1] > 0.95
    assert classifier.n_iter_ == 10 * 6  # 178 rows are 6 batches of 32.


def test_an_estimator_that_was_written_and_read_predicts_the_same(wine):
    x, y = wine
    model = make_pipeline(StandardScaler(), EnsembleClassifier(2, max_epochs=5, random_state=0))
    model.fit(x, y)
    file = io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    np.testing.assert_array_equal(joblib.load(file).predict_proba(x), model.predict_proba(x))


def test_a_network_an_optimizer_and_settings_of_the_user_are_taken(wine):
    x, y = wine
    network = nn.Sequential([nn.Dense(12), nn.tanh, nn.Dense(3)])
    classifier = EnsembleClassifier(
        4,
        model=network,
        optimizer=lambda hyper: optax.sgd(hyper["learning_rate"], momentum=0.9),
        hyper={"learning_rate": de.hyper.log_uniform(1e-3, 1e-1)},
        methods=(de.methods.bootstrap(),),
        random_state=0,
    )
    predicted = cross_val_predict(classifier, x, y, cv=3)
    assert (predicted == y).mean() > 0.9
    assert len({*np.asarray(classifier.fit(x, y).state_.hyper["learning_rate"]).tolist()}) == 4


def test_a_loss_of_another_task_is_told(wine):
    x, y = wine
    with pytest.raises(UserError, match="loss='gaussian' does not fit EnsembleClassifier"):
        EnsembleClassifier(2, loss="gaussian").fit(x, y)


def test_a_frame_of_pandas_with_a_series_of_targets(diabetes):
    x, _, y, _ = diabetes
    frame = pd.DataFrame(x, columns=[f"c{number}" for number in range(x.shape[1])])
    regressor = EnsembleRegressor(2, max_epochs=5, random_state=0).fit(frame, pd.Series(y))
    np.testing.assert_array_equal(regressor.predict(frame), regressor.predict(frame.copy()))


def test_an_ensemble_with_other_values_has_them_in_every_variant(wine):
    x, y = wine
    data = {"inputs": x.astype(np.float32), "labels": y}
    first = de.Ensemble(
        de.models.mlp((13,), 3, hidden_sizes=(8,)),
        lambda hyper: optax.adam(hyper["rate"]),
        de.losses.categorical(3),
        num_members=2,
        hyper={"rate": 0.01},
    )
    for seed, rate in ((1, 0.01), (2, 0.1)):
        result = de.fit(first.with_values(seed, {"rate": rate}), data, steps=4, progress=False)
        assert result.ensemble.seed == seed
        assert result.ensemble.hyper["rate"].tolist() == pytest.approx([rate] * 2)
        de.fit(result.ensemble, data, steps=8, state=result.state, progress=False)


@pytest.mark.parametrize("is_fitted", [False, True])
def test_each_row_of_a_partial_fit_is_trained_on_once(wine, is_fitted):
    x, y = wine

    def outputs(row):
        """The parameters after one pass over 130 rows, of which one has another label."""
        labels = y.copy()
        labels[row] = (labels[row] + 1) % 3
        classifier = EnsembleClassifier(
            1, model=(), batch_size=60, optimizer=optax.sgd(1e-2), random_state=0
        )
        if is_fitted:
            classifier.fit(x[40:], y[40:])
        before = classifier.n_iter_ if is_fitted else 0
        classifier.partial_fit(x[:130], labels[:130], classes=range(3))
        assert classifier.n_iter_ == before + 3
        return classifier.state_.params

    kept = outputs(177)
    for row in (0, 50, 90, 129):
        moved = jax.tree.map(lambda a, b: np.abs(a - b).sum(), outputs(row), kept)
        # With other rows in the batches, a row has the same weight up to the steps in between.
        one = 1e-2 / 44 * 2 * np.abs(np.append(x[row], 1)).sum()
        assert sum(jax.tree.leaves(moved)) == pytest.approx(one, rel=0.1)


def test_class_weights_count_in_partial_fit_too(wine):
    x, y = wine
    plain, weighted = (
        EnsembleClassifier(2, model=(8,), learning_rate=1e-2, class_weight=weights, random_state=0)
        for weights in (None, {0: 1, 1: 1, 2: 50})
    )
    for _ in range(8):
        plain.partial_fit(x, y, classes=range(3))
        weighted.partial_fit(x[:150], y[:150], classes=range(3))
    assert weighted.predict_proba(x)[:, 2].mean() > 1.3 * plain.predict_proba(x)[:, 2].mean()
    # A class with a weight of its own need not be in every batch.
    rare = EnsembleClassifier(1, model=(), class_weight={2: 50.0}, random_state=0)
    plain = EnsembleClassifier(1, model=(), random_state=0)
    for each in (rare, plain):
        each.partial_fit(x[:130], y[:130], classes=range(3))
    np.testing.assert_array_equal(rare.predict_proba(x), plain.predict_proba(x))
    with pytest.raises(ValueError, match="class_weight='balanced' needs all rows"):
        EnsembleClassifier(2, class_weight="balanced").partial_fit(x, y, classes=range(3))


def _sgd(hyper):
    return optax.sgd(hyper["learning_rate"])


def test_a_learning_rate_may_change_between_two_partial_fits(wine):
    x, y = wine
    classifier = EnsembleClassifier(2, model=(), optimizer=_sgd, learning_rate=1e-2, random_state=0)
    start, *later = (
        copy.deepcopy(classifier.set_params(learning_rate=rate).partial_fit(x, y, classes=range(3)))
        for rate in (1e-2, 0.0, 1e-2)
    )
    kept, moved = (each.state_.params for each in later)
    jax.tree.map(np.testing.assert_array_equal, kept, start.state_.params)
    assert any(jax.tree.leaves(jax.tree.map(np.any, jax.tree.map(np.not_equal, kept, moved))))


def test_weights_of_labels_count_where_a_batch_has_none_of_them(wine):
    x, y = wine
    labels = np.stack([y == 0, y == 2], axis=1).astype(int)
    weighted, plain = (
        EnsembleClassifier(1, model=(), class_weight=rule, random_state=0)
        for rule in ([{1: 50.0}, {1: 2.0}], None)
    )
    rows = y == 1
    for each in (weighted, plain):
        each.partial_fit(x[rows], labels[rows])
    np.testing.assert_array_equal(weighted.predict_proba(x), plain.predict_proba(x))
    with pytest.raises(ValueError, match="optimizer, loss.* have changed since the first call"):
        plain.set_params(optimizer=_sgd).partial_fit(x, labels)


def test_partial_fit_refuses_a_method_that_draws_from_all_rows(wine):
    classifier = EnsembleClassifier(2, model=(8,), methods=(de.methods.bootstrap(),))
    with pytest.raises(ValueError, match=r"such as bootstrap\(\) draws from all rows.*Use fit"):
        classifier.partial_fit(*wine, classes=range(3))


def test_members_that_fail_are_left_out_and_named(wine):
    x, y = wine
    rates = [1e30, 1e-2, 1e-2]
    classifier = EnsembleClassifier(
        3, model=(8,), hyper={"learning_rate": rates}, calibration="temperature", random_state=0
    )
    with pytest.warns(ConvergenceWarning, match=r"1 of 3 members have failed, with the ids \[0\]"):
        classifier.fit(x, y)
    assert classifier.score(x, y) > 0.95
    loaded = pickle.loads(pickle.dumps(classifier))
    np.testing.assert_array_equal(loaded.predict_proba(x), classifier.predict_proba(x))
    with pytest.raises(ValueError, match="All 3 members have failed"):
        classifier.set_params(hyper={"learning_rate": [1e30] * 3}).fit(x, y)


def test_a_member_that_fails_after_the_best_step_is_kept_and_a_failed_fit_leaves_no_state(wine):
    x, y = wine[0], wine[1].copy()
    y[::5] = 0

    def fails_at(hyper):
        rate = hyper["learning_rate"]
        return optax.adam(lambda step: jnp.where(step < hyper["bad"], rate, jnp.nan))

    classifier = EnsembleClassifier(
        2, model=(32,), optimizer=fails_at, hyper={"bad": [40, 1000]}, random_state=0,
        early_stopping=True, learning_rate=3e-2, steps=60,
    )  # fmt: skip
    with warnings.catch_warnings(action="error"):
        classifier.fit(x, y)
    assert classifier.n_iter_ < 40
    assert np.isfinite(classifier.predict_proba(x)).all()
    with pytest.raises(ValueError, match="only one class is present"):
        classifier.fit(x, np.zeros_like(y))
    assert classifier.predict_proba(x).shape == (178, 3)
    with pytest.raises(ValueError, match="All 2 members have failed"):
        classifier.set_params(hyper={"bad": [0, 0]}, early_stopping=False).fit(x, y)
    with pytest.raises(NotFittedError):
        classifier.predict(x)


def test_rare_classes_are_no_obstacle_to_held_out_rows(wine):
    x, y = wine[0][:80], np.arange(80) % 2
    y[:2] = 2
    y[5::7] = 0
    classifier = EnsembleClassifier(
        2, model=(8,), steps=20, early_stopping=True, calibration="temperature", random_state=0
    )
    assert classifier.fit(x, y).predict_proba(x).shape == (80, 3)
    sparse = scipy.sparse.csr_matrix(np.stack([y == 0, y == 1], axis=1).astype(int))
    assert EnsembleClassifier(2, steps=2).fit(x, sparse).predict(x).shape == (80, 2)


def test_rows_of_weight_0_do_not_count_in_a_calibration(diabetes):
    x, x_test, y, _ = diabetes
    weights = np.random.default_rng(0).integers(0, 2, len(y))
    one, two = (
        EnsembleRegressor(2, model=(8,), steps=200, calibration="variance", random_state=0)
        .fit(x, labels, sample_weight=weights)
        .predict_interval(x_test)
        for labels in (y, np.where(weights == 0, y + 300, y))
    )
    np.testing.assert_array_equal(one, two)


def test_a_calibration_that_the_rows_do_not_determine_is_not_applied(wine):
    x, y = wine
    plain = EnsembleClassifier(2, learning_rate=1e-2, random_state=0, validation_fraction=0.1)
    calibrated = clone(plain).set_params(calibration="temperature")
    with pytest.warns(UserWarning, match="18 held-out rows do not determine the calibration"):
        calibrated.fit(x, y)
    assert log_loss(y, calibrated.predict_proba(x)) < 0.1


def test_parts_within_functions_are_stored_and_found_by_other_processes(wine, tmp_path):
    x, y = wine
    network = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)])
    for model in (network, de.models.mlp((13,), 3, hidden_sizes=(8,))):
        classifier = EnsembleClassifier(
            2, model=model, methods=(de.methods.bootstrap(),), max_epochs=5, random_state=0
        )
        joblib.dump(classifier.fit(x, y), tmp_path / "c")
        loaded = joblib.load(tmp_path / "c")
        np.testing.assert_array_equal(loaded.predict_proba(x), classifier.predict_proba(x))
        scores = cross_val_score(classifier, x, y, cv=2, n_jobs=2, error_score="raise")
        assert scores.shape == (2,)


def test_the_ensemble_of_an_estimator_is_one_of_this_package(wine):
    x, y = wine
    classifier = EnsembleClassifier(4, learning_rate=1e-2, random_state=0).fit(x, y)
    ensemble, state = classifier.ensemble_, classifier.state_
    data = {"inputs": x.astype(np.float32), "labels": y}
    prediction = ensemble.predict(state, x)
    np.testing.assert_allclose(prediction.mean, classifier.predict_proba(x), atol=1e-6)
    assert prediction.members.shape == (4, 178, 3)
    assert de.evaluate(ensemble, state, data, intervals=False).ensemble["accuracy"] > 0.95
    assert len(de.select(ensemble, state, data, size=2).member_ids) <= 2
    with pytest.raises(ValueError, match="`classes` are not those of the first call"):
        classifier.partial_fit(x, y, classes=[0, 1])


def test_batch_statistics_are_those_of_all_rows():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dense(2)(nn.BatchNorm(not train, momentum=0.0)(x))

    x = np.repeat([[0.0], [1.0]], [90, 10], axis=0)
    regressor = EnsembleRegressor(1, model=Net(), steps=5, batch_size=128, random_state=0)
    found = regressor.fit(x, np.arange(100.0)).state_.model_state
    means = [leaf for path, leaf in jax.tree.leaves_with_path(found) if "'mean'" in str(path)]
    assert means[0].ravel() == pytest.approx(0.1)


def test_targets_far_from_0_keep_their_digits(diabetes):
    x, x_test, y, _ = diabetes
    near, far = (
        EnsembleRegressor(2, model=(16,), learning_rate=1e-2, max_epochs=30, random_state=0)
        .fit(x, y + shift)
        .predict(x_test)
        - shift
        for shift in (0, 1e9)
    )
    np.testing.assert_allclose(far, near, rtol=1e-3)


def test_a_finished_optimizer_of_optax_is_taken(wine):
    x, y = wine
    classifier = EnsembleClassifier(2, model=[np.int64(8)], optimizer=optax.adamw(1e-2))
    assert classifier.set_params(random_state=0).fit(x, y).score(x, y) > 0.95
    classifier.set_params(optimizer=lambda hyper: optax.sgd(0.1), learning_rate=None)
    assert classifier.fit(x, y).score(x, y) > 0.95


def test_a_mean_alone_has_no_intervals(diabetes):
    x, _, y, _ = diabetes
    regressor = EnsembleRegressor(2, loss="squared_error", steps=2).fit(x, y)
    with pytest.raises(ValueError, match="loss='squared_error' predicts no variance"):
        regressor.predict_interval(x)


def test_a_loss_without_a_variance_stops_early_and_says_so(diabetes):
    x, x_test, y, _ = diabetes
    for loss in ("squared_error", "quantiles"):
        regressor = EnsembleRegressor(
            2, loss=loss, early_stopping=True, max_epochs=20, random_state=0
        ).fit(x, y)
        assert regressor.predict(x_test).shape == (111,)
    with pytest.raises(ValueError, match="loss='quantiles' predicts no variance"):
        regressor.predict(x_test, return_std=True)


def test_a_single_row_of_a_weight_is_no_scale(diabetes):
    x, _, y, _ = diabetes
    weights = np.zeros(len(y))
    weights[3] = 1
    with pytest.raises(UserError, match="All labels are equal"):
        EnsembleRegressor(2, steps=2).fit(x, y, sample_weight=weights)


@pytest.mark.parametrize("unit", [1e-30, 1e30])
@pytest.mark.parametrize("calibration", [None, "variance", "cqr"])
def test_targets_of_any_unit_have_the_same_uncertainty(diabetes, unit, calibration):
    x, x_test, y, _ = diabetes
    ends = []
    for scale in (1.0, unit):
        regressor = EnsembleRegressor(
            2, model=(16,), max_epochs=20, calibration=calibration, random_state=0
        ).fit(x, scale * y)
        ends.append(regressor.predict_interval(x_test) / scale)
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-3, atol=0.5)


def test_a_row_may_have_several_targets(diabetes):
    x, x_test, y, y_test = diabetes
    both, both_test = (np.stack([labels, 3 - 2 * labels], axis=1) for labels in (y, y_test))
    regressor = EnsembleRegressor(
        2, model=(16,), learning_rate=1e-2, max_epochs=60, early_stopping=True, random_state=0
    ).fit(x, both)
    mean, std = regressor.predict(x_test, return_std=True)
    assert mean.shape == std.shape == both_test.shape
    assert regressor.predict_interval(x_test).shape == (*both_test.shape, 2)
    # Each target is predicted in its own unit.
    assert mean[:, 1].std() == pytest.approx(2 * mean[:, 0].std(), rel=0.3)
    assert np.corrcoef(mean.T)[0, 1] < -0.9
    assert regressor.score(x_test, both_test) > 0.3
    regressor.partial_fit(x, both)
    with pytest.raises(ValueError, match=r"`y` has the shape \(331,\), and that of the first call"):
        regressor.partial_fit(x, y)
    conformal = EnsembleRegressor(2, model=(16,), max_epochs=60, calibration="cqr", random_state=0)
    ends = conformal.fit(x, both).predict_interval(x_test, coverage=0.8)
    inside = (ends[..., 0] <= both_test) & (both_test <= ends[..., 1])
    assert (inside.mean(axis=0) > 0.65).all()


def test_a_row_may_have_several_labels(wine):
    x, y = wine
    labels = np.stack([y == 0, y != 1], axis=1).astype(int)
    classifier = EnsembleClassifier(2, model=(16,), learning_rate=1e-2, random_state=0)
    probs = classifier.fit(x, labels).predict_proba(x)
    assert classifier.score(x, labels) > 0.95
    np.testing.assert_array_equal(classifier.predict(x), probs > 0.5)
    mlp = de.models.mlp((13,), 2, hidden_sizes=(16,))
    ensemble = de.Ensemble(
        mlp,
        optax.adam(1e-2),
        de.losses.multilabel(2),
        num_members=2,
        seed=int(np.random.RandomState(0).randint(np.iinfo(np.int32).max)),
    )
    data = {"inputs": x.astype(np.float32), "labels": labels}
    state = de.fit(ensemble, data, epochs=100, batch_size=128, progress=False).state
    np.testing.assert_allclose(probs, ensemble.predict(state, x).mean, rtol=2e-4, atol=1e-6)
    with pytest.raises(ValueError, match="must each be 0 or 1"):
        classifier.fit(x, 2 * labels)
