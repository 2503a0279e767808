"""The division of one member's arrays over the model axis of a mesh."""

import ast
import fnmatch
import functools
import glob
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec

from dist_ens.ground.errors import ExitCode, UserError
from dist_ens.ground.shared import Shared
from dist_ens.ground.state import State
from dist_ens.ground.types import KeyPath, PyTree, Structure, Tree
from dist_ens.layout.specs import ENSEMBLE, MEMBERS, MODEL, keys_of

if TYPE_CHECKING:
    from dist_ens.layout.mesh import Layout

FSDP, TENSOR = "fsdp", "tensor"
_SHARED = "shared/"  # Prefix of the names of arrays that all members share.
_REPEATED = {
    *("sharding_constraint", "broadcast_in_dim", "convert_element_type", "dynamic_slice"),
    *("reshape", "slice", "squeeze", "transpose"),
}
# Pairs of a pattern of names and the axes of such an array, or the name of a rule.
Pairs = tuple[tuple[str, tuple[str | None, ...]], ...]
Rules = str | Pairs


def checked_rules(rules: str | Sequence[tuple[str, Sequence[str | None]]]) -> Rules:
    """Returns rules as a `Layout` holds them; raises a `UserError` if they have another form."""
    if rules in (FSDP, TENSOR):
        return str(rules)
    try:  # A command line gives the pairs as a text.
        pairs = ast.literal_eval(rules) if isinstance(rules, str) else rules
        found: Pairs = tuple((pattern, tuple(axes)) for pattern, axes in pairs)
        if not found or any(isinstance(axes, str) for _, axes in pairs):
            raise TypeError
    except (ValueError, SyntaxError, TypeError) as error:
        raise UserError(
            f"model_rules is {rules!r}. Use {FSDP!r}, {TENSOR!r} for a network of Flax with "
            "partitioning metadata, or a list of pairs of a pattern and a tuple of axes, such as "
            f'[("*/kernel", (None, "{MODEL}")), ("*", ())].'
        ) from error
    for pattern, axes in found:
        if not {*axes} <= {None, MODEL} or axes.count(MODEL) > 1:
            raise UserError(
                f"The rule {pattern!r} of model_rules has the axes {axes}. Use None for a whole "
                f"axis, and {MODEL!r} at most once, such as (None, {MODEL!r})."
            )
    return found


def has_rules(node: object) -> bool:
    """Returns whether a part of a pytree is divided over the model axis by the layout's rules."""
    return isinstance(node, State | Shared)


