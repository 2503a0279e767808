"""The objectives of the losses that a config can name."""

from collections.abc import Callable

from dist_ens.config import LossConfig
from dist_ens.errors import UserError
from dist_ens.losses import (
    Objective,
    beta_gaussian,
    categorical,
    class_mean_categorical,
    gaussian,
    one_vs_rest,
    quantiles,
    squared_error,
)

_OF_CLASSES: dict[str, Callable[[int], Objective]] = {
    "softmax_cross_entropy": categorical,
    "class_mean_cross_entropy": class_mean_categorical,
    "sigmoid_cross_entropy": one_vs_rest,
}
_OF_TARGETS: dict[str, Callable[[LossConfig], Objective]] = {
    "gaussian_nll": lambda config: gaussian(),
    "beta_nll": lambda config: beta_gaussian(config.beta),
    "mse": lambda config: squared_error(),
    "pinball": lambda config: quantiles(config.levels),
}


def make_objective(config: LossConfig, num_classes: int | None) -> Objective:
    """Returns the objective of a loss in `config.LOSSES`.

    The objective does not standardise targets, because the source does so.

    Args:
        config: Loss and its options.
        num_classes: Number of classes of the labels; None for real targets.

    Raises:
        UserError: If the loss does not fit the labels.

    >>> make_objective(LossConfig(name="gaussian_nll"), num_classes=None).num_outputs
    2
    """
    if num_classes is not None and config.name in _OF_CLASSES:
        return _OF_CLASSES[config.name](num_classes)
    if num_classes is None and config.name in _OF_TARGETS:
        return _OF_TARGETS[config.name](config)
    labels, fitting, others = (
        ("real targets", _OF_TARGETS, "class numbers as integers")
        if num_classes is None
        else ("classes", _OF_CLASSES, "real targets as floats")
    )
    raise UserError(
        f"loss.name={config.name!r} does not fit labels that are {labels}: their loss is one of "
        f"{', '.join(fitting)}. Try --config.loss.name={next(iter(fitting))}, or save {others}."
    )
