"""How the messages of `dist_ens.evaluation` are provoked."""

import types

import jax.numpy as jnp
import numpy as np

from dist_ens.data import ArraySplit, Spec, TreeSplit
from dist_ens.evaluation import Evaluator, fit_calibration, ood, out_of_bag, shift
from dist_ens.evaluation.label_checks import check_classes, check_finite, check_weights
from dist_ens.evaluation.scoring import Examples, check_score, evaluate
from dist_ens.losses import Categorical, Gaussian, Point, gaussian
from dist_ens.metrics import Metric
from provocations._parts import (
    CLASSES,
    FEATURES,
    apply,
    batch,
    ensemble,
    examples,
    network,
    raises,
    source,
)

_SPEC = Spec((FEATURES,), "float32", (), CLASSES)
_TABLE = Spec((FEATURES,), "float32", (), None)
_TEXT = Spec((8,), "int32", (8,), 5)
_GROUPS = Spec((FEATURES,), "float32", (), CLASSES, num_groups=2)


def _loss(params, model_state, batch, key):
    return jnp.square(apply(params, batch["inputs"])).mean(), (model_state, {})


def _split(inputs=None, labels=None, **more):
    good = examples()
    inputs = good[0] if inputs is None else inputs
    return TreeSplit({"inputs": inputs, "labels": good[1] if labels is None else labels} | more)


def _checked(split=None, loss=None, metrics=(), **options):
    """Checks by shapes alone whether examples can be scored."""
    made = ensemble(loss, **options)
    return check_score(made, batch(), Examples(split or _split()), metrics=metrics)


def _evaluated(data, loss=None, **options):
    made = ensemble(loss)
    return evaluate(made, made.init(batch()), data, **options)


def _evaluator(distribution=None, spec=_SPEC, **options):
    return Evaluator(ensemble(**options), 8, spec, distribution)


def a_temperature_of_a_table():
    fit_calibration.fit_map("temperature", _evaluator(Gaussian()), None, None)


def a_calibration_of_a_point():
    fit_calibration.fit_map("variance", _evaluator(Point()), None, None)


def a_calibration_without_validation_data():
    fit_calibration.fit_map("temperature", _evaluator(Categorical()), None, None)


def a_calibration_of_several_groups():
    fit_calibration.fit_map("temperature", _evaluator(num_groups=2), None, source().test)


def conformal_sets_of_a_table():
    fit_calibration.fit_rule("lac", 0.9, _evaluator(Gaussian()), None, None)


def conformal_sets_of_a_text():
    labels = np.zeros((8, 8), np.int32)
    fit_calibration.fit_rule("lac", 0.5, _evaluator(Categorical()), None, _split(labels=labels))


def conformal_intervals_without_folds():
    fit_calibration.fit_rule("cv+", 0.5, _evaluator(Gaussian()), None, source().train)


def _to_calibrate(loss=None, **options):
    made = ensemble(loss)
    good = examples()
    data = {"inputs": good[0], "labels": good[1]} | options.pop("more", {})
    return fit_calibration.calibrate(made, made.init(batch()), data, **options)


def a_calibration_of_a_loss_function():
    _to_calibrate(_loss)


def a_calibration_with_weights():
    _to_calibrate(more={"weights": np.ones(8, np.float32)})


def a_calibration_of_nothing():
    _to_calibrate(method=None)


def a_calibration_of_another_step():
    made = ensemble()
    state = made.init(batch())
    fitted = _to_calibrate()
    made.predict(state._replace(step=state.step + 1), examples()[0], calibration=fitted)


def weights_of_several_groups():
    made = ensemble(num_groups=2)
    split = _split(weights=np.ones(8, np.float32))
    Evaluator(made, 8, _GROUPS).evaluate(made.init(batch()), split)


def members_out_of_order():
    made = ensemble(num_groups=2, num_members=4)
    state = made.init(batch())._replace(member_id=jnp.arange(4)[::-1])
    Evaluator(made, 8, _GROUPS).evaluate(state, _split())


def evaluation_data_that_the_network_does_not_take():
    _checked(member=network(raises))


def two_metrics_of_one_name():
    _checked(metrics=[Metric("nll")])


def members_that_do_not_divide_over_groups():
    _evaluator(num_members=2, num_groups=3)


def all_members_left_out():
    _evaluator().without([0, 1])


def weights_of_zero():
    check_weights(np.zeros(8))