def param_specs(layout: "Layout", params: PyTree, prefix: str = "") -> dict[tuple[str, ...], tuple]:
    """Returns the spec and the shape of each array of the parameters [members, ...], by its keys.

    With the rule `fsdp`, an array is divided along its longest axis of those that the model axis
    divides. With `tensor`, the partitioning metadata of Flax says along which axis. With patterns,
    the first that fits an array's name, such as `mlp/Dense_0/kernel`, is taken. An array that has
    no metadata, or that no pattern fits, stays whole. Arrays that all members share have names and
    patterns with the prefix `shared/`, and no other arrays have.

    Raises:
        UserError: If nothing is divided, a pattern fits no name, or an array does not divide.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shapes = {keys_of(path): np.shape(leaf)[1:] for path, leaf in leaves}
    names = {keys: f"{prefix}{name}" for keys, name in names_of(params).items()}
    of_names = {names[keys]: shape for keys, shape in shapes.items()}
    size, rules = layout.model_axis, layout.model_rules
    if rules == FSDP:
        axes = {name: _longest(shape, size) for name, shape in of_names.items()}
    else:
        pairs = _rules_of_network(params, prefix) if isinstance(rules, str) else rules
        pairs = tuple(pair for pair in pairs if pair[0].startswith(_SHARED) == bool(prefix))
        axes = {name: _by_patterns(pairs, name, shape, size) for name, shape in of_names.items()}
        _require_all_used(pairs, of_names)
    divides_shared = not isinstance(rules, str) and any(p.startswith(_SHARED) for p, _ in rules)
    is_whole = not any(MODEL in own for own in axes.values())
    if shapes and is_whole and not (prefix or divides_shared):
        remedies = {
            FSDP: "Use a model axis that divides an axis of a parameter.",
            TENSOR: f"Name {MODEL!r} in the metadata, by flax.linen.with_partitioning or "
            "flax.nnx.with_partitioning.",
        }
        remedy = remedies.get(str(rules), f"Write {MODEL!r} at an axis in model_rules.")
        raise UserError(
            f"No parameter is divided over the model axis of {size}: {_listed(of_names)}. {remedy}",
            exit_code=ExitCode.IMPOSSIBLE_LAYOUT,
        )
    return {keys: (PartitionSpec(ENSEMBLE, *axes[names[keys]]), shapes[keys]) for keys in shapes}


def _is_variable(node: object) -> bool:
    """Returns whether a part of a pytree is a variable of Flax, which holds one array."""
    names = (f"{cls.__module__}.{cls.__name__}" for cls in type(node).__mro__)
    return not {"flax.core.meta.Partitioned", "flax.nnx.variablelib.Variable"}.isdisjoint(names)


def names_of(params: PyTree) -> dict[tuple[str, ...], str]:
    """Returns the name of each parameter by its keys; a variable of Flax names its array."""
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable)
    return {
        keys_of((*path, *inside)): "/".join(keys_of(path))
        for path, node in nodes
        for inside, _ in jax.tree_util.tree_leaves_with_path(node)
    }


def _rules_of_network(params: PyTree, prefix: str) -> Pairs:
    """Returns the pairs that the partitioning metadata of a Flax network stands for."""

    def axes_in(variable: object) -> list[str | None]:
        # Of flax.linen, and of flax.nnx. An axis may be divided over several axes of a mesh.
        given = getattr(variable, "names", None) or getattr(variable, "out_sharding", None)
        axes = (axis if isinstance(axis, tuple) else (axis,) for axis in given or ())
        return [MODEL if MODEL in over else None for over in axes]

    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_variable)
    return tuple(
        (prefix + glob.escape("/".join(keys_of(path))), tuple(axes))
        for path, node in nodes
        if _is_variable(node) and (axes := axes_in(node))
    )


def specs_by_rule(layout: "Layout", part: State | Shared) -> list[PartitionSpec]:
    """Returns the spec of each leaf of a state [members, ...] or of shared arrays, in their order.

    An array elsewhere in the state, such as a moment of the optimizer, is divided as the parameter
    of its shape whose name ends its own. The others are whole on every device of a row.
    """
    leaves, structure = jax.tree.flatten(part)
    return _specs_by_rule(layout, structure, tuple(np.shape(leaf) for leaf in leaves))


@functools.lru_cache
def _specs_by_rule(
    layout: "Layout", structure: Structure, shapes: Sequence[tuple[int, ...]]
) -> list[PartitionSpec]:
    state = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(s, np.float32) for s in shapes])
    if isinstance(state, Shared):
        like = [jax.ShapeDtypeStruct((1, *shape), np.float32) for shape in shapes]
        found = param_specs(layout, jax.tree.unflatten(structure, like).arrays, _SHARED)
        return [PartitionSpec(*spec[1:]) for spec, _ in found.values()]
    of_params = param_specs(layout, state.params)

    def spec_of(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
        keys = keys_of(path)
        for first in range(len(keys) + 1):
            spec, shape = of_params.get(keys[first:], (MEMBERS, None))
            if shape == leaf.shape[1:]:
                return spec
        return MEMBERS

    return [spec_of(*named) for named in jax.tree_util.tree_leaves_with_path(state)]


def gathered(params: Tree) -> Tree:
    """Returns whole parameters from those divided by `fsdp`, for use in `Layout.map_rows`.

    Without a model axis they are whole anyway.
    """
    size = jax.sharding.get_abstract_mesh().shape.get(MODEL, 1)
    if size == 1:
        return params

    def whole(leaf: jax.Array) -> jax.Array:
        # Otherwise the compiler would take them as whole before the barrier of `jax.checkpoint`.
        part = jax.lax.with_sharding_constraint(leaf, PartitionSpec(*_longest(leaf.shape, size)))
        return jax.lax.with_sharding_constraint(part, PartitionSpec())

    return jax.tree.map(whole, params)


def is_kept(primitive: Primitive, *_: object, **__: object) -> bool:
    """Returns whether the backward pass keeps the result of an operation of a loss.

    It gathers parameters again, and repeats what only moves or casts numbers, so that no copy of
    whole parameters is kept. It is a policy of `jax.checkpoint`.
    """
    return primitive.name not in _REPEATED


def _longest(shape: tuple[int, ...], size: int) -> tuple[str | None, ...]:
    divisible = [axis for axis, length in enumerate(shape) if length and length % size == 0]
    if not divisible:
        return ()
    return (None,) * max(divisible, key=lambda axis: shape[axis]) + (MODEL,)


def _by_patterns(
    rules: Pairs, name: str, shape: tuple[int, ...], size: int
) -> tuple[str | None, ...]:
    found = next((rule for rule in rules if fnmatch.fnmatchcase(name, rule[0])), None)
    if found is None:
        return ()
    pattern, axes = found
    axis = axes.index(MODEL) if MODEL in axes else None
    if len(axes) > len(shape):
        raise UserError(
            f"The rule {pattern!r} has {len(axes)} axes, and {name} has the shape {[*shape]}. "
            "Leave out the axis of the members, and axes that the array lacks.",
            exit_code=ExitCode.IMPOSSIBLE_LAYOUT,
        )
    if axis is not None and shape[axis] % size:
        raise UserError(
            f"The rule {pattern!r} divides axis {axis} of {name}, whose shape is {[*shape]}, over "
            f"a model axis of {size}. Name an axis whose length is a multiple of {size}.",
            exit_code=ExitCode.IMPOSSIBLE_LAYOUT,
        )
    return axes


def _require_all_used(rules: Pairs, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for pattern, _ in rules:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in shapes):
            raise UserError(
                f"The rule {pattern!r} of model_rules fits no parameter: {_listed(shapes)}. Use "
                "names of parameters, in which * stands for any characters."
            )


def _listed(shapes: Mapping[str, tuple[int, ...]]) -> str:
    ordered = sorted(shapes.items(), key=lambda item: -math.prod(item[1]))
    names = [f"{name} {[*shape]}" for name, shape in ordered]
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
