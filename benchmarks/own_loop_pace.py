"""Benchmark of hand-written training loops over NumPy batches: `Ensemble.update` and `lift`.

    python -m benchmarks.own_loop_pace

Eight MLPs 64-32-10 take steps of Adam on batches of 128 examples, on one device. The rival is
`jit(vmap(step))` of a step written by hand. All are timed in interleaved rounds. A ratio is the
time of the rival over that of dist_ens, so dist_ens is faster if it is above 1. The median and the
range over the rounds are printed.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import dist_ens as de
from launch import cli

_MEMBERS, _BATCH, _ROUNDS, _STEPS = 8, 128, 20, 2000


def main() -> None:
    """Prints a line for `update` and one for `lift`."""
    mlp = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(10)])
    optimizer = optax.adam(1e-3)
    random = np.random.default_rng(0)
    batches = [
        {
            "inputs": random.normal(size=(_BATCH, 64)).astype(np.float32),
            "labels": random.integers(0, 10, _BATCH),
        }
        for _ in range(20)
    ]

    def init(key: jax.Array) -> Any:
        params = mlp.init(key, jnp.zeros((1, 64)))
        return params, optimizer.init(params)

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state

        def loss_of(params: Any) -> jax.Array:
            logits = mlp.apply(params, batch["inputs"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(gradients, opt_state)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    layout = de.Layout.make(_MEMBERS, devices=jax.devices()[:1])
    ensemble = de.Ensemble(
        mlp, optimizer, de.losses.categorical(10), num_members=_MEMBERS, layout=layout
    )
    keys = jax.random.split(jax.random.key(0), _MEMBERS)
    loops = {
        "by hand": _Loop(
            jax.jit(jax.vmap(step, in_axes=(0, None)), donate_argnums=0),
            jax.jit(jax.vmap(init))(keys),
            batches,
        ),
        "update": _Loop(ensemble.update, ensemble.init(batches[0]), batches),
        "lift": _Loop(
            de.lift(step, layout=layout, in_specs=("members", "batch"), donate_argnums=0),
            layout.init(init, jax.random.key(0)),
            batches,
        ),
    }
    secs: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(_ROUNDS + 1):  # The first round compiles.
        for name, loop in loops.items():
            taken = loop.secs()
            if number:
                secs[name].append(taken)
    for name in ("update", "lift"):
        ratios = [a / b for a, b in zip(secs["by hand"], secs[name], strict=True)]
        print(
            f"{name}: {_STEPS / statistics.median(secs[name]):,.0f} steps/s, "
            f"{statistics.median(ratios):.3f} of jit(vmap) by hand "
            f"({min(ratios):.3f} to {max(ratios):.3f})"
        )


class _Loop:
    """A loop of training steps, which goes on where it ended.

    Args:
        update: Function of a state and a batch that returns the new state and metrics.
        state: First state.
        batches: NumPy batches, which are used in turn.
    """

    def __init__(self, update: Callable[..., Any], state: Any, batches: list[Any]) -> None:
        self._update, self._state, self._batches = update, state, batches

    def secs(self) -> float:
        """Takes some steps, and returns the seconds until the last has been computed."""
        state, started = self._state, time.perf_counter()
        for number in range(_STEPS):
            state, _ = self._update(state, self._batches[number % len(self._batches)])
        jax.block_until_ready(state)
        self._state = state
        return time.perf_counter() - started


if __name__ == "__main__":
    cli.run(main)
