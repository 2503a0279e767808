"""Members made from `flax.linen` modules."""

import functools
from typing import Any

import flax.errors
import flax.linen as nn
import jax

from dist_ens.errors import UserError, first_line
from dist_ens.members.member import Member, require_parameters
from dist_ens.members.modes import (
    input_arguments,
    switch_arguments,
    switches,
)
from dist_ens.state import described
from dist_ens.types import Inputs, Key, ModelState, Outputs, Params, PyTree

# Collection into which linen's modules sow losses, by convention.
_LOSSES = "losses"


def from_linen(module: nn.Module, streams: tuple[str, ...] = ("dropout",)) -> Member:
    """Returns a member made from a flax.linen module.

    Every collection of variables is model state, except `params` and those into which the module
    sows values. A switch between training and evaluation is set if it has a usual name (see
    `dist_ens.members.modes`). It may be an argument of `__call__` or a field of the module.
    `self.has_rng("dropout")` is True if the module should drop units, in training or not.

    Args:
        module: Network, an unbound module. It is called with one batch of inputs. A call of several
            inputs takes a tuple, or a dict by the names of the arguments.
        streams: Names of the random streams for which `has_rng` is True where units are dropped.
            The module may draw from other streams too, in training and where it predicts.

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

    def rngs_of(key: Key | None, names: tuple[str, ...]) -> dict[str, jax.Array]:
        if key is None:
            return {}
        keys = {name: jax.random.fold_in(key, i) for i, name in enumerate(names)}
        # The module draws from this stream in place of one that is not there.
        return keys | {"params": jax.random.fold_in(key, len(streams))}

    def init(key: Key, inputs: Inputs) -> tuple[Params, ModelState]:
        switched, named = mode(False)
        args, by_name = input_arguments(call, inputs)
        variables = dict(switched.init(key, *args, **by_name, **named))
        params = variables.pop("params", {})
        require_parameters(params)
        return params, {
            name: held
            for name, held in variables.items()
            if name not in (_LOSSES, "perturbations") and not _is_sown(held)
        }

    def parts_of(params: Params, model_state: ModelState | None) -> tuple[Params, ModelState]:
        if model_state is None and "params" in params:  # All variables, as `init` returns them.
            params, model_state = params["params"], {n: params[n] for n in params if n != "params"}
        return params, {} if model_state is None else model_state

    def forward(
        params: Params,
        model_state: ModelState,
        inputs: Inputs,
        key: Key | None,
        train: bool,
        names: tuple[str, ...],
    ) -> tuple[Outputs, ModelState]:
        switched, named = mode(train)
        args, by_name = input_arguments(call, inputs)
        called = functools.partial(
            switched.apply,
            {"params": params, **model_state},
            *args,
            **by_name,
            **named,
            rngs=rngs_of(key, names),
        )
        try:
            if not train:
                return called(), model_state
            outputs, new_state = called(mutable=[*model_state, _LOSSES])
        except (
            flax.errors.ScopeCollectionNotFound,
            flax.errors.ScopeVariableNotFoundError,
        ) as error:
            raise UserError(
                f"The model state lacks a variable of the network: {first_line(error)} Give "
                "state_of the model_states of the networks too."
            ) from error
        except flax.errors.InvalidRngError as error:
            if '"dropout"' not in str(error):
                raise
            raise UserError(
                'The network draws random numbers of the stream "dropout" without a key. There is '
                "no key in evaluation. Switch dropout off with deterministic=not train or "
                'deterministic=not self.has_rng("dropout").'
            ) from error
        if _LOSSES in new_state:
            raise UserError(
                f"The network sows losses ({described(new_state[_LOSSES])}), which an objective "
                "does not add. Give a loss function that adds them: it calls the network with "
                f"mutable={[*model_state, _LOSSES]}, and returns the loss and the model state."
            )
        return outputs, dict(new_state)

    def apply(
        params: Params, model_state: ModelState, inputs: Inputs, key: Key | None, train: bool
    ) -> tuple[Outputs, ModelState]:
        return forward(params, model_state, inputs, key, train, streams)

    sample = functools.partial(forward, names=())

    name = type(module).__name__
    return Member(init, apply, name, sample=sample, parts_of=parts_of)


def _is_sown(collection: PyTree) -> bool:
    """Returns whether a collection holds values of `sow`, which are tuples."""

    def is_tuple(node: object) -> bool:
        return isinstance(node, tuple)

    return any(map(is_tuple, jax.tree.leaves(collection, is_leaf=is_tuple)))
