"""Members made from `flax.linen` modules."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.errors
import flax.linen as nn
import jax

from dist_ens.errors import UserError
from dist_ens.members.member import Member, require_parameters
from dist_ens.members.modes import (
    Layers,
    idle_layers_of,
    may_have_switch,
    on_one_column,
    switch_arguments,
    switches,
)
from dist_ens.types import Inputs, Key, ModelState, Outputs, Params, PyTree

# Fields of flax's layers that hold a dropout rate.
_RATES = ((nn.Dropout, "rate"), (nn.MultiHeadDotProductAttention, "dropout_rate"))


def from_linen(module: nn.Module, streams: tuple[str, ...] = ("dropout",)) -> Member:
    """Returns a member made from a flax.linen module.

    Every collection of variables except `params` is model state. A switch between training and
    evaluation is set if it has a usual name (see `dist_ens.members.modes`). It may be an argument
    of `__call__` or a field of the module. `self.has_rng("dropout")` is True if the module should
    draw random numbers, in training or not.

    Args:
        module: Network, an unbound module. It is called with one batch of inputs.
        streams: Names of the random streams that the network draws from.

    Returns:
        The member. Its model state is a dict of collections, such as `batch_stats`.

    >>> member = from_linen(nn.Dense(2, kernel_init=nn.initializers.ones))
    >>> params, model_state = member.init(jax.random.key(0), jax.numpy.zeros((1, 3)))
    >>> member.apply(params, model_state, jax.numpy.array([[1.0, 2.0, 3.0]]), None, False)[0]
    Array([[6., 6.]], dtype=float32)
    """
    fields = {
        name
        for name in switches(True)
        if isinstance(getattr(module, name, 0), bool | None) and name in module.__dict__
    }
    call = type(module).__call__
    in_call = switch_arguments(call, True)

    def mode(train: bool) -> tuple[nn.Module, dict[str, Any]]:
        """Returns the module with its fields set, and the arguments of its call."""
        values = switches(train)
        own: dict[str, Any] = {name: values[name] for name in fields - in_call.keys()}
        return module.clone(**own) if own else module, switch_arguments(call, train)

    def rngs_of(key: Key | None) -> dict[str, jax.Array]:
        if key is None:
            return {}
        return {name: jax.random.fold_in(key, i) for i, name in enumerate(streams)}

    def init(key: Key, inputs: Inputs) -> tuple[Params, ModelState]:
        switched, arguments = mode(False)
        variables = dict(switched.init(key, inputs, **arguments))
        params = variables.pop("params", {})
        require_parameters(params)
        return params, variables

    def apply(
        params: Params, model_state: ModelState, inputs: Inputs, key: Key | None, train: bool
    ) -> tuple[Outputs, ModelState]:
        variables = {"params": params, **model_state}
        switched, arguments = mode(train)
        try:
            if not train:
                outputs = switched.apply(variables, inputs, **arguments, rngs=rngs_of(key))
                return outputs, model_state
            outputs, new_state = switched.apply(
                variables, inputs, **arguments, rngs=rngs_of(key), mutable=list(model_state)
            )
        except flax.errors.InvalidRngError as error:
            remedy = (
                "There is no key in evaluation. Switch dropout off with deterministic=not train or "
                'deterministic=not self.has_rng("dropout").'
                if key is None
                else f"The streams with a key are: {', '.join(streams)}. Name the others too, as "
                'in from_linen(module, streams=("dropout", "noise")).'
            )
            named = re.search(r'"\w+"', str(error))
            stream = f" of the stream {named[0]}" if named else ""
            raise UserError(
                f"The network draws random numbers{stream} without a key. {remedy}"
            ) from error
        return outputs, dict(new_state)

    def layers(params: Params, model_state: ModelState, inputs: Inputs, axis_name: str) -> Layers:
        """Returns the called layers that compute other results in training than in evaluation."""
        dropping: dict[str, None] = {}
        counting: dict[str, None] = {}
        switched: list[bool] = []

        def note(
            call: Callable[..., PyTree],
            args: tuple[PyTree, ...],
            kwargs: dict[str, PyTree],
            context: nn.module.InterceptorContext,
        ) -> PyTree:
            layer = context.module
            if layer.scope is None:  # The module is not part of the network.
                return call(*args, **kwargs)
            name = "/".join(layer.path) or type(layer).__name__
            if any(isinstance(layer, kind) and getattr(layer, rate) for kind, rate in _RATES):
                dropping[name] = None
            statistics = layer.variables.get("batch_stats", {}).values()
            if not all(isinstance(value, Mapping) for value in statistics):
                counting[name] = None
            if not type(layer).__module__.startswith("flax."):
                switched.append(may_have_switch(layer))
            return call(*args, **kwargs)

        def forward(params: Params, model_state: ModelState, inputs: Inputs, key: Key) -> PyTree:
            with nn.intercept_methods(note):
                return apply(params, model_state, inputs, key, True)

        key = jax.eval_shape(lambda: jax.random.key(0))
        jax.eval_shape(on_one_column(forward, axis_name), params, model_state, inputs, key)
        return Layers([*dropping], [*counting], any(switched))

    name = type(module).__name__
    return Member(init, apply, idle_layers_of(apply, layers), name, is_module=True)
