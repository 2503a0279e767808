"""The division of one member's arrays over the model axis of a mesh."""

import ast
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from dist_ens.ground.errors import ExitCode, UserError
from dist_ens.ground.state import State
from dist_ens.ground.types import KeyPath, Leaf, PyTree, Tree
from dist_ens.layout.specs import ENSEMBLE, MEMBERS, MODEL, keys_of

if TYPE_CHECKING:
    from dist_ens.layout.mesh import Layout

FSDP = "fsdp"
GATHERED = "gathered_params"
# Pairs of a pattern of names and the axes of such an array, or the name of a rule.
Pairs = tuple[tuple[str, tuple[str | None, ...]], ...]
Rules = str | Pairs


def checked_rules(rules: str | Sequence[tuple[str, Sequence[str | None]]]) -> Rules:
    """Returns rules as a `Layout` holds them; raises a `UserError` if they have another form."""
    if rules == FSDP:
        return FSDP
    try:  # A command line gives the pairs as a text.
        pairs = ast.literal_eval(rules) if isinstance(rules, str) else rules
        found: Pairs = tuple((str(pattern), tuple(axes)) for pattern, axes in pairs)
    except (ValueError, SyntaxError, TypeError) as error:
        raise UserError(
            f"model_rules is {rules!r}. Use {FSDP!r}, or pairs of a pattern and axes, such as "
            f'[("*/kernel", (None, "{MODEL}")), ("*", ())].'
        ) from error
    for pattern, axes in found:
        if not {*axes} <= {None, MODEL} or axes.count(MODEL) > 1:
            raise UserError(
                f"The rule {pattern!r} of model_rules has the axes {axes}. Use None for a whole "
                f"axis, and {MODEL!r} at most once, such as (None, {MODEL!r})."
            )
    return found


def param_specs(layout: "Layout", params: PyTree) -> dict[tuple[str, ...], tuple]:
    """Returns the spec and the shape of each array of the parameters [members, ...], by its keys.

    With the rule `fsdp`, an array is divided along its longest axis of those that the model axis
    divides. With patterns, the first that fits an array's name, such as `mlp/Dense_0/kernel`, is
    taken, and an array that none fits stays whole.

    Raises:
        UserError: If nothing is divided, a pattern fits no name, or an array does not divide.
    """
    named = {keys_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    shapes = {keys: np.shape(leaf)[1:] for keys, leaf in named.items()}
    size, rules = layout.model_axis, layout.model_rules
    if isinstance(rules, str):
        axes = {keys: _longest(shape, size) for keys, shape in shapes.items()}
    else:
        axes = {keys: _by_patterns(rules, keys, shape, size) for keys, shape in shapes.items()}
        _require_all_used(rules, shapes)
    if shapes and not any(MODEL in own for own in axes.values()):
        raise UserError(
            f"No parameter is divided over the model axis of {size}: {_listed(shapes)}. Use a "
            "model axis that divides an axis of a parameter, or rules that name it.",
            exit_code=ExitCode.IMPOSSIBLE_LAYOUT,
        )
    return {keys: (PartitionSpec(ENSEMBLE, *axes[keys]), shapes[keys]) for keys in shapes}


def state_specs(layout: "Layout", state: State) -> State:
    """Returns the spec of each leaf of a state [members, ...].

    An array elsewhere in the state, such as a moment of the optimizer, is divided as the parameter
    of its shape whose name ends its own. The others are whole on every device of a row.
    """
    of_params = param_specs(layout, state.params)

    def spec_of(path: KeyPath, leaf: Leaf) -> PartitionSpec:
        keys = keys_of(path)
        for first in range(len(keys) + 1):
            spec, shape = of_params.get(keys[first:], (MEMBERS, None))
            if shape == np.shape(leaf)[1:]:
                return spec
        return MEMBERS

    return jax.tree_util.tree_map_with_path(spec_of, state)


def gathered(params: Tree) -> Tree:
    """Returns parameters that are whole on every device of a row, for use in `Layout.map_rows`.

    Without a model axis they are so anyway. The gathered arrays have the name `GATHERED`.
    """
    if MODEL not in jax.sharding.get_abstract_mesh().axis_names:
        return params
    return jax.tree.map(
        lambda leaf: checkpoint_name(
            jax.lax.with_sharding_constraint(leaf, PartitionSpec()), GATHERED
        ),
        params,
    )


def _longest(shape: tuple[int, ...], size: int) -> tuple[str | None, ...]:
    divisible = [axis for axis, length in enumerate(shape) if length and length % size == 0]
    if not divisible:
        return ()
    return (None,) * max(divisible, key=lambda axis: shape[axis]) + (MODEL,)


def _by_patterns(
    rules: Pairs, keys: tuple[str, ...], shape: tuple[int, ...], size: int
) -> tuple[str | None, ...]:
    name = "/".join(keys)
    found = next((rule for rule in rules if fnmatch.fnmatchcase(name, rule[0])), None)
    if found is None:
        return ()
    pattern, axes = found
    axis = axes.index(MODEL) if MODEL in axes else None
    if axis is not None and (len(axes) > len(shape) or shape[axis] % size):
        raise UserError(
            f"The rule {pattern!r} divides axis {axis} of {name}, whose shape is {[*shape]}, over "
            f"a model axis of {size}. Name an axis whose length is a multiple of {size}.",
            exit_code=ExitCode.IMPOSSIBLE_LAYOUT,
        )
    return axes


def _require_all_used(rules: Pairs, shapes: Mapping[tuple[str, ...], tuple[int, ...]]) -> None:
    for pattern, _ in rules:
        if not any(fnmatch.fnmatchcase("/".join(keys), pattern) for keys in shapes):
            raise UserError(
                f"The rule {pattern!r} of model_rules fits no parameter: {_listed(shapes)}. Use "
                "names of parameters, in which * stands for any characters."
            )


def _listed(shapes: Mapping[tuple[str, ...], tuple[int, ...]]) -> str:
    ordered = sorted(shapes.items(), key=lambda item: -math.prod(item[1]))
    names = [f"{'/'.join(keys)} {[*shape]}" for keys, shape in ordered]
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
