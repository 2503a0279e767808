"""A member from a `flax.linen` module."""

import inspect
from typing import Any

import flax.linen as nn
import jax

from dist_ens.member.member import Member, require_parameters


def from_linen(module: nn.Module, streams: tuple[str, ...] = ("dropout",)) -> Member:
    """A member from a linen module: its variables but `params` are the model state.

    The module is called as `module(inputs, train=...)` if it takes `train`, as
    `module(inputs, deterministic=...)` if it takes that, else as `module(inputs)`. Where it is to
    draw without being trained, `self.has_rng("dropout")` says so.

    Args:
        module: The network, unbound.
        streams: Random streams that it draws from when trained.

    Returns:
        The member. Its model state is a dict of collections, such as `batch_stats`.
    """
    arguments = inspect.signature(type(module).__call__).parameters

    def mode(train: bool) -> dict[str, Any]:
        if "train" in arguments:
            return {"train": train}
        return {"deterministic": not train} if "deterministic" in arguments else {}

    def init(key: jax.Array, inputs: jax.Array) -> tuple[Any, Any]:
        variables = dict(module.init(key, inputs, **mode(False)))
        params = variables.pop("params", {})
        require_parameters(params)
        return params, variables

    def apply(
        params: Any, model_state: Any, inputs: jax.Array, key: jax.Array | None, train: bool
    ) -> tuple[jax.Array, Any]:
        variables = {"params": params, **model_state}
        rngs = {
            name: jax.random.fold_in(key, i) for i, name in enumerate(streams) if key is not None
        }
        if not train:
            outputs: Any = module.apply(variables, inputs, **mode(False), rngs=rngs)
            return outputs, model_state
        outputs, new_state = module.apply(
            variables, inputs, **mode(True), rngs=rngs, mutable=list(model_state)
        )
        return outputs, dict(new_state)

    return Member(init, apply)
