"""Statistics of each prediction of a classifier, from which its scores are computed."""

import math

import jax
import jax.numpy as jnp

from dist_ens.metrics.calibration_error import NUM_BINS
from dist_ens.metrics.pooling import log_mean_exp, mean_of_members

_TOP = 5


def credit(log_probs: jax.Array, labels: jax.Array, k: int = 1) -> jax.Array:
    """Returns the probability that the label is among the k most probable classes, float32[...].

    Ties are broken at random, so a label that is tied with other classes counts in part:

        credit = clip((k - number of more probable classes) / number of tied classes, 0, 1)

    The label itself is one of the tied classes. Without ties the credit is 0 or 1. It is 0 for a
    label outside the range, and NaN where `log_probs`, float[..., classes], has a NaN.

    >>> log_probs = jnp.log(jnp.array([[0.5, 0.5], [0.75, 0.25]]))
    >>> credit(log_probs, jnp.array([1, 1])).tolist()
    [0.5, 0.0]
    """
    of_label = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)
    more_probable = (log_probs > of_label).sum(axis=-1)
    tied = (log_probs == of_label).sum(axis=-1)
    share = jnp.clip((k - more_probable) / jnp.maximum(tied, 1).astype(jnp.float32), 0, 1)
    share = jnp.where(tied == 0, 0.0, share)
    return jnp.where(jnp.isnan(log_probs).any(axis=-1), jnp.nan, share)


