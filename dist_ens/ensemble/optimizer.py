"""The optimizer of one member: its state, its update, and the parameters for evaluation."""

from collections.abc import Callable
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr, Literal, Var

from dist_ens.ensemble.checks import explained_errors
from dist_ens.execution.rewrite import equations, nested
from dist_ens.ground.errors import UserError, call_error, name_of
from dist_ens.ground.randomness import key_of_optimizer
from dist_ens.ground.types import (
    Gradients,
    Key,
    Leaf,
    Metrics,
    Optimizer,
    OptimizerOfMember,
    OptState,
    Params,
    PyTree,
)
from dist_ens.members.modes import named_arguments
from dist_ens.sampling.hyper import Given

# Operations that draw random numbers, and operations that derive keys from keys.
_DRAWS = {"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform"}
_TAKE_KEYS = _DRAWS | {"random_wrap", "random_split", "random_fold_in", "random_clone"}


def check_optimizer(optimizer: object, *, may_be_made: bool = False) -> None:
    """Raises a `UserError` unless an object has `init` and `update`, like Optax's optimizers.

    It `may_be_made` by a function of the settings of a member.
    """
    has_both = all(callable(getattr(optimizer, name, None)) for name in ("init", "update"))
    is_function = callable(optimizer) and may_be_made and call_error(optimizer, 1) is None
    if not (has_both or is_function) or isinstance(optimizer, type):
        shown = name_of(optimizer) if callable(optimizer) else repr(optimizer)[:80]
        raise UserError(
            f"The optimizer is {shown}, which lacks init and update. Give one of Optax's that was "
            "called, such as optax.adam(1e-3), or, with hyper=, a function that makes one."
        )


def optimizer_of(optimizer: OptimizerOfMember, hyper: PyTree) -> Optimizer:
    """Returns the optimizer of one member, which a function of its settings may make."""
    if not callable(optimizer) or hasattr(optimizer, "update"):
        return cast("Optimizer", optimizer)
    with explained_errors("optimizer of some settings"):
        made = optimizer(Given(hyper))
    check_optimizer(made)
    return made


def update_of(
    optimizer: Optimizer, grads: Gradients, state: OptState, params: Params, **extra: PyTree
) -> tuple[Gradients, OptState]:
    """Returns an optimizer's updates and its new state. It is given the arguments it accepts."""
    with_extra = isinstance(optimizer, optax.GradientTransformationExtraArgs)
    if isinstance(optimizer, optax.GradientTransformation) and not with_extra:
        extra = {}
    return optimizer.update(grads, state, params, **named_arguments(optimizer.update, **extra))


def loss_functions(
    gradients: Callable[[Params], tuple[Gradients, PyTree, Metrics]],
) -> dict[str, Callable[..., PyTree]]:
    """Returns the functions with which an optimizer computes the loss again, by their names.

    They are `value_fn` of line searches, `obj_fn` of `optax.contrib.sophia`, and `grad_fn` of
    `optax.contrib.sam`. `gradients` returns the gradients of the batch's loss, the new model state,
    and metrics with the `loss`.
    """

    def value_and_grad(params: Params) -> tuple[jax.Array, Gradients]:
        grads, _, metrics = gradients(params)
        return metrics["loss"], grads

    @jax.custom_vjp
    def value(params: Params) -> jax.Array:
        return value_and_grad(params)[0]

    def pulled_back(grads: Gradients, change: jax.Array) -> tuple[Gradients]:
        return (jax.tree.map(lambda leaf: (change * leaf).astype(leaf.dtype), grads),)

    value.defvjp(value_and_grad, pulled_back)

    # A line search raises an error if its function does not take every extra argument.
    def value_fn(
        params: Params, key: PyTree = None, obj_fn: PyTree = None, grad_fn: PyTree = None
    ) -> jax.Array:
        return value(params)

    return {
        "value_fn": value_fn,
        "obj_fn": value_fn,
        "grad_fn": lambda params, number=0: value_and_grad(params)[1],
    }


def calls_loss(
    optimizer: Optimizer, grads: Gradients, state: OptState, params: Params, **extra: PyTree
) -> bool:
    """Returns whether an optimizer computes the loss again; see `update_of`."""
    calls = []

    def gradients(params: Params) -> tuple[Gradients, PyTree, Metrics]:
        calls.append(params)
        return params, (), {"loss": jnp.float32(0)}

    def update(grads: Gradients, state: OptState, params: Params) -> PyTree:
        return update_of(optimizer, grads, state, params, **extra, **loss_functions(gradients))

    jax.eval_shape(update, grads, state, params)
    return bool(calls)


