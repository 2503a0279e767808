"""Members made from `flax.nnx` modules."""

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dist_ens.ground.errors import name_of
from dist_ens.ground.types import Inputs, Key, Leaf, ModelState, Outputs, Params, PyTree, Tree
from dist_ens.members.member import Member, require_parameters
from dist_ens.members.modes import (
    given_arguments,
    input_arguments,
    switch_arguments,
    switches,
)

if TYPE_CHECKING:
    import flax.nnx


def from_nnx(make: "Callable[[flax.nnx.Rngs], flax.nnx.Module]") -> Member:
    """Returns a member made from a function that makes a flax.nnx module.

    `nnx.Param` variables are the parameters. The random streams are seeded with the member's key of
    the step. `nnx.Intermediate` variables are dropped after a call. All other variables are model
    state. `module.train()` and `module.eval()` set the mode. Every other switch with a usual name
    (see `dist_ens.members.modes`) is set too. It may be an attribute of a module, or an argument of
    the network's call.

    Args:
        make: Function that makes the module from `nnx.Rngs`, such as
            `lambda rngs: Model(rngs=rngs)`. The module is called with one batch of inputs. A call
            of several inputs takes a tuple, or a dict by the names of the arguments.

    Returns:
        The member. Its parameters and model state are `nnx.State`s.

    >>> from flax import nnx
    >>> ones = nnx.initializers.ones
    >>> member = from_nnx(lambda rngs: nnx.Linear(3, 2, kernel_init=ones, rngs=rngs))
    >>> params, model_state = member.init(jax.random.key(0), jnp.zeros((1, 3)))
    >>> member.apply(params, model_state, jnp.array([[1.0, 2.0, 3.0]]), None, False)[0]
    Array([[6., 6.]], dtype=float32)
    """
    from flax import nnx  # The import takes a third of a second, so other networks do without it.

    make = without_mesh(make)

    def split(module: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State, nnx.State]:
        parts: Any = nnx.split(module, nnx.Param, nnx.RngState, nnx.Intermediate, ...)
        graph, params, streams, _, model_state = parts
        return graph, params, streams, model_state

    def blueprint(train: bool, drops: bool) -> tuple[nnx.GraphDef, nnx.State]:
        """Returns the module without its arrays, and the shapes of its random streams."""
        # The mesh may lack axes that variables name.
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
        module.train() if train else module.eval()
        values = switches(train)
        for _, part in nnx.iter_modules(module):
            for name in values.keys() & vars(part).keys():
                if isinstance(vars(part)[name], bool):
                    setattr(part, name, values[name])
        if drops:
            module.set_attributes(nnx.Dropout, deterministic=False, raise_if_not_found=False)
        graph, _, streams, _ = split(module)
        return graph, streams

    def init(key: Key, inputs: Inputs, **given: PyTree) -> tuple[Params, ModelState]:
        _, params, _, model_state = split(make(nnx.Rngs(key)))
        require_parameters(params)
        return params, model_state

    def parts_of(
        given: nnx.Module | Params, model_state: ModelState | None
    ) -> tuple[Params, ModelState]:
        if isinstance(given, nnx.Module):
            _, params, _, own = split(given)
            return params, own if model_state is None else model_state
        return given, nnx.State({}) if model_state is None else model_state

    def forward(
        params: Params,
        model_state: ModelState,
        inputs: Inputs,
        key: Key | None,
        train: bool,
        *,
        drops: bool,
        **given: PyTree,
    ) -> tuple[Outputs, ModelState]:
        graph, streams = blueprint(train, drops)
        streams = _streams_at(streams, jax.random.key(0) if key is None else key)
        # Variables may be used only where they were made, so each trace makes new ones.
        fresh = jax.tree.map(lambda leaf: leaf, (params, streams, model_state))
        module = nnx.merge(graph, *fresh)
        call = type(module).__call__
        # Dropout outside training is switched on in its layers only, not in the network's call.
        mode = switch_arguments(call, train) if train or not drops else {}
        args, named = input_arguments(call, inputs)
        outputs = module(*args, **named, **mode, **given_arguments(call, given))
        _, _, left, new_state = split(module)
        if key is None and not all(map(operator.is_, *map(jax.tree.leaves, (left, streams)))):
            raise ValueError("The network draws random numbers without a key.")
        return outputs, new_state if train else model_state

    def apply(
        params: Params,
        model_state: ModelState,
        inputs: Inputs,
        key: Key | None,
        train: bool,
        **given: PyTree,
    ) -> tuple[Outputs, ModelState]:
        return forward(params, model_state, inputs, key, train, drops=key is not None, **given)

    sample = functools.partial(forward, drops=False)
    return Member(init, apply, name_of(make), sample=sample, takes_given=True, parts_of=parts_of)


def without_mesh(make: Callable[..., Tree]) -> Callable[..., Tree]:
    """Returns a function of `rngs` that makes a module without a mesh, whatever axes it names.

    The names are rules for the layout. Flax requires a mesh that has them, unless it is told not to
    place variables. It notes that in every variable, so other modules are made as always.
    """
    from flax import nnx

    def made(rngs: object) -> Tree:
        with nnx.use_eager_sharding(False):
            return make(rngs)

    try:
        with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
            nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    except ValueError:
        return functools.wraps(make)(made)
    except Exception:  # The caller makes the module again, and says what is wrong.
        return make
    return make


def _streams_at(streams: Tree, key: Key) -> Tree:
    """Returns the random streams of a module, each at count zero with a key derived from `key`."""
    leaves, structure = jax.tree.flatten(streams)

    def fresh(number: int, leaf: Leaf) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jnp.zeros(leaf.shape, leaf.dtype)
        of_stream = jax.random.fold_in(key, number)
        return jax.random.split(of_stream, leaf.shape) if leaf.shape else of_stream

    return jax.tree.unflatten(structure, [fresh(i, leaf) for i, leaf in enumerate(leaves)])
