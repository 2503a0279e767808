"""The step that a user wrote for one member, in place of a loss and an optimizer."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from dist_ens.ensemble.failure_policy import FailurePolicy
from dist_ens.ensemble.failures import NEW_STATE, taken_unless_failed
from dist_ens.ensemble.loss_checks import explained_errors
from dist_ens.errors import UserError, first_line, kind_of
from dist_ens.losses import Objective
from dist_ens.members import Member
from dist_ens.methods import LossFunction
from dist_ens.methods.loss import LossResults
from dist_ens.randomness import UPDATE, pinned_generator
from dist_ens.signatures import call_error, name_of
from dist_ens.state import (
    State,
    described,
    differing,
    leaf_type,
    leaf_types,
    require_arrays,
    structure_text,
    without_weak_types,
)
from dist_ens.types import (
    Batch,
    Inputs,
    Key,
    Metrics,
    ModelState,
    Outputs,
    Params,
    PyTree,
    Structure,
    Tree,
)

_SIGNATURES = {
    "init": "init(key, batch) -> state",
    "step": "step(state, batch, key) -> (state, metrics)",
    "apply": "apply(state, inputs) -> outputs",
    "eval_loss": "eval_loss(state, batch, key) -> (loss, metrics)",
}


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """A step of one member that a user wrote; see `Ensemble.from_step`.

    It is called as a `GradientStep` is. The state of the user is the `params` of a `State`, whose
    `model_state` and `opt_state` are empty.

    Attributes:
        init: Initialiser, `init(key, batch) -> state`.
        step: Step, `step(state, batch, key) -> (state, metrics)`.
        apply: Forward pass, `apply(state, inputs) -> outputs`. None for none.
        failures: Policy for failed steps.

    Raises:
        UserError: If a function cannot be called with these arguments.
    """

    init: Callable[[Key, Batch], PyTree]
    step: Callable[[PyTree, Batch, Key], tuple[PyTree, Metrics]]
    apply: Callable[[PyTree, Inputs], Outputs] | None = None
    failures: FailurePolicy = dataclasses.field(default_factory=FailurePolicy)

    def __post_init__(self) -> None:
        _require_call("init", self.init)
        _require_call("step", self.step)
        if self.apply is not None:
            _require_call("apply", self.apply)

    @property
    def member(self) -> Member:
        """The member with the initialiser and the forward pass."""

        def init(key: Key, batch: Batch) -> tuple[Params, ModelState]:
            try:
                state = self.init(key, batch)
            except (UserError, RuntimeError):  # A device may be full.
                raise
            except Exception as error:  # A user's function may raise anything.
                raise UserError(
                    f"The function {name_of(self.init)} raised {type(error).__name__} for the "
                    f"batch {described(batch)}: {first_line(error)} It must be "
                    f"{_SIGNATURES['init']}."
                ) from error
            require_arrays(state)
            return state, ()

        def apply(
            state: Params, model_state: ModelState, inputs: Inputs, key: Key | None, train: bool
        ) -> tuple[Outputs, ModelState]:
            return self.apply(state, inputs), model_state  # type: ignore[misc]  # See `has_apply`.

        return Member(init, apply, name=name_of(self.step), has_apply=self.apply is not None)

    @pinned_generator()
    def __call__(
        self, state: State, batch: Batch, index: jax.Array | None = None
    ) -> tuple[State, Metrics]:
        """Returns the state after one step, and the metrics of the step by name, float32[].

        Args:
            state: State of the member.
            batch: Batch of the step, any pytree.
            index: Positions of the batch's examples in the training split, which are not used.

        Raises:
            UserError: If the step returns something else than a state like the given one and a dict
                of numbers.
        """
        key = jax.random.fold_in(jax.random.fold_in(state.key, UPDATE), state.step)
        with explained_errors("step"):
            results = self.step(state.params, batch, key)
        if not isinstance(results, tuple) or len(results) != 2:
            found = f"a tuple of {len(results)}" if isinstance(results, tuple) else _kind(results)
            raise UserError(f"The step returned {found}. A step is {_SIGNATURES['step']}.")
        new, metrics = _like(state.params, results[0]), _numbers(results[1])
        if not self.failures.is_checked:
            state = state._replace(params=new)
        elif self.failures.loss_threshold is not None and "loss" not in metrics:
            raise UserError(
                "The policy for failures has a loss_threshold, and the metrics of the step have no "
                "'loss'. Return the loss under this name, or leave loss_threshold out."
            )
        else:
            state, metrics = taken_unless_failed(
                self.failures,
                lambda old, new: old._replace(params=new),
                state,
                metrics,
                _stays_finite(state.params, new),
                NEW_STATE,
                new,
            )
        return without_weak_types(state._replace(step=state.step + 1)), metrics


def loss_of_scoring(
    objective: Objective | None, eval_loss: Callable[..., PyTree] | None, *, has_apply: bool
) -> Objective | LossFunction | None:
    """Returns the loss by which a user's own step is scored; None without one.

    Args:
        objective: Objective that reads the outputs of `apply`.
        eval_loss: Function `eval_loss(state, batch, key) -> (loss, metrics)`.
        has_apply: Whether the members have a forward pass `apply`.

    Raises:
        UserError: If both are given, the objective standardises labels or has no outputs to read,
            or one is something else.
    """
    if objective is not None and eval_loss is not None:
        raise UserError("Both objective and eval_loss are given. Leave one of them out.")
    if eval_loss is None:
        if objective is not None and not isinstance(objective, Objective):
            raise UserError(
                f"objective is {kind_of(objective)}. Give one such as "
                f"dist_ens.losses.categorical(10), or a function as {_SIGNATURES['eval_loss']}."
            )
        if objective is not None and objective.standardize:
            raise UserError(
                f"{objective.name}(standardize=True) needs labels that fit standardises, and a "
                "step of your own sees them as they are. Leave standardize out."
            )
        if objective is not None and not has_apply:
            raise UserError(
                f"The objective {objective.name} scores the outputs of apply, and the ensemble "
                f"has none. Give from_step a function {_SIGNATURES['apply']}, or use eval_loss."
            )
        return objective
    _require_call("eval_loss", eval_loss)

    # The argument `train` says that the function knows that it is called in evaluation.
    def loss(
        state: Params, model_state: ModelState, batch: Batch, key: Key, train: bool
    ) -> LossResults:
        results = eval_loss(state, batch, key)
        if not isinstance(results, tuple) or len(results) != 2:
            raise UserError(
                f"eval_loss returned {_kind(results)}. It must be {_SIGNATURES['eval_loss']}."
            )
        value, metrics = results
        return value, (model_state, metrics)

    return loss


def _require_call(name: str, fn: object) -> None:
    """Raises a `UserError` unless a function can be called as `_SIGNATURES` says."""
    signature = _SIGNATURES[name]
    if not callable(fn) or isinstance(fn, type):
        raise UserError(f"{name} is {kind_of(fn)}. Give a function {signature}.")
    error = call_error(fn, signature.partition(")")[0].count(",") + 1)
    if error is not None:
        raise UserError(
            f"The function {name_of(fn)}{inspect.signature(fn)} cannot be called as {name}: "
            f"{error}. It must be {signature}."
        )


def _like(old: Tree, new: PyTree) -> Tree:
    """Returns a new state without weak types, after a check that it is like the old one."""
    before, after = leaf_types(old), leaf_types(new)
    for leaf in differing(before, after):
        raise UserError(
            f"The step returned a state whose leaf {leaf} is {after.get(leaf, 'absent')}, and it "
            f"was given {before.get(leaf, 'no such leaf')}. Return the state with the structure, "
            "shapes and types that it has after init."
        )
    structures: list[Structure] = [jax.tree.structure(tree) for tree in (new, old)]
    if structures[0] != structures[1]:
        raise UserError(
            f"The step returned a state of the structure {structure_text(structures[0])}, and it "
            f"was given {structure_text(structures[1])}. Return the structure that it has after "
            "init."
        )
    return without_weak_types(new)


def _numbers(metrics: object) -> Metrics:
    """Returns the metrics of a step as float32[]; raises a `UserError` if they are no numbers."""
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"The metrics of the step are {_kind(metrics)}, not a dict of numbers by name. A step "
            f"is {_SIGNATURES['step']}. Return {{}} as metrics if there are none."
        )
    for name, value in metrics.items():
        is_number = isinstance(value, bool | int | float) or hasattr(value, "dtype")
        if not is_number or jnp.shape(value) != () or jnp.iscomplexobj(value):
            raise UserError(
                f"The metric {name!r} of the step is {_kind(value)}, and it must be one real "
                "number. Average it, or leave it out."
            )
    return {name: jnp.asarray(value).astype(jnp.float32) for name, value in metrics.items()}


def _stays_finite(old: PyTree, new: PyTree) -> jax.Array:
    """Returns whether every finite number of a state is finite in the new one, bool[].

    A number that is infinite already may stay so, such as a mask or the best loss so far.
    """
    stay = [
        jnp.all(jnp.isfinite(after) | ~jnp.isfinite(before))
        for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if jnp.issubdtype(after.dtype, jnp.inexact)
    ]
    return jnp.stack(stay).all() if stay else jnp.bool_(True)


def _kind(value: object) -> str:
    return f"an array {leaf_type(value)}" if hasattr(value, "shape") else kind_of(value)
