"""Losses of members with heads: the mean of the heads' losses, or a loss of all heads together."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from dist_ens.ground.errors import UserError, did_you_mean, kind_of
from dist_ens.losses.distribution import Objective
from dist_ens.losses.gaussian import normal_distribution
from dist_ens.losses.targets import summed

# joint(outputs, labels) -> losses: outputs [heads, batch, ..., outputs], losses [batch, ...].
Joint = Callable[[jax.Array, jax.Array], jax.Array]


def of_heads(
    objective: Objective, joint: str | Joint | None = None, *, strength: float = 0.5
) -> Objective:
    """Returns the objective of a member with heads, whose outputs are [heads, batch, ..., outputs].

    All heads see the same examples. Each head is a predictor, which is scored and pooled as a
    member is.

    Args:
        objective: Objective of one head, such as `categorical(10)`.
        joint: Loss of all heads together. With f_h the outputs of H heads and y the label:

            - None: the mean of the heads' losses, not the loss of their mean.
            - "mixture_nll": `-log(mean_h p_h(y))`, for an objective whose loss is an NLL.
            - "crps": for `gaussian`, the CRPS of the mixture of the heads' normal distributions.
              For `squared_error`, the CRPS of the distribution that gives each head the weight
              1 / H, `mean_h |f_h - y| - mean_hk |f_h - f_k| / 2`. The heads then come to lie at
              the quantile levels (2 h - 1) / (2 H). The fair CRPS, for members that are random
              draws, would drive the outermost heads apart without end.
            - "ncl": negative correlation, `mean_h ((f_h - y)^2 - strength (f_h - mean_k f_k)^2)`,
              for `squared_error`.
            - a function `joint(outputs, labels)` of outputs [heads, batch, ..., outputs] and
              labels [batch, ...] that returns the loss of each label, float[batch, ...].
        strength: Strength of "ncl", in [0, 1]. With 1 the loss is that of the mean of the heads.

    Raises:
        UserError: If `joint` is unknown, or does not fit the objective.

    >>> from dist_ens.losses import squared_error
    >>> crps = of_heads(squared_error(), joint="crps")
    >>> crps.losses(jnp.array([[[1.0]], [[3.0]]]), jnp.array([2.0])).tolist()  # 1 - (2 + 2) / 4 / 2
    [0.5]

    Source: Gneiting and Raftery (2007), "Strictly proper scoring rules, prediction, and
    estimation", for the CRPS; Grimit et al. (2006), "The continuous ranked probability score for
    circular variables and its application to mesoscale forecast ensemble verification", for
    mixtures; Liu and Yao (1999), "Ensemble learning via negative correlation".
    """
    if not isinstance(objective, Objective):
        raise UserError(
            f"of_heads takes the objective of one head, such as categorical(10): got "
            f"{kind_of(objective)}."
        )
    if objective.has_heads:
        raise UserError("The objective is one of heads already. Give of_heads that of one head.")
    found = joint if joint is None or callable(joint) else _named(joint, objective, strength)
    name = joint if isinstance(joint, str) else getattr(joint, "__name__", "joint")
    label = f"of_heads({objective.name}{'' if joint is None else f', {name}'})"
    return dataclasses.replace(objective, name=label, has_heads=True, joint=found)


def _named(joint: str, objective: Objective, strength: float) -> Joint:
    kinds = ("mixture_nll", "crps", "ncl")
    if joint not in kinds:
        raise UserError(
            f"joint is {joint!r}.{did_you_mean(joint, kinds)} Use one of {', '.join(kinds)}, a "
            "function of outputs and labels, or None."
        )
    if not 0 <= strength <= 1:
        raise UserError(f"strength is {strength}. Give a number in [0, 1].")
    nll = partial(mixture_nll, objective)
    known: dict[str, dict[str, Joint]] = {
        "mixture_nll": {"categorical": nll, "gaussian": nll},
        "crps": {"gaussian": crps_of_mixture, "squared_error": crps_of_points},
        "ncl": {"squared_error": partial(negative_correlation, strength=strength)},
    }
    if objective.name not in known[joint]:
        raise UserError(
            f"joint={joint!r} takes {' or '.join(known[joint])}: got {objective.name}. Give a "
            "function of outputs and labels for other objectives."
        )
    found = known[joint][objective.name]
    # Of several targets the NLL is joint, and the other losses are sums.
    return found if found is nll else summed(found, objective.distribution.num_targets)


def mixture_nll(objective: Objective, outputs: jax.Array, labels: jax.Array) -> jax.Array:
    """Computes the NLL of the mixture of the heads, `-log(mean_h p_h(y))`, float[batch, ...].

    Labels of classes may also be shares of the classes, float[batch, ..., classes].
    """
    if objective.num_classes is not None:  # The averaged probabilities are those of one network.
        log_probs = jax.nn.logsumexp(jax.nn.log_softmax(outputs), axis=0)
        return objective.example_loss(log_probs, labels)
    nll = jax.vmap(objective.example_loss, in_axes=(0, None))(outputs, labels)
    return math.log(len(outputs)) - jax.nn.logsumexp(-nll, axis=0)


def crps_of_points(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the CRPS of heads that predict one number each, float[batch, ...]; see `of_heads`.

    >>> heads = jnp.array([[[0.0]], [[2.0]]])
    >>> crps_of_points(heads, jnp.array([5.0])).tolist()  # 4 - 2 * 2 / 4 / 2
    [3.5]
    """
    values = outputs[..., 0]
    between = jnp.abs(values[:, None] - values[None]).mean(axis=(0, 1))
    return jnp.abs(values - targets[None]).mean(axis=0) - between / 2


def crps_of_mixture(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    """Computes the CRPS of the mixture of the heads' normal distributions, float[batch, ...].

    With A(m, v) = E|Z| of a normal Z of mean m and variance v, it is

        mean_h A(y - m_h, v_h) - mean_hk A(m_h - m_k, v_h + v_k) / 2
    """
    mean, variance = normal_distribution(outputs)
    between = _mean_absolute(mean[:, None] - mean[None], variance[:, None] + variance[None])
    to_target = _mean_absolute(targets[None] - mean, variance)
    return to_target.mean(axis=0) - between.mean(axis=(0, 1)) / 2


def _mean_absolute(mean: jax.Array, variance: jax.Array) -> jax.Array:
    """Computes E|Z| of a normal Z."""
    std = jnp.sqrt(variance)
    z = mean / std
    return 2 * std * jax.scipy.stats.norm.pdf(z) + mean * (2 * jax.scipy.stats.norm.cdf(z) - 1)


def negative_correlation(outputs: jax.Array, targets: jax.Array, *, strength: float) -> jax.Array:
    """Computes the loss "ncl" of `of_heads`, float[batch, ...]."""
    values = outputs[..., 0]
    apart = (values - values.mean(axis=0, keepdims=True)) ** 2
    return ((values - targets[None]) ** 2 - strength * apart).mean(axis=0)
