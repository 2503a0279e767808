"""The training step of one member, with gradients averaged over the data axis."""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax

from dist_ens.config.failure_policy import FailurePolicy
from dist_ens.ensemble.argument_checks import check_microbatches
from dist_ens.ensemble.conditional_update import Updated
from dist_ens.ensemble.failures import checked_update
from dist_ens.ensemble.loss_checks import check_loss_outputs, explained_errors
from dist_ens.ensemble.optimizer import calls_loss, loss_functions, update_of
from dist_ens.layout import data_index, data_mean, data_size, data_sum
from dist_ens.losses import Objective
from dist_ens.losses.averaging import averaged, traced_anew, tracing_loss
from dist_ens.methods import LossInfo, MemberLoss
from dist_ens.methods.loss import LossResults
from dist_ens.randomness import OPTIMIZER, UPDATE, pinned_generator
from dist_ens.state import State, without_weak_types
from dist_ens.types import Batch, Gradients, Key, Metrics, ModelState, Optimizer, Params, PyTree

# State without parameters, batch, positions and key, with which a loss is computed again.
Again: TypeAlias = tuple[State, Batch, jax.Array | None, Key]
# Name of the metric that is 1 if all weights of a batch were zero, and 0 otherwise.
ZERO_WEIGHTS = "zero_weights"