def classification_values(log_probs: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
    """Computes the statistics of each prediction from which the scores are computed.

        nll = -log p(label),  brier = sum_c (p(c) - [c = label])^2,  confidence = max_c p(c)

    Args:
        log_probs: Normalised log-probabilities, in nats; float[..., classes].
        labels: Classes; int[...], in [0, classes).

    Returns:
        Statistics by name, float32[...] each: `nll` in nats, `brier` in [0, 2], `confidence` in
        [0, 1], `entropy` in nats, `label`, `prediction`, the first of the most probable classes,
        and `correct`, the `credit` of the label, in [0, 1]. With more than 5 classes also `top_5`,
        the credit among 5 classes.

    >>> values = classification_values(jnp.log(jnp.array([0.75, 0.25])), jnp.array(0))
    >>> round(float(values["brier"]), 4), float(values["correct"])  # 0.25**2 + 0.25**2
    (0.125, 1.0)
    """
    log_probs = log_probs.astype(jnp.float32)
    probs, num_classes = jnp.exp(log_probs), log_probs.shape[-1]
    of_label = jnp.take_along_axis(log_probs, labels[..., None], axis=-1)
    values = {
        "nll": -of_label[..., 0],
        "brier": jnp.square(probs - jax.nn.one_hot(labels, num_classes)).sum(axis=-1),
        "confidence": probs.max(axis=-1),
        "entropy": entropy(log_probs),
        "label": labels.astype(jnp.float32),
        "prediction": log_probs.argmax(axis=-1).astype(jnp.float32),
        "correct": credit(log_probs, labels),
    }
    if num_classes > _TOP:
        values["top_5"] = credit(log_probs, labels, _TOP)
    return values


def votes_of(log_probs: jax.Array) -> jax.Array:
    """Returns the vote of a prediction: 1 for its most probable class, 0 for the others.

    Tied most probable classes share the vote equally, which is the expectation when ties are broken
    at random. Votes are NaN where a prediction has a NaN.

    >>> votes_of(jnp.log(jnp.array([0.4, 0.2, 0.4]))).tolist()
    [0.5, 0.0, 0.5]
    """
    is_top = log_probs == log_probs.max(axis=-1, keepdims=True)
    votes = is_top / is_top.sum(axis=-1, keepdims=True).astype(jnp.float32)
    return jnp.where(jnp.isnan(log_probs).any(axis=-1, keepdims=True), jnp.nan, votes)


def diversity_values(
    member_log_probs: jax.Array,
    member_aleatoric: jax.Array | None = None,
    weights: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Computes the diversity of the members in each prediction.

        aleatoric          = mean_m H(p_m),  with samples s of each member mean_m mean_s H(p_ms)
        mutual_information = H(mean_m p_m) - aleatoric,  the epistemic part of the entropy
        disagreement       = share of pairs of members that choose different classes
        variance           = mean_m sum_c (p_m(c) - mean_m p_m(c))^2

    Args:
        member_log_probs: Normalised log-probabilities, in nats; float[members, ..., classes].
        member_aleatoric: Mean entropy of each member's samples, in nats; float[members, ...].
            Default: members have no samples.
        weights: Weights of the members, with sum 1; float[members]. Means are then weighted, and a
            pair of members counts by the product of their weights. Default: equal weights.

    Returns:
        Statistics by name, float32[...] each; the first two are in nats. The diversity of a single
        member without samples is 0. Among tied classes a member chooses the first, so equal members
        never disagree.

    >>> values = diversity_values(jnp.log(jnp.array([[1.0, 0.0], [0.0, 1.0]])))
    >>> {name: round(float(value), 4) for name, value in values.items() if name != "aleatoric"}
    {'mutual_information': 0.6931, 'disagreement': 1.0, 'variance': 0.5}

    Source: Depeweg et al. (2018), https://arxiv.org/abs/1710.07283, for the entropies; Lakshmi-
    narayanan et al. (2017), for the variance as a disagreement.
    """
    member_log_probs = member_log_probs.astype(jnp.float32)
    members = len(member_log_probs)
    if member_aleatoric is None:
        member_aleatoric = entropy(member_log_probs)
    aleatoric = mean_of_members(member_aleatoric, weights)
    probs = jnp.exp(member_log_probs)
    choices = jax.nn.one_hot(member_log_probs.argmax(axis=-1), probs.shape[-1])
    if weights is None:
        choices = choices.sum(axis=0)
        agreeing = (choices * (choices - 1)).sum(axis=-1) / max(1, members * (members - 1))
    else:
        alone = jnp.square(weights).sum()  # A member is no pair with itself.
        pairs = jnp.square(mean_of_members(choices, weights)).sum(axis=-1) - alone
        agreeing = jnp.where(alone < 1, pairs / jnp.where(alone < 1, 1 - alone, 1), 1)
    agreeing = jnp.where(jnp.isnan(aleatoric), jnp.nan, agreeing)
    return {
        "aleatoric": aleatoric,
        "mutual_information": entropy(mixture_log_probs(member_log_probs, weights)) - aleatoric,
        "disagreement": 1 - agreeing if members > 1 else jnp.zeros_like(aleatoric),
        "variance": mean_of_members(
            jnp.square(probs - mean_of_members(probs, weights)[None]).sum(axis=-1), weights
        ),
    }


def classwise_sums(log_probs: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """Sums the statistics of a batch from which `classwise_calibration_error` is computed.

    Args:
        log_probs: Normalised log-probabilities, in nats; float[batch, ..., classes].
        labels: Classes; int[batch, ...], in [0, classes).
        mask: Mask of the examples that count, bool[batch]; or weights, not negative,
            float[batch, ...].

    Returns:
        Sums by bin of the class's probability, float32[4, classes, NUM_BINS]: the number of
        predictions, the number of labels of the class (hits), the probabilities, and the squares of
        each example's hits minus probabilities.

    >>> sums = classwise_sums(jnp.log(jnp.array([[0.75, 0.25]])), jnp.array([0]), jnp.array([True]))
    >>> sums[:3].sum(axis=-1).round(4).tolist()  # count, hits and probabilities of each class
    [[1.0, 1.0], [1.0, 0.0], [0.75, 0.25]]
    """
    num_classes, positions = log_probs.shape[-1], math.prod(labels.shape[1:])
    probs = jnp.exp(log_probs).reshape(len(labels), positions, num_classes)
    hits = jax.nn.one_hot(labels.reshape(len(labels), positions), num_classes)
    # The bins are [0, 1/15], (1/15, 2/15], …
    bins = jnp.clip(jnp.ceil(probs * NUM_BINS).astype(jnp.int32) - 1, 0, NUM_BINS - 1)
    cells = bins + NUM_BINS * jnp.arange(num_classes)[None, None]
    weights = mask.reshape(len(labels), math.prod(mask.shape[1:]))[..., None]
    gaps = hits - probs
    # The positions of an example are resampled together, so their sum is squared.
    values = (jnp.ones_like(probs), hits, probs, jnp.square(gaps) if positions == 1 else gaps)
    added = jnp.where((weights > 0)[..., None], jnp.stack(values, axis=-1), 0)
    if weights.dtype != bool:
        weights = weights[..., None].astype(added.dtype)
        squared = jnp.square(weights) if positions == 1 else weights
        added *= jnp.concatenate([*[weights] * 3, squared], axis=-1)
    no_sums = jnp.zeros((num_classes * NUM_BINS, 4))
    if positions == 1:
        sums = no_sums.at[cells.ravel()].add(added.reshape(-1, 4))
    else:
        of_examples = jax.vmap(lambda where, what: no_sums.at[where].add(what))(cells, added)
        squares = jnp.square(of_examples[..., 3:]).sum(axis=0)
        sums = jnp.concatenate([of_examples[..., :3].sum(axis=0), squares], axis=1)
    return sums.T.reshape(4, num_classes, NUM_BINS)


def mixture_log_probs(member_log_probs: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Computes the log-probabilities of the mixture of the members, [members, ...].

    Probabilities are averaged, not logits. Without weights the mixture is uniform:

        log p(c | x) = logsumexp_m(log p_m(c | x)) - log(members)

    >>> jnp.exp(mixture_log_probs(jnp.log(jnp.array([[0.25], [0.75]])))).round(4)
    Array([0.5], dtype=float32)

    Source: Lakshminarayanan et al. (2017), https://arxiv.org/abs/1612.01474.
    """
    if len(member_log_probs) == 1:  # As for the one sample of a network without dropout samples.
        return member_log_probs[0]
    return log_mean_exp(member_log_probs, weights)


def entropy(log_probs: jax.Array) -> jax.Array:
    """Computes the entropy in nats of distributions over classes, float[..., classes].

        H(p) = -sum_c p(c) log p(c),  0 log 0 = 0

    >>> round(float(entropy(jnp.log(jnp.array([0.5, 0.5])))), 4)  # log 2
    0.6931
    """
    return -jnp.where(jnp.isneginf(log_probs), 0, jnp.exp(log_probs) * log_probs).sum(axis=-1)
