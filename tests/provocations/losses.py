"""How the messages of `dist_ens.losses`, `methods`, `metrics` and `models` are provoked."""

import jax
import jax.numpy as jnp
import numpy as np
from dist_ens.config import ModelConfig

from dist_ens import losses, methods, metrics
from dist_ens.methods import LossInfo, loss
from dist_ens.metrics import recalibration
from dist_ens.metrics.metric import Rows, checked_metrics
from dist_ens.models import make_model
from provocations._parts import CLASSES, FEATURES, apply, network, raises
from provocations._parts import batch as _batch

_OBJECTIVE = losses.categorical(CLASSES)
_LOG_PROBS = np.log(np.full((20, 2), 0.5))
_PARAMS = {"w": jnp.zeros((FEATURES, CLASSES))}
_INFO = LossInfo(jax.random.key(0), jax.random.key(1), 0, jnp.arange(8), _OBJECTIVE)


def _squares(params, model_state, batch, info):
    """A loss that does not average through `batch_mean`."""
    return jnp.square(apply(params, batch["inputs"])).mean(), (model_state, {})


def _lost(method=None, loss=_squares, batch=None, model_state=(), **info):
    batch = _batch() if batch is None else batch
    loss = method(loss) if method else loss
    return loss(_PARAMS, model_state, batch, _INFO._replace(**info))


def weights_of_another_shape():
    losses.batch_mean(jnp.zeros((8, 2)), jnp.ones(7))


def no_classes():
    losses.categorical(0)


def an_interval_of_classes():
    losses.squared_error().distribution.central_interval({}, 0.9)


def classes_of_a_real_target():
    losses.gaussian().distribution.probabilities({})


def a_temperature_of_a_real_target():
    losses.squared_error().distribution.calibrate("temperature", {}, np.zeros(2))


def pooled_votes_of_a_real_target():
    losses.gaussian().distribution.with_pooling("vote")


def a_beta_of_two():
    losses.beta_gaussian(2.0)


def quantiles_without_the_middle():
    losses.quantiles((0.1, 0.9))


def a_bootstrap_of_an_iterator():
    _lost(methods.bootstrap(), positions=None)


def a_bootstrap_of_a_loss_without_counts():
    _lost(methods.bootstrap(), loss=loss.loss_of_function(lambda p, s, batch, key: (0.0, (s, {}))))


def smoothed_labels_of_a_real_target():
    _lost(methods.label_smoothing(0.1), objective=losses.gaussian())


def mixup_of_a_loss_function():
    _lost(methods.mixup(0.2), objective=None)


def mixup_of_an_array():
    _lost(methods.mixup(0.2), batch=jnp.zeros((8, 4)))


def mixup_of_batches_without_inputs():
    _lost(methods.mixup(0.2), batch={"image": jnp.zeros((8, 4))})


def mixup_of_two_inputs():
    _lost(
        methods.mixup(0.2), batch={"inputs": (jnp.zeros(8), jnp.zeros(8)), "labels": jnp.zeros(8)}
    )


def a_batch_without_labels():
    _lost(loss=loss.loss_of_objective(_OBJECTIVE, network()), batch={"inputs": jnp.zeros((8, 4))})


def labels_with_an_axis_too_many():
    batch = _batch() | {"labels": jnp.zeros((8, 1, 1))}
    of_squares = loss.loss_of_objective(losses.squared_error(), network())
    _lost(loss=of_squares, batch=batch)


def a_metric_without_a_name():
    metrics.Metric("")


def a_metric_of_an_unknown_direction():
    metrics.Metric("margin", direction="up")


def one_metric_in_place_of_a_list():
    checked_metrics(metrics.Metric("margin"))


def a_function_among_the_metrics():
    checked_metrics([_squares])


def predictions_of_other_classes():
    labels = np.arange(20) % 2
    recalibration.fit_vector(_LOG_PROBS, labels)(np.log(np.full((4, 3), 1 / 3)))


def variances_of_other_rows():
    recalibration.fit_variance_scale(np.zeros(3), np.ones(4), np.zeros(3))


def logarithms_of_variances():
    recalibration.fit_variance_scale(np.zeros(3), np.array([-1.0, 0.5, -2.0]), np.ones(3))


def targets_that_are_predicted_exactly():
    recalibration.fit_variance_scale(np.zeros(3), np.ones(3), np.zeros(3))


def labels_that_are_shares():
    recalibration.fit_temperature(_LOG_PROBS, np.exp(_LOG_PROBS))


def a_label_that_no_prediction_has():
    recalibration.fit_temperature(_LOG_PROBS, np.full(20, 2))


def a_class_without_validation_rows():
    recalibration.fit_vector(_LOG_PROBS, np.zeros(20, int))


def probabilities_in_place_of_logarithms():
    recalibration.fit_temperature(np.exp(_LOG_PROBS), np.zeros(20, int))


def a_network_that_is_unknown():
    make_model(ModelConfig(name="mpl"), (4,), CLASSES)


def an_option_that_is_unknown():
    make_model(ModelConfig(options={"hiden_sizes": (8,)}), (4,), CLASSES)


def an_option_that_the_network_refuses():
    make_model(ModelConfig(options={"hidden_sizes": (0,)}), (4,), CLASSES)


def a_reduction_that_does_not_work():
    metrics.Metric("margin", reduce=raises, statistics=("gap",)).score(Rows({"gap": np.zeros(8)}))
