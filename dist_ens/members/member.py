"""The member itself, and the checks that tell early what does not fit."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dist_ens.errors import UserError, first_line
from dist_ens.members.modes import EVALUATION_ARGUMENTS, TRAINING, IdleLayers
from dist_ens.randomness import pinned_generator
from dist_ens.state import require_arrays

_MOST_LISTED = 5  # layers, in a message


@dataclasses.dataclass(frozen=True)
class Member:
    """One network. The package's own page says what the two functions take and return.

    Attributes:
        init: Function of a key and a batch of inputs.
        apply: Function of parameters, model state, inputs, a key or None, and whether it is
            trained.
        idle_layers: Names the layers that wait for a switch which never comes; see `modes`.
        name: Name of the network's class or function, for messages.
    """

    init: Callable[[jax.Array, jax.Array], tuple[Any, Any]]
    apply: Callable[[Any, Any, jax.Array, jax.Array | None, bool], tuple[jax.Array, Any]]
    idle_layers: IdleLayers = lambda params, model_state, inputs, axis_name: []
    name: str = "a network"


def name_of(fn: Callable[..., Any]) -> str:
    """Returns the name of a class or function, for messages.

    >>> name_of(name_of)
    'name_of'
    """
    return getattr(fn, "__qualname__", type(fn).__name__)


def require_member(member: Any) -> None:
    """Raises a `UserError` unless an object is a member."""
    if not isinstance(member, Member):
        raise UserError(
            f"The network given is a {type(member).__name__}, not a dist_ens.members.Member. Make "
            "one with an adapter of dist_ens.members, such as from_linen(module)."
        )


def require_parameters(params: Any) -> None:
    """Raises a `UserError` unless every leaf of `params` is a floating-point array."""
    if not jax.tree.leaves(params):
        raise UserError(
            "A member has parameters to train. Received: none from its init. Return a pytree of "
            "floating-point arrays."
        )
    require_arrays(params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            raise UserError(
                "Parameters are floating-point arrays, for they have gradients. Received: "
                f"{jnp.result_type(leaf)} as leaf {_place(path)}. Keep what is not trained in the "
                "model state, or in the static part of its class."
            )


@pinned_generator()
def check_member(
    member: Member, inputs: jax.ShapeDtypeStruct, output_shape: Sequence[int]
) -> tuple[Any, Any]:
    """Traces a member, without computing anything, and raises where it does not fit its data.

    Args:
        member: The network.
        inputs: One batch, as shape and type: [batch, ...].
        output_shape: What `apply` must return for it: (batch, ..., outputs).

    Returns:
        Shapes and types of `(params, model_state)`.

    Raises:
        UserError: If the inputs do not fit the network or its outputs are of another shape.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    given = f"{inputs.dtype}{list(inputs.shape)}"

    def init(key: jax.Array, inputs: jax.Array) -> tuple[Any, Any]:
        params, model_state = member.init(key, inputs)
        require_parameters(params)
        return params, model_state

    try:
        params, model_state = jax.eval_shape(init, key, inputs)
        outputs, new_state = jax.eval_shape(
            lambda p, s, x: member.apply(p, s, x, None, False), params, model_state, inputs
        )
    except UserError:
        raise
    except Exception as error:  # whatever a user's network says when it is given the wrong inputs
        raise UserError(
            f"The network must take the data's inputs. Received: a batch {given}, to which it "
            f"said: {type(error).__name__}: {first_line(error)} Choose a model for inputs of "
            "this shape and type, or another data source."
        ) from error
    empty = [name for name, leaf in _named(params) if 0 in leaf.shape]
    if empty:
        raise UserError(
            f"The network must take the data's inputs. Received: a batch {given}, of which nothing "
            f"is left at parameter {empty[0]}. Choose a model for smaller inputs, or larger inputs."
        )
    if tuple(getattr(outputs, "shape", ())) != tuple(output_shape):
        raise UserError(
            f"For a batch {given} the network must return outputs of shape {list(output_shape)}: "
            f"one row per example, one column per class, or for each number that the loss takes. "
            f"Received: {_shape(outputs)}. Change the network's last layer, or data.num_classes."
        )
    structure: Any = jax.tree.structure(model_state)
    new_structure: Any = jax.tree.structure(new_state)
    if new_structure != structure:
        raise UserError(
            "apply returns the model state with the structure that init gave it. Received: "
            f"{new_structure} instead of {structure}. "
            "Create every entry of the state in init."
        )
    return params, model_state


