"""The programs of an ensemble, each traced and compiled when it is first used."""

import dataclasses
import logging
from collections.abc import Callable, Hashable
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from numpy.typing import ArrayLike

from dist_ens.ensemble.batches import Batches, CallBatches, as_batches
from dist_ens.ensemble.checks import explained_errors, require_rows
from dist_ens.ensemble.gradient_step import GradientStep
from dist_ens.ensemble.initial_state import Initializer, inputs_of, shapes_of, state_of_one
from dist_ens.ensemble.memory import explained_memory
from dist_ens.ensemble.microbatches import microbatch_warning
from dist_ens.ensemble.optimizer import evaluates_others, evaluation_params
from dist_ens.ensemble.own_step import OwnStep
from dist_ens.ensemble.update_steps import (
    Step,
    Update,
    WithShared,
    dispatched,
    results_in_waves,
    steps_of_all,
    update_in_waves,
)
from dist_ens.execution.apply import over_members
from dist_ens.execution.heuristics import ONE_BY_ONE
from dist_ens.execution.lift import Lifted, of_all_members
from dist_ens.execution.spec import AUTO, Execution
from dist_ens.ground.errors import UserError
from dist_ens.ground.narrowing import host_array
from dist_ens.ground.randomness import PREDICT, pinned_generator
from dist_ens.ground.shared import Shared
from dist_ens.ground.state import State
from dist_ens.ground.types import Array, Batch, Inputs, Key, Metrics, Outputs, PyTree, Shapes, Specs
from dist_ens.layout import (
    BATCH,
    BATCHES,
    MEMBER_BATCH,
    MEMBER_BATCHES,
    MEMBERS,
    REPLICATED,
    Waves,
    specs_of_batch,
    without_axes,
)
from dist_ens.losses import Objective, Prediction, predict_leaves
from dist_ens.losses.distribution import checked_weights, passed
from dist_ens.members.member import member_label_scale
from dist_ens.methods import MemberLoss, loss_of_function, loss_of_objective
from dist_ens.processes import cluster

if TYPE_CHECKING:
    from dist_ens.ensemble.ensemble import Ensemble