def labels_with_an_axis_too_many():
    _checked(_split(labels=np.zeros((8, 1, 1), int)))


def labels_that_are_one_hot():
    _checked(_split(labels=np.zeros((8, CLASSES), int)))


def labels_that_are_floats():
    _checked(_split(labels=np.zeros(8, np.float32)))


def weights_of_another_shape():
    _checked(_split(weights=np.ones((8, 2), np.float32)))


def a_class_that_the_network_lacks():
    check_classes(np.array([0, 3]), CLASSES)


def a_negative_weight():
    check_weights(np.array([1.0, -2.0]))


def one_member_that_predicts_a_point():
    statistics = types.SimpleNamespace(
        require_sound=lambda: None,
        labels=np.zeros((1, 8)),
        member_ids=np.array([0]),
        is_pooled=np.array([True]),
        pooled_members={},
        groups={},
    )
    ood.detection(statistics, statistics)


def other_examples_of_another_shape():
    ood.Unlabelled(ArraySplit(*examples(features=5)), _SPEC, "--ood='npz:a.npz'").take([0])


def members_that_saw_all_examples():
    next(out_of_bag.held_out_predictions(None, None, None, np.zeros((2, 8), bool)))


def a_metric_of_an_unknown_statistic():
    _checked(metrics=[Metric("margin", statistics=("gap",))])


def a_metric_with_the_name_of_a_statistic():
    _checked(metrics=[Metric("confidence", lambda prediction, labels: labels)])


def a_metric_with_one_number_for_all_labels():
    _checked(metrics=[Metric("margin", lambda prediction, labels: labels.sum())])


def a_metric_that_raises():
    _checked(metrics=[Metric("margin", raises)])


def batches_of_other_structure():
    good = batch()
    _evaluated([good, {"inputs": good["inputs"]}])


def no_batches():
    _evaluated([])


def examples_one_at_a_time():
    inputs, labels = examples()
    _evaluated([{"inputs": inputs[0], "labels": labels[0]}])


def a_number_in_place_of_data():
    _evaluated(3)


def evaluation_data_that_the_loss_does_not_take():
    def loss(params, model_state, batch, key):
        raises()

    _checked(loss=loss)


def a_metric_of_a_loss_function():
    _evaluated(batch(), _loss, metrics=[Metric("margin")])


def evaluation_data_without_labels():
    _evaluated({"inputs": examples()[0]})


def a_source_of_other_groups():
    made = ensemble(num_groups=2)
    evaluate(made, made.init(batch()), source())


def a_batch_size_of_zero():
    _evaluated(batch(), batch_size=0)


def inputs_that_are_constant():
    shift.shifted_splits(ArraySplit(np.zeros((8, FEATURES)), np.zeros(8, int)), _SPEC)


def inputs_far_from_zero():
    inputs = np.linspace(1e9, 1e9 + 64, 32, dtype=np.float32).reshape(8, FEATURES)
    shift.shifted_splits(ArraySplit(inputs, np.zeros(8, int)), _SPEC)


def shifts_of_a_text():
    shift.shifted_splits(None, _TEXT)


def _shifted(predict):
    """Tries whether members that predict by a function take inputs of another type."""
    inputs = np.arange(32, dtype=np.uint8).reshape(8, FEATURES)
    evaluator = types.SimpleNamespace(
        member_predictions=lambda state, split: iter([{"probs": predict(split.inputs)}])
    )
    split = ArraySplit(inputs, np.zeros(8, int))
    shifted = shift.ShiftedSplit(split, "blur", 1, 0.0, 31.0, np.dtype(np.float32))
    shift.require_float_inputs(evaluator, None, shifted)


def a_network_that_takes_no_floats():
    _shifted(lambda inputs: inputs if inputs.dtype == np.uint8 else raises())


def a_network_that_predicts_otherwise_for_floats():
    _shifted(lambda inputs: inputs if inputs.dtype == np.uint8 else inputs + 1)


def a_network_that_rounds_its_inputs():
    _shifted(lambda inputs: inputs.astype(np.uint8))


def a_misspelt_key():
    data = dict(zip(("inputs", "labels"), examples(), strict=True)) | {"weight": np.ones(8)}
    made = ensemble()
    evaluate(made, made.init(batch()), data)


def a_label_that_is_nan():
    check_finite(gaussian(), np.array([0.5, np.nan, 1.5], np.float32))
