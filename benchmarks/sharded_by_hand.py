"""Benchmark of members that devices share against a loop of fully sharded training by hand.

    python -m benchmarks.sharded_by_hand

Two transformers are trained on a mesh of 2 x 2 x 2 simulated CPU devices, one in each row. By hand,
each row is a `Mesh` of the axes "data" and "model", and its step is a `jit` with a `NamedSharding`
for each array: the parameters and the moments of Adam are divided along their longest axis, and the
batch over both axes. The whole parameters are gathered in each of the two passes. Both programs are
compiled for the same shapes. FLOPs, bytes and gathered bytes are those of one device and step, from
the compiled programs. Times are of steps in interleaved rounds. A ratio is dist_ens over by hand.
Then the FLOPs of all devices of a row are compared with those of one device, with `fsdp` and with
rules that divide the attention and the layers of the blocks.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import dist_ens as de
from dist_ens.ensemble.update_steps import dispatched
from dist_ens.execution.spec import Execution
from dist_ens.layout import BATCHES
from dist_ens.layout.rows import layout_of_row
from dist_ens.members import Member
from dist_ens.plan.collectives import collectives
from launch import cli

_ROWS, _COLUMNS, _MODEL_AXIS = 2, 2, 2
_LENGTH, _VOCABULARY, _BATCH = 64, 64, 32
_ROUNDS, _STEPS = 10, 5
_RULES = [
    *((f"*/{name}/kernel", (None, "model")) for name in ("query", "key", "value")),
    ("*/out/kernel", ("model",)),
    ("_Block_*/Dense_0/kernel", (None, "model")),
    ("_Block_*/Dense_0/bias", ("model",)),
    ("_Block_*/Dense_1/kernel", ("model",)),
]


def main() -> None:
    """Prints the line of each quantity."""
    devices = _ROWS * _COLUMNS * _MODEL_AXIS
    jax.config.update("jax_num_cpu_devices", devices)
    member = de.models.transformer(
        (_LENGTH,), _VOCABULARY, num_blocks=4, width=256, num_heads=4, mlp_size=1024
    )
    optimizer = optax.adam(1e-3)
    random = np.random.default_rng(0)
    batch = {
        name: random.integers(0, _VOCABULARY, (_BATCH, _LENGTH)) for name in ("inputs", "labels")
    }
    layout = de.Layout.make(_ROWS, ensemble_axis=_ROWS, model_axis=_MODEL_AXIS)
    ensemble = de.Ensemble(
        member, optimizer, de.losses.categorical(_VOCABULARY), num_members=_ROWS, layout=layout
    )
    by_hand = [_by_hand(member, optimizer, batch, grid) for grid in layout.mesh.devices]
    ours, theirs = _program_of_row(ensemble, batch), by_hand[0][0].lower(*by_hand[0][1:]).compile()
    ids = layout_of_row(layout, 0, 1).mesh.device_ids
    print("| of a device and step | dist_ens | by hand | ratio |\n| --- | --- | --- | --- |")
    for name in ("flops", "bytes accessed"):
        _print_row(name, *(_costs(program)[name] for program in (ours, theirs)))
    for name in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all"):
        _print_row(f"bytes of {name}", *(_moved(program, ids, name) for program in (ours, theirs)))
    peak = (program.memory_analysis().temp_size_in_bytes for program in (ours, theirs))
    _print_row("temporary bytes", *peak)

    on_one = ensemble.replace(
        layout=de.Layout.make(_ROWS, devices=jax.devices()[:1]), execution="loop"
    )
    alone = _costs(_program_of_row(on_one, batch))["flops"]
    for name, rules in (("fsdp", "fsdp"), ("rules", _RULES)):
        divided = de.Layout.make(
            _ROWS, ensemble_axis=_ROWS, model_axis=_MODEL_AXIS, model_rules=rules
        )
        flops = _costs(_program_of_row(ensemble.replace(layout=divided), batch))["flops"]
        print(f"FLOPs of a row over those of one device, {name}: {flops * ids.size / alone:.4f}")

    state = [ensemble.init(batch)]

    def step_of_ensemble() -> Any:
        state[0], metrics = ensemble.update(state[0], batch)
        return metrics["loss"]

    states = [each[1] for each in by_hand]

    def step_by_hand() -> Any:
        losses = []
        for row, (step, _, placed) in enumerate(by_hand):
            states[row], loss = step(states[row], placed)
            losses.append(loss)
        return losses

    ratios = _ratios(step_of_ensemble, step_by_hand)
    print(
        f"time of a step: ratio {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}) in {_ROUNDS} rounds of {_STEPS} steps"
    )


def _by_hand(member: Member, optimizer: Any, batch: Any, grid: np.ndarray) -> tuple[Any, Any, Any]:
    """Returns the jitted step of one row, its state and its batch."""
    mesh = Mesh(grid, ("data", "model"))
    examples = NamedSharding(mesh, PartitionSpec(("data", "model")))

    def sharding_of(leaf: Any) -> NamedSharding:
        axes = [k for k, length in enumerate(leaf.shape) if length % _MODEL_AXIS == 0 and length]
        if not axes:
            return NamedSharding(mesh, PartitionSpec())
        longest = max(axes, key=lambda k: leaf.shape[k])
        return NamedSharding(mesh, PartitionSpec(*[None] * longest, "model"))

    def init(key: jax.Array) -> Any:
        params, _ = member.init(key, batch["inputs"])
        return params, optimizer.init(params)

    key = jax.random.key(0)
    shardings = jax.tree.map(sharding_of, jax.eval_shape(init, key))
    state = jax.jit(init, out_shardings=shardings)(key)
    whole = NamedSharding(mesh, PartitionSpec())

    def is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
        return primitive.name != "sharding_constraint"

    @partial(jax.checkpoint, policy=is_kept)
    def loss_of(params: Any, batch: Any) -> jax.Array:
        def gathered(leaf: jax.Array) -> jax.Array:
            # Without the first constraint, the compiler gathers once and keeps the whole arrays.
            leaf = jax.lax.with_sharding_constraint(leaf, sharding_of(leaf))
            return jax.lax.with_sharding_constraint(leaf, whole)

        logits, _ = member.apply(jax.tree.map(gathered, params), {}, batch["inputs"], None, False)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    @partial(jax.jit, donate_argnums=0, out_shardings=(shardings, whole))
    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    return step, state, jax.device_put(batch, examples)


def _program_of_row(ensemble: de.Ensemble, batch: Any) -> Any:
    """Returns the compiled update of one row."""
    row = layout_of_row(ensemble.layout, 0, num_members=1)
    alone = ensemble.replace(layout=row, num_members=1, execution="loop")
    update: Any = dispatched(alone.programs.step, row, Execution.parse("unroll"), of_one=True)
    batches = row.put({name: jnp.asarray(leaf)[None] for name, leaf in batch.items()}, BATCHES)
    state = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf[0], state))(alone.init(batch))
    return update.lower(state, batches).compile()


def _costs(program: Any) -> dict[str, float]:
    return program.cost_analysis()


def _moved(program: Any, ids: np.ndarray, kind: str) -> int:
    return sum(each.bytes for each in collectives(program.as_text(), ids) if each.kind == kind)


def _print_row(name: str, ours: float, theirs: float) -> None:
    ratio = f"{ours / theirs:.4f}" if theirs else ""
    print(f"| {name} | {ours:,.0f} | {theirs:,.0f} | {ratio} |")


def _ratios(ours: Callable[[], Any], theirs: Callable[[], Any]) -> list[float]:
    """Returns the time of our steps over that of theirs, in each of several rounds."""
    found = []
    for number in range(_ROUNDS + 1):  # The first round compiles.
        secs = []
        order = (ours, theirs) if number % 2 else (theirs, ours)
        for step in order:
            started = time.perf_counter()
            for _ in range(_STEPS):
                results = step()
            jax.block_until_ready(results)
            secs.append(time.perf_counter() - started)
        if number:
            found.append(secs[0] / secs[1] if number % 2 else secs[1] / secs[0])
    return found


if __name__ == "__main__":
    cli.run(main)