@pinned_generator()
def check_modes(member: Member, inputs: jax.ShapeDtypeStruct, axis_name: str) -> None:
    """Checks that a network with dropout or batch statistics is another one when it is trained.

    Args:
        member: The network.
        inputs: Shape and type of a batch of inputs, [batch, ...].
        axis_name: Name of the data axis.

    Raises:
        UserError: If a training step computes what evaluation computes.
    """
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, model_state = jax.eval_shape(member.init, key, inputs)
    idle = member.idle_layers(params, model_state, inputs, axis_name)
    if idle:
        listed = ", ".join(idle[:_MOST_LISTED]) + (", …" if len(idle) > _MOST_LISTED else "")
        raise UserError(
            f"The network trains exactly as it evaluates, though it has {listed}: nothing tells "
            "these layers that they are trained. Give the network's __call__ an argument `train` "
            "and pass it on to them (names that are recognised: "
            f"{', '.join((*TRAINING, *EVALUATION_ARGUMENTS))}), or take those layers out. Batch "
            "statistics alone may be frozen on purpose: in a network without any switch, that is "
            "without an argument or field that is True, False or None."
        )


def with_normalized_inputs(member: Member, mean: Sequence[float], std: Sequence[float]) -> Member:
    """The member, given `(inputs - mean) / std` in float32; itself where that changes nothing.

    Args:
        member: The network.
        mean: One number in a sequence, or one per entry of the inputs' last axis.
        std: Likewise.

    Returns:
        A member that takes the inputs as the data source yields them.
    """
    if np.all(np.asarray(mean) == 0) and np.all(np.asarray(std) == 1):
        return member

    def normalized(inputs: jax.Array) -> jax.Array:
        last_axis = (1,) * (inputs.ndim - 1) + (-1,)
        shift, scale = (np.reshape(np.asarray(v, np.float32), last_axis) for v in (mean, std))
        return (inputs.astype(jnp.float32) - shift) / scale

    return dataclasses.replace(
        member,
        init=lambda key, inputs: member.init(key, normalized(inputs)),
        apply=lambda params, model_state, inputs, key, train: member.apply(
            params, model_state, normalized(inputs), key, train
        ),
        idle_layers=lambda params, model_state, inputs, axis_name: member.idle_layers(
            params, model_state, jax.eval_shape(normalized, inputs), axis_name
        ),
    )


def with_compute_dtype(member: Member, dtype: str) -> Member:
    """The member with its own arithmetic in another floating type.

    Parameters and floating inputs are converted on the way in, outputs and model state on the way
    out, so that parameters, gradients and statistics stay what they were.

    Args:
        member: The network.
        dtype: Such as `bfloat16`.

    Returns:
        The member; itself for `float32`.
    """
    if dtype == "float32":
        return member

    def converted(tree: Any) -> Any:
        return jax.tree.map(
            lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf,
            tree,
        )

    def apply(
        params: Any, model_state: Any, inputs: jax.Array, key: jax.Array | None, train: bool
    ) -> tuple[jax.Array, Any]:
        outputs, new_state = member.apply(
            converted(params), model_state, converted(inputs), key, train
        )
        new_state = jax.tree.map(lambda new, old: new.astype(old.dtype), new_state, model_state)
        return outputs.astype(jnp.float32), new_state

    return dataclasses.replace(member, apply=apply)


def rematerialized(member: Member) -> Member:
    """The member, of whose forward pass little is kept for the backward pass.

    Kept is what matrix products and convolutions return; the rest is computed again.

    Args:
        member: The network.
    """
    kept = (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p)
    apply = jax.checkpoint(
        member.apply, policy=lambda primitive, *_, **__: primitive in kept, static_argnums=4
    )
    return dataclasses.replace(member, apply=apply)


def _place(path: Any) -> str:
    return jax.tree_util.keystr(path) or "(the whole)"


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(p), leaf) for p, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _shape(outputs: Any) -> str:
    if hasattr(outputs, "shape"):
        return f"{outputs.dtype}{list(outputs.shape)}"
    return f"a {type(outputs).__name__}"
