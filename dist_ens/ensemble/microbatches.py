"""The loss of a batch in equal parts, one after another, and its gradient."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from dist_ens.ensemble.checks import check_microbatches
from dist_ens.ground.types import Gradients, Metrics, ModelState, Params, PyTree
from dist_ens.losses.averaging import Ratio, averaged

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
    check_microbatches(count, examples)
    parts = jax.tree.map(
        lambda leaf: leaf.reshape(-1, count, *leaf.shape[1:]).swapaxes(0, 1), examples
    )
    return parts, jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(count))
