"""Members made from `equinox` modules. Equinox is optional; the extra `[equinox]` installs it."""

from collections.abc import Callable, Iterator

import jax

from dist_ens.errors import UserError
from dist_ens.members.member import Member, require_parameters
from dist_ens.members.modes import (
    Layers,
    idle_layers_of,
    may_have_switch,
    switch_arguments,
    switches,
)
from dist_ens.signatures import name_of
from dist_ens.types import Inputs, Key, KeyPath, Leaf, ModelState, Network, Outputs, Params


def from_equinox(make: Callable[[Key], Network], *, stateful: bool = False) -> Member:
    """Returns a member made from a function that makes an equinox module.

    Equinox modules are written for a single example. The member vectorises them over the first axis
    of every leaf of the inputs, under the axis name `"batch"`. Floating-point arrays are the
    parameters. A switch between training and evaluation is set if it has a usual name (see
    `dist_ens.members.modes`). It may be an argument of the call, or a field of a module that is not
    static.

    Args:
        make: Function that makes the module from a key, such as `lambda key: Model(key)`. The
            module is called as `module(x, key=key)`, or as `module(x, state, key=key)` if it is
            stateful.
        stateful: Whether the module has an `equinox.nn.State`, as with `equinox.nn.BatchNorm`.

    Returns:
        The member.

    Raises:
        UserError: If equinox is not installed.

    >>> import equinox as eqx
    >>> member = from_equinox(lambda key: eqx.nn.LayerNorm(2))
    >>> params, model_state = member.init(jax.random.key(0), jax.numpy.zeros((1, 2)))
    >>> inputs = jax.numpy.array([[1.0, 3.0]])  # Mean 2, standard deviation 1.
    >>> member.apply(params, model_state, inputs, None, False)[0].round(3)
    Array([[-1.,  1.]], dtype=float32)
    """
    try:
        import equinox as eqx
    except ImportError as error:
        raise UserError(
            "equinox is not installed, and from_equinox needs it. Install the extra: "
            "pip install 'dist-ens[equinox]'."
        ) from error

    def make_parts(key: Key) -> tuple[Params, ModelState, Network]:
        """Returns the parameters, the other arrays with the state, and the static part."""
        module, state = eqx.nn.make_with_state(make)(key) if stateful else (make(key), None)
        params, rest = eqx.partition(module, eqx.is_inexact_array)
        buffers, static = eqx.partition(rest, eqx.is_array)
        return params, (buffers, state), static

    def init(key: Key, inputs: Inputs) -> tuple[Params, ModelState]:
        params, model_state, _ = make_parts(key)
        require_parameters(params)
        return params, model_state

    def static_part() -> Network:
        parts = []
        jax.eval_shape(
            lambda key: parts.append(make_parts(key)[2]), jax.eval_shape(lambda: jax.random.key(0))
        )
        return parts[0]

    def is_dropout(part: Network) -> bool:
        return isinstance(part, eqx.nn.Dropout)

    def apply(
        params: Params, model_state: ModelState, inputs: Inputs, key: Key | None, train: bool
    ) -> tuple[Outputs, ModelState]:
        buffers, state = model_state
        module = _switched(
            eqx.nn.inference_mode(eqx.combine(params, buffers, static_part()), not train), train
        )
        # Dropout outside training is switched on in its layers only, not in the network's call.
        told, given = train or key is None, 3 if stateful else 2
        mode = switch_arguments(type(module).__call__, train, given=given) if told else {}
        if key is not None:
            module = jax.tree.map(
                lambda part: eqx.nn.inference_mode(part, False) if is_dropout(part) else part,
                module,
                is_leaf=is_dropout,
            )
        num_examples = len(jax.tree.leaves(inputs)[0])
        keys = None if key is None else jax.random.split(key, num_examples)
        if not stateful:
            outputs = jax.vmap(lambda x, k: module(x, key=k, **mode), axis_name="batch")(
                inputs, keys
            )
            return outputs, model_state
        outputs, state = jax.vmap(
            lambda x, s, k: module(x, s, key=k, **mode),
            in_axes=(0, None, 0),
            out_axes=(0, None),
            axis_name="batch",
        )(inputs, state, keys)
        return outputs, (buffers, state) if train else model_state

    def layers(params: Params, model_state: ModelState, inputs: Inputs, axis_name: str) -> Layers:
        """Returns the layers that compute other results in training than in evaluation."""

        def drops(part: Network) -> bool:
            return is_dropout(part) and part.p > 0

        def counts(part: Network) -> bool:
            return isinstance(part, eqx.nn.BatchNorm)

        module = eqx.combine(params, model_state[0], static_part())
        parts = [
            (jax.tree_util.keystr(path).lstrip("."), part)
            for path, part in jax.tree_util.tree_leaves_with_path(
                module, is_leaf=lambda part: drops(part) or counts(part)
            )
        ]
        return Layers(
            dropping=[name for name, part in parts if drops(part)],
            counting=[name for name, part in parts if counts(part)],
            may_have_switch=any(map(may_have_switch, _own_modules(module))),
        )

    return Member(init, apply, idle_layers_of(apply, layers), name_of(make))


def _own_modules(module: Network) -> Iterator[Network]:
    """Yields a module and the modules inside it, except those that equinox defines."""
    import equinox as eqx

    if callable(module) and not type(module).__module__.startswith("equinox."):
        yield module
    parts = jax.tree.leaves(
        list(vars(module).values()), is_leaf=lambda part: isinstance(part, eqx.Module)
    )
    for part in parts:
        if isinstance(part, eqx.Module):
            yield from _own_modules(part)


def _switched(module: Network, train: bool) -> Network:
    """Returns the module with the switches in its fields set."""
    values = switches(train)

    def of_mode(path: KeyPath, leaf: Leaf) -> Leaf:
        name = getattr(path[-1], "name", None) if path else None
        return values[name] if isinstance(leaf, bool) and name in values else leaf

    return jax.tree_util.tree_map_with_path(of_mode, module)
