"""The loss of a batch in equal parts, its gradient, and a comparison with that of the whole."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.ensemble.batches import CallBatches, as_batches, one_step, rows_of
from dist_ens.ensemble.memory import compiled_if_small
from dist_ens.ensemble.own_step import OwnStep
from dist_ens.ensemble.update_steps import batches_of_wave, steps_of_all
from dist_ens.execution.spec import Execution
from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.randomness import key_of_step, pinned_generator
from dist_ens.ground.shared import Shared
from dist_ens.ground.state import State, described
from dist_ens.ground.types import Batch, Gradients, Metrics, ModelState, Params, PyTree
from dist_ens.layout import Waves, to_host
from dist_ens.losses.averaging import Ratio, averaged

if TYPE_CHECKING:
    from dist_ens.ensemble.ensemble import Ensemble

# Number of draws of each loss, since dropout and other noise are drawn for each part anew.
_DRAWS = 8
# Differences that are rounding, relative to the loss, or noise, in standard errors.
_ROUNDING, _NOISE = 1e-3, 8.0

# loss(params, model_state, examples, key) -> (value, (model_state, metrics)); a value or a metric
# is a number or a `Ratio`.
Loss = Callable[..., PyTree]


def gradients_in_parts(
    loss: Loss,
    count: int,
    params: Params,
    model_state: ModelState,
    examples: PyTree,
    key: jax.Array,
) -> tuple[Gradients, ModelState, Metrics]:
    """Returns the gradients, the new model state and the metrics of a batch.

    Numbers and gradients are means over the parts, and totals and weights of a `Ratio` are sums. So
    a mean over the examples and a `Ratio` are those of the whole batch. Batch statistics are those
    of each part. The model state passes from part to part.

    The differentiated value is a part's share of the value of the batch. So a backward pass that
    changes the gradient of each example, for example to clip it, is given that of the batch.

    Part k of `count` holds the examples k, k + count, …, so that each part is spread over all
    columns of the mesh, and is the same on every mesh. Each part has a key of its own.
    """
    numbered = parts_of(count, examples, key)

    def weight_of(part: tuple[PyTree, jax.Array]) -> jax.Array:
        value, _ = loss(params, model_state, *part)
        return value.weight if isinstance(value, Ratio) else jnp.float32(1)

    # The compiler drops the operations of this forward pass on which the weights do not depend.
    weight = jax.lax.map(weight_of, numbered).sum()
    weight = jnp.where(weight == 0, 1, weight)

    def share(
        params: Params, model_state: ModelState, part: tuple[PyTree, jax.Array]
    ) -> tuple[jax.Array, PyTree]:
        value, rest = loss(params, model_state, *part)
        return (value.total if isinstance(value, Ratio) else value) / weight, rest

    def of_part(model_state: ModelState, part: tuple[PyTree, jax.Array]) -> tuple[PyTree, PyTree]:
        grads, (model_state, metrics) = jax.grad(share, has_aux=True)(params, model_state, part)
        return model_state, (grads, metrics)

    def add(carry: PyTree, part: tuple[PyTree, jax.Array]) -> tuple[PyTree, None]:
        model_state, more = of_part(carry[0], part)
        return (model_state, jax.tree.map(jnp.add, carry[1], more)), None

    first = jax.tree.map(lambda leaf: leaf[0], numbered)
    _, shapes = jax.eval_shape(of_part, model_state, first)
    nothing = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    (model_state, (grads, sums)), _ = jax.lax.scan(add, (model_state, nothing), numbered)
    metrics = {
        name: averaged(value) if isinstance(value, Ratio) else value / count
        for name, value in sums.items()
    }
    return grads, model_state, metrics


def parts_of(count: int, examples: PyTree, key: jax.Array) -> tuple[PyTree, jax.Array]:
    """Returns the parts of a batch, leaves [parts, batch / parts, ...], and a key of each."""
    rows = rows_of(examples)
    if rows is None or rows % count:
        given = described(examples) if rows is None else counted(rows, "example")
        raise UserError(
            f"microbatches={count} must divide the rows of a batch, which has {given}. Use a "
            "divisor."
        )
    parts = jax.tree.map(
        lambda leaf: leaf.reshape(-1, count, *leaf.shape[1:]).swapaxes(0, 1), examples
    )
    return parts, jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(count))


def microbatch_warning(
    ensemble: "Ensemble", state: State, batches: CallBatches | PyTree
) -> str | None:
    """Returns a warning if the loss of the first batch is not the mean over its microbatches.

    It is None if both are equal up to rounding and noise, or if the whole batch would need more
    than half of the free memory of a device.
    """
    step, count, layout = ensemble.programs.gradient_step, ensemble.microbatches, ensemble.layout
    if count == 1 or isinstance(step, OwnStep):
        return None
    if ensemble.waves > 1:
        waves = Waves(layout, ensemble.waves)
        of_first = batches_of_wave(waves, batches, 0)
        return microbatch_warning(ensemble.of_wave, waves.take(state, 0), of_first)

    @pinned_generator()
    def losses(
        state: State, batch: Batch, index: jax.Array | None, shared: Shared
    ) -> tuple[State, Metrics]:
        loss, examples = step.loss_of(state, shared), (batch, index)

        def of_part(
            model_state: ModelState, part: tuple[PyTree, jax.Array]
        ) -> tuple[ModelState, Ratio]:
            value, (model_state, _) = loss(state.params, model_state, *part)
            return model_state, value if isinstance(value, Ratio) else Ratio(value, jnp.float32(1))

        def draw(key: jax.Array) -> Metrics:
            whole, _ = loss(state.params, state.model_state, examples, key)
            parts = parts_of(count, examples, key)
            _, values = jax.lax.scan(of_part, state.model_state, parts)
            of_parts = Ratio(values.total.sum(), values.weight.sum())
            return {"whole": averaged(whole), "parts": averaged(of_parts)}

        key = key_of_step(state.key, state.step)
        # A program has no use for the state that a step returns.
        rest = state._replace(params=(), model_state=(), opt_state=(), failures=())
        return rest, jax.lax.map(draw, jax.random.split(key, _DRAWS))

    # The members of a device run one after another, so that it needs the memory of one member only.
    of_all = steps_of_all(losses, layout, Execution(members="map"))
    first = jax.jit(
        lambda state, batches: of_all(state, one_step(as_batches(batches), jnp.int32(0)))[1]
    )
    batches = ensemble.programs.with_shared(batches)
    program = compiled_if_small(first, layout, state, batches)
    if program is None:
        return None
    found = to_host(program(state, batches))
    whole, parts = (found[name][0].astype(np.float64) for name in ("whole", "parts"))
    return _warning(whole, parts, count)


def _warning(whole: np.ndarray, parts: np.ndarray, count: int) -> str | None:
    """Returns the warning about losses of members and draws, float64[members, draws]."""
    differences = whole - parts
    noise = np.sqrt(differences.var(axis=1, ddof=1).mean() / differences.size)
    if not abs(differences.mean()) > _ROUNDING * np.abs(whole).mean() + _NOISE * noise:
        return None  # So it is for NaN, to which a policy for failures responds.
    return (
        f"The loss of the first batch is {whole.mean():.5g} as a whole, and {parts.mean():.5g} as "
        f"the mean over its {count} microbatches, so its members learn from another loss. Return a "
        "weighted mean as batch_mean(values, weights, ratio=True). A sum, a loss over pairs and "
        "batch statistics depend on the size of the batch: set microbatches=1, or accept the "
        "loss of the parts."
    )
