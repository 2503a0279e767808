"""A member from a `flax.nnx` module."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dist_ens.member.member import Member, require_parameters


def from_nnx(make: Callable[[Any], Any]) -> Member:
    """A member from a function that makes an nnx module, `lambda rngs: Model(rngs=rngs)`.

    `nnx.Param` variables are the parameters, the random streams take the member's key of the step,
    and every other variable is model state. `module.train()` and `module.eval()` set the mode.

    Args:
        make: Makes the module from `nnx.Rngs`; the module is called with one batch.

    Returns:
        The member. Its parameters and model state are `nnx.State`s.
    """
    from flax import nnx  # a third of a second that most networks can do without

    def split(module: nnx.Module) -> Any:
        return nnx.split(module, nnx.Param, nnx.RngState, ...)

    def blueprint(train: bool, draws: bool) -> tuple[Any, Any]:
        """The module without its arrays, and the shapes of its random streams."""
        module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        module.train() if train else module.eval()
        if draws:
            module.set_attributes(nnx.Dropout, deterministic=False, raise_if_not_found=False)
        graph, _, streams, _ = split(module)
        return graph, streams

    def init(key: jax.Array, inputs: jax.Array) -> tuple[Any, Any]:
        _, params, _, model_state = split(make(nnx.Rngs(key)))
        require_parameters(params)
        return params, model_state

    def apply(
        params: Any, model_state: Any, inputs: jax.Array, key: jax.Array | None, train: bool
    ) -> tuple[jax.Array, Any]:
        graph, streams = blueprint(train, draws=key is not None)
        streams = _streams_at(streams, jax.random.key(0) if key is None else key)
        # Variables may only be written where they were made: under the gradient, not outside it.
        fresh_state = jax.tree.map(lambda leaf: leaf, model_state)
        module = nnx.merge(graph, params, streams, fresh_state)
        outputs = module(inputs)
        return outputs, split(module)[3] if train else model_state

    return Member(init, apply)


def _streams_at(streams: Any, key: jax.Array) -> Any:
    """Every random stream of a module, at count zero, with a key of its own from `key`."""
    leaves, structure = jax.tree.flatten(streams)
    fresh = [
        jax.random.fold_in(key, i)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        else jnp.zeros(leaf.shape, leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, fresh)
