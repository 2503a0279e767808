"""Members made from `flax.linen` modules."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.errors
import flax.linen as nn
import jax

from dist_ens.ground.errors import UserError
from dist_ens.ground.types import Inputs, Key, ModelState, Outputs, Params, PyTree
from dist_ens.members.member import Member, require_parameters
from dist_ens.members.modes import (
    given_arguments,
    input_arguments,
    switch_arguments,
    switches,
)

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
    network = _Linen(module, streams)
    return Member(
        network.init,
        network.apply,
        type(module).__name__,
        sample=functools.partial(network.forward, streams=()),
        takes_given=True,
        parts_of=network.parts_of,
        adapt_loss=_of_unboxed,
    )


class _Linen:
    """The functions of a member that is a flax.linen module; see `from_linen`."""

    def __init__(self, module: nn.Module, streams: tuple[str, ...]) -> None:
        self._module, self._streams = module, streams
        self._call = type(module).__call__
        in_call = switch_arguments(self._call, True)
        self._fields = [
            name
            for name in switches(True)
            if isinstance(getattr(module, name, 0), bool | None)
            and name in module.__dict__
            and name not in in_call
        ]

    def _applied(
        self,
        method: str,
        train: bool,
        first: object,
        inputs: Inputs,
        given: Mapping[str, PyTree],
        **others: object,
    ) -> Any:
        """Calls `init` or `apply` of the module with a first argument, its switches set."""
        values = switches(train)
        fields: dict[str, Any] = {name: values[name] for name in self._fields}
        module = self._module.clone(**fields) if fields else self._module
        args, named = input_arguments(self._call, inputs)
        mode = {**switch_arguments(self._call, train), **given_arguments(self._call, given)}
        return getattr(module, method)(first, *args, **named, **mode, **others)

    def init(self, key: Key, inputs: Inputs, **given: PyTree) -> tuple[Params, ModelState]:
        # Names of mesh axes in the variables are rules for the layout. Flax requires such a mesh.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            variables = dict(self._applied("init", False, key, inputs, given))
        params = variables.pop("params", {})
        require_parameters(params)
        return params, {
            name: _unboxed(held)
            for name, held in variables.items()
            if name not in (_LOSSES, "perturbations") and not _is_sown(held)
        }

    def parts_of(self, params: Params, model_state: ModelState | None) -> tuple[Params, ModelState]:
        if model_state is None and "params" in params:  # All variables, as `init` returns them.
            params, model_state = params["params"], {n: params[n] for n in params if n != "params"}
        return params, {} if model_state is None else model_state

    def apply(
        self,
        params: Params,
        model_state: ModelState,
        inputs: Inputs,
        key: Key | None,
        train: bool,
        **given: PyTree,
    ) -> tuple[Outputs, ModelState]:
        return self.forward(params, model_state, inputs, key, train, self._streams, **given)

    def forward(
        self,
        params: Params,
        model_state: ModelState,
        inputs: Inputs,
        key: Key | None,
        train: bool,
        streams: tuple[str, ...],
        **given: PyTree,
    ) -> tuple[Outputs, ModelState]:
        rngs = {}
        if key is not None:
            rngs = {name: jax.random.fold_in(key, i) for i, name in enumerate(streams)}
            # The module draws from this stream in place of one that is not there.
            rngs["params"] = jax.random.fold_in(key, len(self._streams))
        variables = _unboxed({"params": params, **model_state})
        try:
            if not train:
                return self._applied(
                    "apply", train, variables, inputs, given, rngs=rngs
                ), model_state
            outputs, new_state = self._applied(
                "apply", train, variables, inputs, given, rngs=rngs, mutable=[*model_state, _LOSSES]
            )
        except flax.errors.InvalidRngError as error:
            if '"dropout"' not in str(error):
                raise
            raise UserError(
                "The network draws dropout without a key, which evaluation does not have. Switch "
                "it off with deterministic=not train."
            ) from error
        if _LOSSES in new_state:
            raise UserError(
                "The network sows losses, which an objective does not add. Give a loss function "
                f"that calls the network with mutable={[*model_state, _LOSSES]} and adds them."
            )
        return outputs, dict(new_state)


def _unboxed(tree: PyTree) -> PyTree:
    """Returns the arrays of variables that have names of mesh axes, without these names."""
    return jax.tree.map(
        lambda node: node.unbox(apply_constraint=False) if _is_box(node) else node,
        tree,
        is_leaf=_is_box,
    )


def _is_box(node: object) -> bool:
    return isinstance(node, nn.Partitioned)


def _of_unboxed(loss: Callable[..., PyTree]) -> Callable[..., PyTree]:
    """Returns a loss whose parameters and model state may have names of mesh axes."""

    def unboxed(params: Params, model_state: ModelState, *args: PyTree, **named: PyTree) -> PyTree:
        return loss(_unboxed(params), _unboxed(model_state), *args, **named)

    return unboxed


def _is_sown(collection: PyTree) -> bool:
    """Returns whether a collection holds values of `sow`, which are tuples."""
    leaves = jax.tree.leaves(collection, is_leaf=lambda node: isinstance(node, tuple))
    return any(isinstance(leaf, tuple) for leaf in leaves)