class Programs:
    """The programs of an ensemble, which are compiled once and found again by later calls.

    Attributes:
        variants: Ensembles of the same members on another layout or with another execution.
        elsewhere: Ensembles of some of the members.
        evaluation: Programs that score the ensemble, which the room of evaluation keeps here.
    """

    def __init__(self, ensemble: "Ensemble") -> None:
        self._ensemble = ensemble
        self._initializers: dict[Hashable, Initializer] = {}
        self._steps: dict[Hashable, Callable[[State, Batch], PyTree]] = {}
        self._evaluates_others: bool | None = None
        self.variants: dict[Hashable, Ensemble] = {}
        self.elsewhere: dict[Hashable, Ensemble] = {}
        self.evaluation: dict[Hashable, Any] = {}

    @cached_property
    def bare_loss(self) -> MemberLoss:
        """The loss of one member without methods, `loss(params, model_state, batch, info)`."""
        ensemble = self._ensemble
        loss = ensemble.loss
        if isinstance(loss, Objective):
            return loss_of_objective(loss, ensemble.network)
        if loss is None:
            raise UserError(
                "This ensemble has a step of its own and nothing to score it by. Give from_step or "
                "evaluate an objective, or eval_loss(state, batch, key) -> (loss, metrics)."
            )
        return ensemble.member.adapt_loss(loss_of_function(loss, ensemble.compute_dtype))

    @cached_property
    def gradient_step(self) -> GradientStep | OwnStep:
        """The step of one member on the whole batch, including the methods."""
        ensemble = self._ensemble
        if ensemble.own_step is not None:
            return dataclasses.replace(ensemble.own_step, failure_policy=ensemble.failure_policy)
        return GradientStep(
            reduce(lambda inner, method: method(inner), ensemble.methods, self.bare_loss),
            ensemble.optimizer,
            ensemble.objective,
            ensemble.microbatches,
            ensemble.failure_policy,
        )

    @cached_property
    def step(self) -> Step:
        """The step of one member, which is traced once for all programs that contain it."""
        step = self.gradient_step
        if self._ensemble.layout.is_fsdp and isinstance(step, GradientStep):
            step = dataclasses.replace(step, gathers_params=True)
        return jax.jit(step, inline=True)

    def initializer(self, batch: Batch) -> Initializer:
        """Returns the program that makes the state for batches of such shapes and types."""
        ensemble = self._ensemble
        shapes = shapes_of(inputs_of(ensemble, batch))
        key = (jax.tree.structure(shapes), *jax.tree.leaves(shapes))
        if key not in self._initializers:
            make = state_of_one(
                ensemble.network,
                ensemble.optimizer,
                shapes,
                is_checked=ensemble.failure_policy.is_checked,
            )
            self._initializers[key] = Initializer(
                make, ensemble.layout, ensemble.waves, ensemble.hyper, ensemble.shared
            )
        return self._initializers[key]

    def update(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Updates every member on one batch; see `Ensemble.update`."""
        ensemble = self._ensemble
        # A dict of specs names the leaves of one structure of batches.
        key = None if isinstance(ensemble.batch_specs, str) else jax.tree.structure(batch)
        with explained_errors(), explained_memory(ensemble):
            if key not in self._steps:
                self._steps[key] = self._step_for(state, batch)
            return self._steps[key](state, batch)

    def with_shared(self, batches: CallBatches | PyTree) -> CallBatches:
        """Returns the batches of a call with the arrays that all members share."""
        return dataclasses.replace(as_batches(batches), shared=self._ensemble.shared)

    def _step_for(self, state: State, batch: Batch) -> Callable[[State, Batch], PyTree]:
        """Returns the program of one step for batches like the given one."""
        ensemble = self._ensemble
        specs = specs_of_batch(ensemble.batch_specs, batch)
        if ensemble.microbatches > 1:
            placed = ensemble.layout.placed(batch, specs, "The batch")
            batches = Batches(jax.tree.map(lambda leaf: leaf[None], placed))
            warning = microbatch_warning(ensemble, state, batches)
            if warning is not None and cluster.is_main():
                logging.warning(warning)

        def in_waves(state: State, batch: Batch) -> tuple[State, Metrics]:
            of_step = jax.tree.map(host_array, batch)
            batches = Batches.put(ensemble.layout, [of_step], specs)
            state, metrics = self.update_steps(state, batches)
            return state, {name: values[0] for name, values in metrics.items()}

        if ensemble.waves > 1:
            return in_waves
        step = Lifted(
            lambda state, batch, shared: self.step(state, batch, None, shared),
            layout=ensemble.layout,
            in_specs=(MEMBERS, specs, REPLICATED),
            out_specs=MEMBERS,
            # A single step is neither scanned nor dispatched with others.
            execution=dataclasses.replace(self._execution, steps=None),
            donate_argnums=(0,),
            names=("The state", "The batch", "The shared arrays"),
        )
        return Completed(step, ensemble.shared)

    @cached_property
    def update_steps(self) -> Update:
        """The update of several steps in one call; see `Ensemble.update_steps`."""
        ensemble = self._ensemble
        if ensemble.waves > 1:
            waves = Waves(ensemble.layout, ensemble.waves)
            return update_in_waves(waves, ensemble.of_wave.update_steps)
        execution = self._execution
        if ensemble.shared.is_empty:
            return dispatched(self.step, ensemble.layout, execution)
        if execution.steps is None and execution.members in ("unroll", "map", "chunk"):
            # A loop over steps inside that over members would hide what the members share.
            execution = dataclasses.replace(execution, steps="single")
        return WithShared(dispatched(self.step, ensemble.layout, execution), self.with_shared)

    @cached_property
    def _execution(self) -> Execution:
        ensemble = self._ensemble
        is_divided = ensemble.layout.model_axis > 1 and ensemble.execution == AUTO
        return Execution.parse("loop" if is_divided else ensemble.execution)

    def trace_update(self, state: State, batches: CallBatches | PyTree) -> None:
        """Traces `update_steps` in the ensemble's own execution, to raise any error of tracing."""
        update = steps_of_all(self.step, self._ensemble.layout, self._execution)
        jax.eval_shape(update, state, self.with_shared(batches))

    @cached_property
    def plain_update(self) -> jax.stages.Wrapped:
        """The update of one member after another, without lowerings."""
        return jax.jit(steps_of_all(self.step, self._ensemble.layout, ONE_BY_ONE))

    @cached_property
    def outputs(self) -> Callable[[State, Inputs], Outputs]:
        """The outputs of all members for inputs on the layout; see `Ensemble.outputs`."""
        ensemble = self._ensemble
        if ensemble.waves > 1:
            waves = Waves(ensemble.layout, ensemble.waves)
            return results_in_waves(waves, ensemble.of_wave.outputs, MEMBER_BATCH)
        if ensemble.layout.model_axis > 1:
            of_members = Lifted(
                self._outputs_of_one,
                layout=ensemble.layout,
                in_specs=self._output_specs,
                out_specs=self._spec_of_outputs,
                execution=self._execution,
                names=("The state", "The inputs", "The shared arrays"),
            )
            flat = jax.jit(self._of_predictors)
            return lambda state, inputs: flat(of_members(state, inputs, ensemble.shared))
        return Completed(jax.jit(self._outputs), ensemble.shared)

    def output_shapes(self, state: Shapes, inputs: Shapes) -> Shapes:
        """Returns the shapes and types of the outputs of all members."""
        return jax.eval_shape(self._outputs, state, inputs, self._ensemble.shared)

    def _outputs(self, state: State, inputs: Inputs, shared: Shared) -> Outputs:
        of_members = of_all_members(
            self._outputs_of_one,
            self._ensemble.layout,
            self._output_specs,
            self._spec_of_outputs,
            self._execution,
        )
        return self._of_predictors(of_members(state, inputs, shared))

    def outputs_without_mesh(
        self, state: State, inputs: Inputs, shared: Shared, execution: Execution
    ) -> Outputs:
        """Returns the outputs of all members as the program of one device, not yet jitted."""
        of_one = without_axes(self._outputs_of_one)
        of_members = over_members(of_one, execution, (0, None, None), 0)
        return self._of_predictors(of_members(state, inputs, shared))

    def _of_predictors(self, outputs: Outputs) -> Outputs:
        """Returns outputs [members, heads, batch, ...] as [members * heads, batch, ...]."""
        if self._ensemble.heads is None:
            return outputs
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)

    @property
    def _spec_of_outputs(self) -> Specs:
        # The heads of a member follow its axis, as the steps of a call do.
        return MEMBER_BATCH if self._ensemble.heads is None else MEMBER_BATCHES

    @property
    def _output_specs(self) -> tuple[Specs, Specs, Specs]:
        return MEMBERS, BATCHES if self._ensemble.num_groups > 1 else BATCH, REPLICATED

    @cached_property
    def _outputs_of_one(self) -> Callable[[State, Inputs, Shared], Outputs]:
        ensemble = self._ensemble
        network, samples = ensemble.network, ensemble.dropout_samples
        in_groups = ensemble.num_groups > 1

        @pinned_generator()
        def of_one(state: State, inputs: Inputs, shared: Shared) -> Outputs:
            params = evaluation_params(state.params, state.opt_state)
            given = network.given(state.hyper, shared)
            own = inputs
            if in_groups:
                group = state.member_id % ensemble.num_groups
                own = jax.tree.map(lambda leaf: leaf[group], inputs)

            key = jax.random.fold_in(state.key, PREDICT)
            if samples is None:
                outputs = given.evaluate(params, state.model_state, own, key)[0]
                return require_rows(ensemble.objective, outputs, own, network.heads)

            def sample(key: Key) -> Outputs:
                outputs = given.apply(params, state.model_state, own, key, False)[0]
                return require_rows(ensemble.objective, outputs, own, network.heads)

            axis = 1 if network.heads is None else 2
            return jax.vmap(sample, out_axes=axis)(jax.random.split(key, samples))

        return of_one

    @cached_property
    def predict(self) -> Callable[[State, Inputs, np.ndarray | None], Prediction]:
        """The pooled prediction for inputs on the layout, `predict(state, inputs, weights)`."""
        ensemble = self._ensemble
        if ensemble.num_groups > 1:
            raise UserError(
                f"predict pools all members, and this ensemble has {ensemble.num_groups} groups of "
                "members that were trained on other examples. Use apply, or dist-ens predict."
            )
        if ensemble.waves > 1 or ensemble.layout.model_axis > 1:
            pool = jax.jit(self.pooled)
            return lambda state, inputs, w: pool(self.outputs(state, inputs), state, w)
        at_once = jax.jit(
            lambda state, inputs, w, shared: self.pooled(
                self._outputs(state, inputs, shared), state, w
            )
        )
        return Completed(at_once, ensemble.shared)

    def pooled(self, outputs: Outputs, state: State, weights: Array | None) -> Prediction:
        """Returns the prediction that pools outputs with weights of sum 1, not yet jitted."""
        objective, has_samples = (
            self._ensemble.objective,
            self._ensemble.dropout_samples is not None,
        )
        weights = None if weights is None else jax.numpy.asarray(weights, jax.numpy.float32)
        if objective is None:
            return predict_leaves(outputs, weights)
        samples = jax.numpy.moveaxis(outputs, 2, 1) if has_samples else outputs
        prediction = objective.distribution.predict(
            samples, has_samples=has_samples, **passed(weights)
        )
        if objective.standardize:
            prediction = prediction.in_unit(*member_label_scale(state))
        return prediction

    def checked_weights(self, weights: ArrayLike | None) -> np.ndarray | None:
        """Returns weights of the members in a pool, float64[members] with sum 1; None for none."""
        objective = self._ensemble.objective
        distribution = None if objective is None else objective.distribution
        return checked_weights(weights, self._ensemble.num_predictors, distribution)

    def needed(self, state: State) -> State:
        """Returns a state without the parts on which no prediction depends."""
        if self._evaluates_others is None:
            self._evaluates_others = evaluates_others(state.opt_state)
        if self._evaluates_others or self._ensemble.waves > 1:
            return state._replace(class_names=(), stopping=())
        return state._replace(opt_state=(), failures=(), class_names=(), stopping=())


class Completed:
    """A program whose last argument is given: the arrays that all members share."""

    def __init__(self, program: Callable[..., PyTree], shared: Shared) -> None:
        self.program, self._shared = program, shared

    def __call__(self, *args: PyTree) -> PyTree:
        """Returns the result of the program."""
        return self.program(*args, self._shared)

    def lower(self, *args: PyTree) -> jax.stages.Lowered:
        """Returns the lowered program, as `jax.jit(f).lower` does."""
        program: PyTree = self.program  # One that was compiled ahead of time has no such method.
        return program.lower(*args, self._shared)


def step_of_one(ensemble: "Ensemble") -> Callable[..., tuple[State, Metrics]]:
    """Returns the step of one member without a mesh, `step(state, batch, index, shared)`.

    The index may be None.
    """
    return without_axes(ensemble.programs.gradient_step)