@dataclasses.dataclass(frozen=True)
class GradientStep:
    """A step of one member on one column's part of the batch.

    Attributes:
        loss: Loss of the member.
        optimizer: Optimizer of the member.
        objective: Objective of the ensemble; None if its loss is a function.
        microbatches: Number of equal parts of a device's batch that are taken one after another,
            with their gradients averaged.
        failures: Policy for failed updates.
    """

    loss: MemberLoss
    optimizer: Optimizer
    objective: Objective | None
    microbatches: int = 1
    failures: FailurePolicy = dataclasses.field(default_factory=FailurePolicy)

    @pinned_generator()
    def __call__(
        self, state: State, batch: Batch, index: jax.Array | None = None
    ) -> tuple[State, Metrics]:
        """Returns the state after one step, and the metrics before it.

        Args:
            state: State of the member.
            batch: This column's part of the batch, leaves [batch, ...].
            index: Positions of the batch's examples in the training split, int32[batch]. Default:
                the positions are unknown.

        Returns:
            The new state, and metrics by name, float32[]: `loss` and the auxiliary values of the
            loss, averaged over the columns of the mesh.
        """
        key = jax.random.fold_in(jax.random.fold_in(state.key, UPDATE), state.step)
        key = jax.random.fold_in(key, data_index())
        grads, model_state, metrics = self._gradients(state, batch, index, key)
        grads, (model_state, metrics) = data_sum(grads), data_mean((model_state, metrics))
        of_step = jax.random.fold_in(jax.random.fold_in(state.key, OPTIMIZER), state.step)

        # The parameters are those that the optimizer asks for.
        rest = state._replace(params=(), opt_state=(), failures=())
        again: Again | None = (rest, batch, index, key)
        loss = metrics["loss"]
        if self.failures.is_checked:
            extra = {"value": loss, "grad": grads, "key": of_step}
            if not calls_loss(self.optimizer, grads, state.opt_state, state.params, **extra):
                again = None
            state, metrics = checked_update(
                self.failures, self._taken, state, grads, model_state, metrics, of_step, again
            )
        else:
            old = Updated.of(state)
            state = self._taken(old, grads, model_state, loss, of_step, again).put_in(state)
        return without_weak_types(state._replace(step=state.step + 1)), metrics

    def _taken(
        self,
        old: Updated,
        grads: Gradients,
        model_state: ModelState,
        loss: jax.Array,
        key: Key,
        again: Again | None,
    ) -> Updated:
        """Returns what an update changes, after the update.

        Args:
            old: Values before the update.
            grads: Gradients of the update, averaged over the data axis.
            model_state: Model state after the update.
            loss: Loss of the update, float32[].
            key: Key of the optimizer for this update.
            again: Values with which the optimizer may compute the loss again, at other parameters.
                None if it does not.
        """
        functions = {}
        if again is not None:
            state, batch, index, key_of_loss = again

            def value_and_grad(params: Params) -> tuple[jax.Array, Gradients]:
                grads, _, metrics = self._gradients(
                    state._replace(params=params), batch, index, key_of_loss
                )
                return data_mean(metrics["loss"]), data_sum(grads)

            functions = loss_functions(value_and_grad)
        updates, opt_state = update_of(
            self.optimizer,
            grads,
            old.opt_state,
            old.params,
            value=loss,
            grad=grads,
            key=key,
            **functions,
        )
        params = optax.apply_updates(old.params, updates)
        return without_weak_types(Updated(params, model_state, opt_state))

    def _gradients(
        self, state: State, batch: Batch, index: jax.Array | None, key: Key
    ) -> tuple[Gradients, ModelState, Metrics]:
        """Returns gradients, model state and metrics of this column's part of the batch.

        The differentiated loss is this part's share of the global mean, so the gradients are summed
        over the parts. A network may use the gradient of an example in its backward pass, for
        example to clip it. That gradient does not depend on how the batch is divided. The gradient
        of a parameter in the backward pass is that of this part alone.
        """
        parts = data_size() * self.microbatches

        def loss_of(
            params: Params,
            model_state: ModelState,
            batch: Batch,
            index: jax.Array | None,
            key: Key,
            totals: list[jax.Array] | None,
        ) -> LossResults:
            info = LossInfo(key, state.key, state.member_id, index, self.objective)

            def checked(params: Params, model_state: ModelState, batch: Batch) -> LossResults:
                with (
                    tracing_loss(totals, is_of_part=self.microbatches > 1) as scope,
                    explained_errors(),
                ):
                    results = averaged(self.loss(params, model_state, batch, info))
                    loss, new_state, metrics = check_loss_outputs(results, model_state)
                if scope.all_zero:
                    zero = jnp.stack(scope.all_zero).any().astype(jnp.float32)
                    metrics = {**metrics, ZERO_WEIGHTS: zero}
                return loss / parts, (new_state, metrics)

            return traced_anew(checked)(params, model_state, batch)

        gradients = jax.grad(loss_of, has_aux=True)
        if self.microbatches == 1:
            grads, (model_state, metrics) = gradients(
                state.params, state.model_state, batch, index, key, None
            )
            return grads, model_state, metrics
        return self._accumulated(gradients, state, batch, index, key)

    def _accumulated(
        self,
        gradients: Callable[..., tuple[Gradients, tuple[ModelState, Metrics]]],
        state: State,
        batch: Batch,
        index: jax.Array | None,
        key: Key,
    ) -> tuple[Gradients, ModelState, Metrics]:
        """Returns gradients, model state and metrics of a batch that is taken in microbatches."""
        count = self.microbatches
        for leaf in jax.tree.leaves(batch):
            check_microbatches("microbatches", count, leaf.shape[0])
        in_parts = jax.tree.map(
            lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), (batch, index)
        )
        numbers = jnp.arange(count)
        totals = self._total_weights(state, in_parts, numbers, key)

        def accumulate(
            carry: tuple[ModelState, PyTree], part: tuple[PyTree, jax.Array]
        ) -> tuple[PyTree, None]:
            model_state, total = carry
            (batch, index), number = part
            grads, (model_state, metrics) = gradients(
                state.params, model_state, batch, index, jax.random.fold_in(key, number), totals
            )
            return (model_state, jax.tree.map(jnp.add, total, (grads, metrics))), None

        first = jax.tree.map(lambda leaf: leaf[0], in_parts)
        shapes = jax.eval_shape(gradients, state.params, state.model_state, *first, key, totals)
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[0], shapes[1][1]))
        (model_state, total), _ = jax.lax.scan(
            accumulate, (state.model_state, nothing), (in_parts, numbers)
        )
        grads, metrics = total
        return grads, model_state, jax.tree.map(lambda leaf: leaf / count, metrics)

    def _total_weights(
        self, state: State, in_parts: PyTree, numbers: jax.Array, key: Key
    ) -> list[jax.Array] | None:
        """Returns the sums over all microbatches of the weights that the loss gives `batch_mean`.

        The sums are divided by the number of microbatches. The mean of the microbatches' losses is
        then the mean over the whole batch. A forward pass computes the weights, and the compiler
        drops the operations that they do not depend on.

        Returns:
            One sum for each call of `batch_mean` with weights; None if there are none.
        """

        def weights_of(part: PyTree) -> list[jax.Array]:
            (batch, index), number = part
            info = LossInfo(
                jax.random.fold_in(key, number),
                state.key,
                state.member_id,
                index,
                self.objective,
            )

            def weights(params: Params, model_state: ModelState, batch: Batch) -> list[jax.Array]:
                with tracing_loss(is_of_part=True) as scope, explained_errors():
                    averaged(self.loss(params, model_state, batch, info))
                return list(scope.weights)

            return traced_anew(weights)(state.params, state.model_state, batch)

        first = jax.tree.map(lambda leaf: leaf[0], (in_parts, numbers))
        if not jax.eval_shape(weights_of, first):
            return None
        sums = jax.lax.map(weights_of, (in_parts, numbers))
        return [leaf.sum(axis=0) / self.microbatches for leaf in sums]
