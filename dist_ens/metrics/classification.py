"""Scores of classifiers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NUM_BINS = 15


def mixture_log_probs(member_log_probs: jax.Array) -> jax.Array:
    """Log-probabilities of the uniform mixture of the members.

    Probabilities are averaged, not logits:

        log p(c | x) = logsumexp_m(log p_m(c | x)) - log(members)

    Args:
        member_log_probs: Normalised log-probabilities, in nats; float[members, ...].

    Returns:
        Log-probabilities, in nats; float[...]. Those of one member alone are its own.

    >>> jnp.exp(mixture_log_probs(jnp.log(jnp.array([[0.25], [0.75]])))).round(4)
    Array([0.5], dtype=float32)

    Source: Lakshminarayanan et al. (2017), https://arxiv.org/abs/1612.01474.
    """
    return jax.nn.logsumexp(member_log_probs, axis=0) - jnp.log(len(member_log_probs))


def classification_sums(
    log_probs: jax.Array, labels: jax.Array, mask: jax.Array
) -> dict[str, jax.Array]:
    """What a batch adds to the scores.

    Args:
        log_probs: Normalised log-probabilities, in nats; float[batch, ..., classes].
        labels: int[batch, ...], in [0, classes).
        mask: bool[batch]; examples where it is False do not count.

    Returns:
        Sums over the batch, float32: `count`, `correct`, `nll`, `brier`, each []; and by bin of
        confidence `bin_count`, `bin_correct`, `bin_confidence`, each [NUM_BINS].
    """
    weight = jnp.broadcast_to(
        mask.reshape(mask.shape + (1,) * (labels.ndim - mask.ndim)), labels.shape
    ).astype(jnp.float32)
    probs = jnp.exp(log_probs)
    confidence = probs.max(axis=-1)
    correct = (log_probs.argmax(axis=-1) == labels).astype(jnp.float32)
    nll = -jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
    one_hot = jax.nn.one_hot(labels, log_probs.shape[-1])
    brier = jnp.square(probs - one_hot).sum(axis=-1)
    # Bins (0, 1/15], (1/15, 2/15], …
    bins = jnp.clip(jnp.ceil(confidence * NUM_BINS).astype(jnp.int32) - 1, 0, NUM_BINS - 1)
    in_bin = jax.nn.one_hot(bins, NUM_BINS) * weight[..., None]
    axes = tuple(range(labels.ndim))

    def total(values: jax.Array) -> jax.Array:
        return jnp.where(weight > 0, values, 0).sum()  # a masked row may hold anything, NaN too

    return {
        "count": weight.sum(),
        "correct": total(correct),
        "nll": total(nll),
        "brier": total(brier),
        "bin_count": in_bin.sum(axes),
        "bin_correct": (in_bin * correct[..., None]).sum(axes),
        "bin_confidence": jnp.where(in_bin > 0, confidence[..., None], 0).sum(axes),
    }


def classification_scores(sums: dict[str, Any]) -> dict[str, float]:
    """The scores of a split from the sums over its batches.

        accuracy = correct / count
        nll      = -mean log p(label)
        brier    = mean sum_c (p(c) - [c = label])^2,  in [0, 2]
        ece      = sum_b count_b / count * |accuracy_b - confidence_b|

    Args:
        sums: Of `classification_sums`, added over the batches.

    Returns:
        `accuracy` and `ece` in [0, 1], `nll` in nats, `brier` in [0, 2].

    Raises:
        ValueError: If nothing was counted.

    Source: Guo et al. (2017), https://arxiv.org/abs/1706.04599, for the ECE with equal bins; Brier
    (1950), summed over the classes.
    """
    count = float(sums["count"])
    if count == 0:
        raise ValueError("Scores need at least one example. Received: none. Add some.")
    gap = np.abs(np.asarray(sums["bin_correct"]) - np.asarray(sums["bin_confidence"]))
    return {
        "accuracy": float(sums["correct"]) / count,
        "nll": float(sums["nll"]) / count,
        "brier": float(sums["brier"]) / count,
        "ece": float(gap.sum()) / count,
    }
