"""The training step of one member on the whole batch."""

import dataclasses
from functools import partial
from typing import TypeAlias

import jax
import optax

from dist_ens.ensemble.checks import explained_errors, loss_outputs
from dist_ens.ensemble.conditional_update import Updated, take_if_running
from dist_ens.ensemble.failure_policy import FailurePolicy
from dist_ens.ensemble.failures import GRADIENT, are_finite, taken_unless_failed
from dist_ens.ensemble.microbatches import Loss, gradients_in_parts
from dist_ens.ensemble.optimizer import (
    calls_loss,
    loss_functions,
    optimizer_of,
    update_of,
)
from dist_ens.ground.randomness import OPTIMIZER, key_of_step, pinned_generator
from dist_ens.ground.shared import NOTHING_SHARED, Shared
from dist_ens.ground.state import State, without_weak_types
from dist_ens.ground.types import (
    Batch,
    Gradients,
    Key,
    Metrics,
    ModelState,
    OptimizerOfMember,
    Params,
    PyTree,
)
from dist_ens.layout import gathered, is_kept
from dist_ens.losses import Objective
from dist_ens.losses.averaging import averaged
from dist_ens.methods import LossInfo, MemberLoss
from dist_ens.methods.loss import LossResults
from dist_ens.sampling.hyper import Given

# State without parameters, shared arrays, examples and key, with which a loss is computed again.
Again: TypeAlias = tuple[State, Shared, PyTree, Key]


@dataclasses.dataclass(frozen=True)
class GradientStep:
    """A step of one member on the whole batch: a gradient of the loss, and an update."""

    loss: MemberLoss
    optimizer: OptimizerOfMember
    objective: Objective | None
    microbatches: int = 1
    failure_policy: FailurePolicy = dataclasses.field(default_factory=FailurePolicy)
    gathers_params: bool = False

    @pinned_generator()
    def __call__(
        self,
        state: State,
        batch: Batch,
        index: jax.Array | None = None,
        shared: Shared = NOTHING_SHARED,
    ) -> tuple[State, Metrics]:
        """Returns the state after one step, and the metrics before; `index` is int32[batch]."""
        key = key_of_step(state.key, state.step)
        of_step = key_of_step(state.key, state.step, OPTIMIZER)
        rest = state._replace(params=(), opt_state=(), failures=(), stopping=())
        of_loss = rest, shared, (batch, index), key
        again: Again | None = of_loss
        grads, model_state, metrics = self._gradients(state.params, of_loss)
        loss = metrics["loss"]
        if self.failure_policy.is_checked or state.stopping != ():
            optimizer = optimizer_of(self.optimizer, state.hyper)
            extra = {"value": loss, "grad": grads, "key": of_step}
            if not calls_loss(optimizer, grads, state.opt_state, state.params, **extra):
                again = None  # The condition of the update would have to pass it on.
        args = grads, model_state, loss, of_step, state.hyper, again
        if self.failure_policy.is_checked:
            is_finite, update = are_finite(grads), self._apply_update
            state, metrics = taken_unless_failed(
                self.failure_policy, update, state, metrics, is_finite, GRADIENT, *args
            )
        else:
            state = take_if_running(self._apply_update, state, *args)
        return without_weak_types(state._replace(step=state.step + 1)), metrics

    def loss_of(self, state: State, shared: Shared) -> Loss:
        """Returns the loss of one member, `loss(params, model_state, (batch, index), key)`."""

        def loss(
            params: Params, model_state: ModelState, examples: PyTree, key: Key
        ) -> LossResults:
            batch, index = examples
            info = LossInfo(
                key,
                state.key,
                state.member_id,
                index,
                self.objective,
                hyper=Given(state.hyper),
                shared=gathered(shared) if self.gathers_params else shared,
            )
            with explained_errors():
                results = self.loss(params, model_state, batch, info)
                value, new_state, metrics = loss_outputs(results, model_state)
            return value, (new_state, metrics)

        if not self.gathers_params:
            return loss

        def of_parts(params: Params, *args: PyTree) -> LossResults:
            return loss(gathered(params), *args)

        # The whole parameters are not kept for the backward pass, which gathers them again.
        return jax.checkpoint(of_parts, policy=is_kept)

    def _gradients(self, params: Params, again: Again) -> tuple[Gradients, ModelState, Metrics]:
        state, shared, examples, key = again
        loss, args = self.loss_of(state, shared), (params, state.model_state, examples, key)
        if self.microbatches > 1:
            return gradients_in_parts(loss, self.microbatches, *args)
        gradient = jax.grad(lambda *args: averaged(loss(*args)), has_aux=True)
        grads, (model_state, metrics) = gradient(*args)
        return grads, model_state, metrics

    def _apply_update(
        self,
        old: Updated,
        grads: Gradients,
        model_state: ModelState,
        loss: jax.Array,
        key: Key,
        hyper: PyTree,
        again: Again | None,
    ) -> Updated:
        """Returns what an update changes, after the update."""
        extra = {"value": loss, "grad": grads, "key": key}
        if again is not None:
            extra |= loss_functions(partial(self._gradients, again=again))
        optimizer = optimizer_of(self.optimizer, hyper)
        updates, opt_state = update_of(optimizer, grads, old.opt_state, old.params, **extra)
        params = optax.apply_updates(old.params, updates)
        return without_weak_types(Updated(params, model_state, opt_state))