def evaluation_params(params: Params, opt_state: OptState) -> Params:
    """Returns the parameters with which a member is evaluated.

    A schedule-free optimizer evaluates averages, which are computed from its state. The state of
    `optax.contrib.sam` holds the outer parameters, of which it trains perturbations. Either may
    train a group of the parameters only (`optax.masked`, `optax.partition`).

    Source: Defazio et al. (2024), https://arxiv.org/abs/2405.15682. Foret et al. (2021),
    https://arxiv.org/abs/2010.01412.
    """
    for node in filter(_evaluates_others, jax.tree.leaves(opt_state, is_leaf=_evaluates_others)):
        held = node.cache if isinstance(node, optax.contrib.SAMState) else node.z
        group = jax.tree.map(
            lambda own, leaf: own if _is_masked(own) else leaf, held, params, is_leaf=_is_masked
        )
        params = jax.tree.map(
            lambda new, old: old if _is_masked(new) else new,
            _evaluated(node, group),
            params,
            is_leaf=_is_masked,
        )
    return params


def evaluates_others(opt_state: OptState) -> bool:
    """Returns whether `evaluation_params` may differ from the trained parameters."""
    return any(map(_evaluates_others, jax.tree.leaves(opt_state, is_leaf=_evaluates_others)))


def _evaluates_others(node: object) -> bool:
    is_sam = isinstance(node, optax.contrib.SAMState) and node.cache is not None
    return is_sam or isinstance(node, optax.contrib.ScheduleFreeState)


def _evaluated(node: OptState, params: Params) -> Params:
    """Returns the parameters for evaluation of one optimizer, given those that it trains."""
    if isinstance(node, optax.contrib.ScheduleFreeState):
        return optax.contrib.schedule_free_eval_params(node, params)
    is_outer = node.steps_since_sync == 0
    outer = jax.tree.map(partial(jnp.where, is_outer), params, node.cache)
    return evaluation_params(outer, node.opt_state)


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)


def optimizer_state(optimizer: Optimizer, params: Params, member_key: Key) -> OptState:
    """Returns the initial state of a member's optimizer.

    An optimizer that draws random numbers, such as `optax.noisy_sgd`, is made with one seed for all
    members. Each key in its state, typed or a plain `uint32[..., 2]` from which the update draws,
    is replaced by a key that also depends on the member.
    """
    state = optimizer.init(params)
    evaluation_params(params, state)  # An error in it should not come after training.
    leaves, structure = jax.tree.flatten(state)
    is_key = list(map(_is_typed_key, leaves))

    def update(grads: Gradients, state: OptState, params: Params, key: Key) -> PyTree:
        functions = loss_functions(lambda params: (params, (), {"loss": jnp.float32(0)}))
        extra = {"value": jnp.float32(0), "grad": grads, "key": key, **functions}
        return update_of(optimizer, grads, state, params, **extra)

    try:
        traced = jax.make_jaxpr(update)(params, state, params, member_key).jaxpr
    except Exception:  # The error is raised again where the update is traced for training.
        traced = None
    if traced is not None:
        num_params = len(jax.tree.leaves(params))
        for number, leaf in enumerate(leaves):
            if jnp.result_type(leaf) == jnp.uint32 and jnp.shape(leaf)[-1:] == (2,):
                is_key[number] = _reaches_draws(traced, {traced.invars[num_params + number]})
        draws = any(eqn.primitive.name in _DRAWS for eqn in equations(traced))
        if draws and not any(is_key) and not _reaches_draws(traced, {traced.invars[-1]}):
            raise UserError(
                "The optimizer draws random numbers from a key that is not in its state, so all "
                "members would draw the same numbers. Keep the key in the optimizer's state, "
                "as optax.add_noise(eta, gamma, key) does."
            )
    own = [
        _own(leaf, member_key) if replaced else leaf
        for leaf, replaced in zip(leaves, is_key, strict=True)
    ]
    return jax.tree.unflatten(structure, own)


def _own(leaf: jax.Array, member_key: Key) -> jax.Array:
    """Returns the member's keys in place of one or several keys of the optimizer."""
    is_typed = _is_typed_key(leaf)
    if is_typed:  # Keys of other generators may have more than two words.
        words = jax.vmap(lambda key: jax.random.bits(key, (2,), jnp.uint32))(leaf.ravel())
    else:
        words = leaf.reshape(-1, 2)
    keys = jax.vmap(key_of_optimizer, in_axes=(None, 0))(member_key, words)
    return keys.reshape(leaf.shape) if is_typed else jax.random.key_data(keys).reshape(leaf.shape)


def _is_typed_key(leaf: Leaf) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def _reaches_draws(jaxpr: Jaxpr, values: set[Var]) -> bool:
    """Returns whether random numbers in a traced function depend on any of some values."""
    values = set(values)
    for eqn in jaxpr.eqns:
        given = [not isinstance(v, Literal) and v in values for v in eqn.invars]
        if not any(given):
            continue
        if eqn.primitive.name in _TAKE_KEYS:
            return True
        for inner in nested(eqn.params):
            # The last operands are the arguments of the nested function. An earlier operand, such
            # as the index of a branch, is not.
            own = zip(inner.invars[::-1], given[::-1], strict=False)
            if _reaches_draws(inner, {v for v, is_given in own if is_given}):
                return True
        values.update(eqn.outvars)
    return False
