"""Computation of what depends on shared arrays alone, once for all members of a device.

Under `vmap` JAX does this by itself, since such values have no members axis. In a loop over
members, the operations on shared arrays whose inputs are the same for all members are taken out of
the function of one member, and computed before the loop.
"""

from collections.abc import Callable, Sequence

import jax
from jax.extend.core import Literal, Var

from dist_ens.execution.rewrite import evaluate_equations, rewritten
from dist_ens.ground.types import Leaf, Tree


def hoisted(
    fn: Callable[..., Tree],
    leaves: Sequence[Leaf],
    has_members: Sequence[bool],
    is_shared: Sequence[bool],
) -> Callable[..., Tree]:
    """Returns a function of one member's leaves that takes results of shared arrays as they are.

    Args:
        fn: Function of one member, whose arguments are leaves.
        leaves: Leaves of all members, with a leading members axis where `has_members` says so.
        has_members: Flags of the leaves of which each member has its own.
        is_shared: Flags of the leaves that are shared arrays. What depends on none of them stays
            in the loop, where the compiler may fuse it.
    """
    shapes = [
        jax.ShapeDtypeStruct(leaf.shape[1:] if has else leaf.shape, leaf.dtype)
        for leaf, has in zip(leaves, has_members, strict=True)
    ]
    # The rewriting inlines calls, so that operations of the trunk and of the member lie apart.
    traced, results = jax.make_jaxpr(rewritten(fn, {}), return_shape=True)(*shapes)
    jaxpr = traced.jaxpr
    differ = {var for var, has in zip(jaxpr.invars, has_members, strict=True) if has}
    of_shared = {var for var, is_so in zip(jaxpr.invars, is_shared, strict=True) if is_so}
    alike, own = [], []
    for eqn in jaxpr.eqns:
        inputs = {var for var in eqn.invars if not isinstance(var, Literal)}
        if inputs & differ or eqn.effects:
            differ.update(eqn.outvars)
            own.append(eqn)
            continue
        alike.append(eqn)
        if inputs & of_shared:
            of_shared.update(eqn.outvars)
        else:
            own.append(eqn)
    values: dict[Var, Leaf] = dict(zip(jaxpr.constvars, traced.consts, strict=True))
    common = zip(jaxpr.invars, leaves, strict=True)
    values |= {var: leaf for var, leaf in common if var not in differ}
    evaluate_equations(alike, values, {})
    kept = {var: value for var, value in values.items() if var in of_shared}

    def of_one(*args: Leaf) -> Tree:
        held = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*traced.consts, *args], strict=True))
        held |= kept
        evaluate_equations(own, held, {})
        found = [v.val if isinstance(v, Literal) else held[v] for v in jaxpr.outvars]
        return jax.tree.unflatten(jax.tree.structure(results), found)

    return of_one
