"""Benchmark of `apply` and `predict` against programs written by hand, such as `jit(vmap(apply))`.

    python -m benchmarks.predict_pace

The ensemble has eight MLPs 784-512-512-10, and the batches of 1, 32 and 1024 examples are on the
device. Both are timed in interleaved rounds. A ratio is the time of the program written by hand
over that of dist_ens, so dist_ens is faster if it is above 1. The median and the range over the
rounds are printed.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import dist_ens as de
from dist_ens.models.mlp import mlp
from launch import cli

_TURNS, _TURN_SECS = 15, 0.2


def main() -> None:
    """Prints a line with the ratio for each function and batch size."""
    member = mlp((784,), 10, hidden_sizes=(512, 512))
    layout = de.Layout.make(8, devices=jax.devices()[:1])
    ensemble = de.Ensemble(
        member, optax.adam(1e-3), de.losses.categorical(10), num_members=8, layout=layout
    )
    state = ensemble.init({"inputs": np.zeros((1, 784), np.float32)})
    outputs_by_hand = jax.jit(
        jax.vmap(lambda params, x: member.apply(params, (), x, None, False)[0], in_axes=(0, None))
    )

    @jax.jit
    def prediction_by_hand(params: Any, x: jax.Array) -> Any:
        members = jax.nn.softmax(outputs_by_hand(params, x))
        mean = members.mean(axis=0)
        total = -jnp.sum(jax.scipy.special.xlogy(mean, mean), axis=-1)
        aleatoric = -jnp.sum(jax.scipy.special.xlogy(members, members), axis=-1).mean(axis=0)
        return mean, total, aleatoric, total - aleatoric, members

    for size in (1, 32, 1024):
        x = jax.random.normal(jax.random.key(0), (size, 784))
        ways = {
            "apply": (
                lambda x=x: ensemble.apply(state, x),
                lambda x=x: outputs_by_hand(state.params, x),
            ),
            "predict": (
                lambda x=x: ensemble.predict(state, x),
                lambda x=x: prediction_by_hand(state.params, x),
            ),
        }
        for name, (ours, by_hand) in ways.items():
            ratios = _ratios(ours, by_hand)
            print(
                f"{name}, batch {size}: {statistics.median(ratios):.3f} "
                f"({min(ratios):.3f} to {max(ratios):.3f})"
            )


def _ratios(ours: Callable[[], Any], by_hand: Callable[[], Any]) -> list[float]:
    """Returns the ratio of the times in each round, by hand over dist_ens."""
    counts = [_calls_of_a_turn(way) for way in (ours, by_hand)]
    ratios = []
    for _ in range(_TURNS):
        secs = [_secs(way, count) for way, count in zip((ours, by_hand), counts, strict=True)]
        ratios.append(secs[1] / secs[0])
    return ratios


def _calls_of_a_turn(way: Callable[[], Any]) -> int:
    _secs(way, 3)
    return max(3, int(_TURN_SECS / _secs(way, 3)))


def _secs(way: Callable[[], Any], count: int) -> float:
    """Returns the mean seconds of one call. The result of each call is waited for."""
    started = time.perf_counter()
    for _ in range(count):
        jax.block_until_ready(way())
    return (time.perf_counter() - started) / count


if __name__ == "__main__":
    cli.run(main)
