"""Evaluation of a traced function with some of its operations replaced.

The functions here work on a member's update as JAX traced it, after differentiation. The backward
pass is then a list of equations like the forward pass, so they work for any network.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var, jaxpr_as_fun

from dist_ens.ground.types import Leaf, PyTree, Tree

Rule = Callable[..., jax.Array | list[jax.Array]]

# These calls only group equations. Their derivative rules are no longer needed after
# differentiation.
_INLINED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def rewritten(fn: Callable[..., Tree], rules: Mapping[Primitive, Rule]) -> Callable[..., Tree]:
    """Returns a function in which the operations that have a rule are replaced by it.

    Operations inside jit, scan, while, cond, remat and custom derivatives are replaced too.
    Differentiate `fn` first: the rules have no useful derivatives. A rule takes the operation's
    arrays and, as keywords, its parameters. It returns the result, or a list if there are several.
    """

    def evaluated(*args: PyTree) -> Tree:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        results = _evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), rules)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return evaluated


def contains(
    traced: ClosedJaxpr,
    primitive: Primitive,
    where: Callable[..., bool] = lambda *shapes, **params: True,
) -> bool:
    """Returns whether a traced function has an operation, at any depth, for which `where` holds."""

    def counts(eqn: JaxprEqn) -> bool:
        return eqn.primitive is primitive and where(*(v.aval for v in eqn.invars), **eqn.params)

    return any(counts(eqn) for eqn in equations(traced.jaxpr))


def equations(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a traced function and of all functions nested in it."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in nested(eqn.params):
            yield from equations(inner)


def _evaluate(
    jaxpr: Jaxpr, consts: Sequence[Leaf], args: Sequence[Leaf], rules: Mapping[Primitive, Rule]
) -> list[Leaf]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    evaluate_equations(jaxpr.eqns, values, rules)
    return [_read(atom, values) for atom in jaxpr.outvars]


def evaluate_equations(
    equations: Sequence[JaxprEqn], values: dict[Var, Leaf], rules: Mapping[Primitive, Rule]
) -> None:
    """Adds the results of equations, in their order, to the values of their variables."""
    for eqn in equations:
        inputs = [_read(atom, values) for atom in eqn.invars]
        with eqn.ctx.manager:
            results = _apply(eqn, inputs, rules)
        values.update(zip(eqn.outvars, results, strict=True))


def _read(atom: Var | Literal, values: Mapping[Var, Leaf]) -> Leaf:
    return atom.val if isinstance(atom, Literal) else values[atom]


def _apply(eqn: JaxprEqn, inputs: list[Leaf], rules: Mapping[Primitive, Rule]) -> list[Leaf]:
    if eqn.primitive in rules:
        of_rule = rules[eqn.primitive](*inputs, **eqn.params)
        return of_rule if isinstance(of_rule, list) else [of_rule]
    if eqn.primitive.name in _INLINED:
        inner = eqn.params[_INLINED[eqn.primitive.name]]
        return _evaluate(inner.jaxpr, inner.consts, inputs, rules)
    params = {name: _with_rules(value, rules) for name, value in eqn.params.items()}
    results = eqn.primitive.bind(*inputs, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def _with_rules(param: PyTree, rules: Mapping[Primitive, Rule]) -> PyTree:
    """Returns a parameter of an operation with the rules applied to every traced function in it.

    A parameter without such an operation is returned unchanged, because some operations accept only
    the function that they were made with.
    """
    if not any(_has_rule(jaxpr, rules) for jaxpr in _jaxprs_in(param)):
        return param
    if isinstance(param, ClosedJaxpr):
        # The operation expects its results to keep their weak types.
        inner = jaxpr_as_fun(param)
        shapes = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in param.in_avals
        ]
        return jax.make_jaxpr(rewritten(lambda *args: inner(*args), rules))(*shapes)
    if isinstance(param, Jaxpr):
        closed = _with_rules(ClosedJaxpr(param, ()), rules)
        if closed.consts:
            raise RuntimeError(
                f"A rule captured {len(closed.consts)} arrays inside a function that cannot "
                "hold arrays. Build the constants inside the rule, with jax.lax.iota."
            )
        return closed.jaxpr
    if isinstance(param, dict):
        return type(param)({name: _with_rules(value, rules) for name, value in param.items()})
    parts = [_with_rules(part, rules) for part in param]
    # The class is kept, because JAX reads the fields of a named tuple by name.
    return type(param)(*parts) if hasattr(param, "_fields") else type(param)(parts)


def _has_rule(jaxpr: Jaxpr, rules: Mapping[Primitive, Rule]) -> bool:
    """Returns whether a traced function has an operation with a rule, at any depth of nesting.

    A function of references (a kernel, or a loop over mutable arrays) counts as having none,
    because it cannot be traced again from the shapes of its arguments.
    """
    if any(hasattr(variable.aval, "inner_aval") for variable in jaxpr.invars):
        return False
    return any(
        eqn.primitive in rules or any(_has_rule(inner, rules) for inner in nested(eqn.params))
        for eqn in jaxpr.eqns
    )


def nested(params: Mapping[str, object]) -> list[Jaxpr]:
    """Returns the traced functions among the parameters of an operation."""
    return [jaxpr for param in params.values() for jaxpr in _jaxprs_in(param)]


def _jaxprs_in(param: object) -> list[Jaxpr]:
    """Returns the traced functions in a parameter of an operation, also inside containers."""
    if isinstance(param, ClosedJaxpr):
        return [param.jaxpr]
    if isinstance(param, Jaxpr):
        return [param]
    if isinstance(param, dict):
        return nested(param)
    if isinstance(param, tuple | list):
        return [jaxpr for part in param for jaxpr in _jaxprs_in(part)]
    return []
