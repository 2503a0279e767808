"""The step that a user wrote for one member, in place of a loss and an optimizer."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from dist_ens.ensemble.checks import explained_errors, parts_text, require_same
from dist_ens.ensemble.conditional_update import Updated, take_if_running
from dist_ens.ensemble.failure_policy import FailurePolicy
from dist_ens.ensemble.failures import NEW_STATE, taken_unless_failed
from dist_ens.ground.errors import UserError, name_of
from dist_ens.ground.randomness import key_of_step, pinned_generator
from dist_ens.ground.shared import NOTHING_SHARED, Shared
from dist_ens.ground.state import State, require_arrays, without_weak_types
from dist_ens.ground.types import Batch, Inputs, Key, Metrics, ModelState, Outputs, Params, PyTree
from dist_ens.losses import Objective
from dist_ens.members import Member
from dist_ens.members.modes import given_arguments
from dist_ens.methods import LossFunction
from dist_ens.methods.loss import LossResults
from dist_ens.sampling.hyper import Given

_SIGNATURE = "step(state, batch, key) -> (state, metrics)"


@dataclasses.dataclass(frozen=True)
class OwnStep:
    """A step of one member that a user wrote; see `Ensemble.from_step`.

    It is called as a `GradientStep` is. The state of the user is the `params` of a `State`, whose
    `model_state` and `opt_state` are empty.
    """

    init: Callable[[Key, Batch], PyTree]
    step: Callable[[PyTree, Batch, Key], tuple[PyTree, Metrics]]
    apply: Callable[[PyTree, Inputs], Outputs] | None = None
    failure_policy: FailurePolicy = dataclasses.field(default_factory=FailurePolicy)

    @property
    def member(self) -> Member:
        """The member with the initialiser and the forward pass."""

        def init(key: Key, batch: Batch, **given: PyTree) -> tuple[Params, ModelState]:
            state = self.init(key, batch, **given_arguments(self.init, given))
            require_arrays(state)
            return state, ()

        def apply(
            state: Params,
            model_state: ModelState,
            inputs: Inputs,
            key: Key | None,
            train: bool,
            **given: PyTree,
        ) -> tuple[Outputs, ModelState]:
            forward: Callable[..., Outputs] = self.apply  # type: ignore[assignment]  # See `has_apply`.
            return forward(state, inputs, **given_arguments(forward, given)), model_state

        has_apply = self.apply is not None
        name = name_of(self.step)
        return Member(init, apply, name=name, has_apply=has_apply, takes_given=True)

    @pinned_generator()
    def __call__(
        self,
        state: State,
        batch: Batch,
        index: jax.Array | None = None,
        shared: Shared = NOTHING_SHARED,
    ) -> tuple[State, Metrics]:
        """Returns the state after one step, and the metrics of the step by name, float32[]."""
        key = key_of_step(state.key, state.step)
        with explained_errors("step"):
            settings = given_arguments(
                self.step, {"hyper": Given(state.hyper), "shared": shared.arrays}
            )
            new, metrics = _results(self.step(state.params, batch, key, **settings), state.params)

        def update(old: Updated, new: PyTree) -> Updated:
            return old._replace(params=new)

        if not self.failure_policy.is_checked:
            state = take_if_running(update, state, new)
        else:
            is_finite = _stays_finite(state.params, new)
            state, metrics = taken_unless_failed(
                self.failure_policy, update, state, metrics, is_finite, NEW_STATE, new
            )
        return without_weak_types(state._replace(step=state.step + 1)), metrics


def loss_of_scoring(
    objective: Objective | None, eval_loss: Callable[..., PyTree] | None, *, has_apply: bool
) -> Objective | LossFunction | None:
    """Returns the loss by which a user's own step is scored; None without one."""
    if objective is not None and (objective.standardize or eval_loss or not has_apply):
        raise UserError(
            f"The objective {objective.name} scores the outputs of apply for labels as they are. "
            "Give from_step a function apply, and leave standardize and eval_loss out."
        )
    if eval_loss is None:
        return objective

    # The argument `train` says that the function knows that it is called in evaluation.
    def loss(
        state: Params,
        model_state: ModelState,
        batch: Batch,
        key: Key,
        train: bool,
        hyper: PyTree,
        shared: PyTree,
    ) -> LossResults:
        given = given_arguments(eval_loss, {"hyper": hyper, "shared": shared})
        value, metrics = eval_loss(state, batch, key, **given)
        return value, (model_state, metrics)

    return loss


def _results(results: object, old: PyTree) -> tuple[PyTree, Metrics]:
    """Returns the new state of a step, and its metrics, float32[]."""
    match results:
        case (new, Mapping() as metrics):
            pass
        case _:
            raise UserError(f"The step returned {parts_text(results)}. It must be {_SIGNATURE}.")
    require_same("step returned a state", new, old)
    for name, value in metrics.items():
        if jnp.shape(value) != () or jnp.iscomplexobj(value):
            raise UserError(
                f"The metric {name!r} of the step is {parts_text(value)}, and it must be one real "
                "number. Average it, or leave it out."
            )
    in_float32 = {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}
    return without_weak_types(new), in_float32


def _stays_finite(old: PyTree, new: PyTree) -> jax.Array:
    """Returns whether every finite number of a state, so no mask of -inf, stays finite, bool[]."""
    stay = [
        jnp.all(jnp.isfinite(after) | ~jnp.isfinite(before))
        for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
        if jnp.issubdtype(after.dtype, jnp.inexact)
    ]
    return jnp.stack(stay).all() if stay else jnp.bool_(True)
