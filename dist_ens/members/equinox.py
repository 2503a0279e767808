"""Members made from `equinox` modules. Equinox is optional; the extra `[equinox]` installs it."""

import functools
from collections.abc import Callable

import jax

from dist_ens.ground.errors import name_of
from dist_ens.ground.types import (
    Inputs,
    Key,
    KeyPath,
    Leaf,
    ModelState,
    Network,
    Outputs,
    Params,
    PyTree,
)
from dist_ens.members.member import Member, require_parameters
from dist_ens.members.modes import (
    given_arguments,
    input_arguments,
    named_arguments,
    switch_arguments,
    switches,
)


def from_equinox(make: Callable[[Key], Network], *, stateful: bool = False) -> Member:
    """Returns a member made from a function that makes an equinox module.

    Equinox modules are written for a single example. The member vectorises them over the first axis
    of every leaf of the inputs, under the axis name `"batch"`. Floating-point arrays are the
    parameters. A switch between training and evaluation is set if it has a usual name (see
    `dist_ens.members.modes`). It may be an argument of the call, or a field of a module that is not
    static.

    In a loss function `params` is the module itself, with all its fields, and `model_state` its
    `equinox.nn.State`, or None.

    Args:
        make: Function that makes the module from a key, such as `lambda key: Model(key)`. The
            module is called as `module(x)`, or as `module(x, state)` if it is stateful, and with
            `key=key` if its call has this argument. A call of several inputs takes a tuple, or a
            dict by the names of the arguments.
        stateful: Whether the module has an `equinox.nn.State`, as with `equinox.nn.BatchNorm`.

    Returns:
        The member.

    >>> import equinox as eqx
    >>> member = from_equinox(lambda key: eqx.nn.LayerNorm(2))
    >>> params, model_state = member.init(jax.random.key(0), jax.numpy.zeros((1, 2)))
    >>> inputs = jax.numpy.array([[1.0, 3.0]])  # Mean 2, standard deviation 1.
    >>> member.apply(params, model_state, inputs, None, False)[0].round(3)
    Array([[-1.,  1.]], dtype=float32)
    """
    network = _Equinox(make, stateful)
    return Member(
        network.init,
        network.apply,
        name_of(make),
        sample=functools.partial(network.forward, drops=False),
        takes_given=True,
        adapt_loss=network.adapt_loss,
        parts_of=network.parts_of,
    )


class _Equinox:
    """The functions of a member that is an equinox module; see `from_equinox`."""

    def __init__(self, make: Callable[[Key], Network], stateful: bool) -> None:
        import equinox

        self._eqx, self._make, self._stateful = equinox, make, stateful

    def _made(self, key: Key) -> tuple[Network, ModelState]:
        """Returns the module and its state, which is None without one."""
        make = self._eqx.nn.make_with_state(self._make)
        return make(key) if self._stateful else (self._make(key), None)

    def parts_of(self, module: Network, state: ModelState | None) -> tuple[Params, ModelState]:
        """Returns the floating-point arrays of a module, and its other arrays with its state."""
        params, rest = self._eqx.partition(module, self._eqx.is_inexact_array)
        has_others = isinstance(state, tuple)  # As a state of the ensemble has them.
        return params, state if has_others else (self._eqx.filter(rest, self._eqx.is_array), state)

    def init(self, key: Key, inputs: Inputs, **given: PyTree) -> tuple[Params, ModelState]:
        params, model_state = self.parts_of(*self._made(key))
        require_parameters(params)
        return params, model_state

    def _whole(self, params: Params, buffers: Params) -> Network:
        """Returns the module with its fields that are not arrays."""
        static = []
        is_array = self._eqx.is_array
        jax.eval_shape(
            lambda key: static.append(self._eqx.filter(self._made(key)[0], is_array, inverse=True)),
            jax.eval_shape(lambda: jax.random.key(0)),
        )
        return self._eqx.combine(params, buffers, static[0])

    def adapt_loss(self, loss: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def of_parts(
            params: Params, model_state: ModelState, *args: object, **others: object
        ) -> object:
            # A state of equinox may be used once, so each call makes a new one.
            buffers, state = jax.tree.map(lambda leaf: leaf, model_state)
            match loss(self._whole(params, buffers), state, *args, **others):
                case (value, (new_state, aux)):
                    return value, ((buffers, new_state), aux)
                case returned:  # A check of all losses says what is wrong with it.
                    return returned

        return of_parts

    def apply(
        self,
        params: Params,
        model_state: ModelState,
        inputs: Inputs,
        key: Key | None,
        train: bool,
        **given: PyTree,
    ) -> tuple[Outputs, ModelState]:
        drops = key is not None
        return self.forward(params, model_state, inputs, key, train, drops=drops, **given)

    def forward(
        self,
        params: Params,
        model_state: ModelState,
        inputs: Inputs,
        key: Key | None,
        train: bool,
        *,
        drops: bool,
        **given: PyTree,
    ) -> tuple[Outputs, ModelState]:
        nn, (buffers, state) = self._eqx.nn, model_state
        module = _switched(nn.inference_mode(self._whole(params, buffers), not train), train)
        call = type(module).__call__
        # Dropout outside training is switched on in its layers only, not in the network's call.
        mode = switch_arguments(call, train) if train or not drops else {}

        def is_dropout(part: Network) -> bool:
            return isinstance(part, nn.Dropout)

        if drops:
            module = jax.tree.map(
                lambda part: nn.inference_mode(part, False) if is_dropout(part) else part,
                module,
                is_leaf=is_dropout,
            )

        def of_example(
            inputs: Inputs, state: ModelState, key: Key | None
        ) -> tuple[Outputs, ModelState]:
            args, named = input_arguments(call, inputs, others=("key", "state"))
            named |= {**named_arguments(call, key=key), **mode, **given_arguments(call, given)}
            if not self._stateful:
                return module(*args, **named), None
            return module(*args, state, **named) if args else module(state=state, **named)

        num_examples = len(jax.tree.leaves(inputs)[0])
        keys = None if key is None else jax.random.split(key, num_examples)
        outputs, state = jax.vmap(
            of_example, in_axes=(0, None, 0), out_axes=(0, None), axis_name="batch"
        )(inputs, state, keys)
        return outputs, (buffers, state) if train else model_state


def _switched(module: Network, train: bool) -> Network:
    """Returns the module with the switches in its fields set."""
    values = switches(train)

    def of_mode(path: KeyPath, leaf: Leaf) -> Leaf:
        name = getattr(path[-1], "name", None) if path else None
        return values[name] if isinstance(leaf, bool) and name in values else leaf

    return jax.tree_util.tree_map_with_path(of_mode, module)
