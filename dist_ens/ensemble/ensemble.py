"""`Ensemble`: the network, optimizer and loss of one member, lifted over the mesh."""

import dataclasses
import logging
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr

from dist_ens import cluster
from dist_ens.compile_cache import use_compile_cache_by_default
from dist_ens.data.checks import check_finite_inputs
from dist_ens.ensemble import initial_state
from dist_ens.ensemble.argument_checks import (
    check_batch_specs,
    checked_counts,
    checked_dtype,
    checked_ids,
    checked_methods,
    checked_policy,
    explained_inputs,
    require_rows,
    rows_for_microbatches,
    rows_of,
)
from dist_ens.ensemble.batches import Batches, CallBatches
from dist_ens.ensemble.failure_policy import FailurePolicy
from dist_ens.ensemble.failures import FailureRecord, no_failures
from dist_ens.ensemble.gradient_step import GradientStep
from dist_ens.ensemble.loss_checks import check_signature, explained_errors
from dist_ens.ensemble.memory import explained_memory
from dist_ens.ensemble.microbatch_check import microbatch_warning
from dist_ens.ensemble.optimizer import (
    evaluates_others,
    evaluation_params,
    require_optimizer,
)
from dist_ens.ensemble.own_step import OwnStep, loss_of_scoring
from dist_ens.ensemble.padding import padded_inputs, unpadded
from dist_ens.ensemble.update_steps import Step, Update, dispatched, steps_of_all
from dist_ens.ensemble.waves import batches_of_wave, results_in_waves, update_in_waves
from dist_ens.errors import UserError, counted, kind_of
from dist_ens.execution.apply import lowered
from dist_ens.execution.heuristics import candidates
from dist_ens.execution.lift import Lifted, sharded
from dist_ens.execution.spec import AUTO, Execution
from dist_ens.host_keys import host_array
from dist_ens.layout import (
    BATCH,
    BATCHES,
    MEMBER_BATCH,
    MEMBERS,
    REPLICATED,
    Layout,
    Waves,
    copied_like,
    settled,
    specs_of_batch,
    to_host,
    without_axes,
)
from dist_ens.losses import Objective, Prediction, predict_leaves
from dist_ens.members import Member, as_member, with_compute_dtype
from dist_ens.members.label_scale import (
    begin_label_scale,
    has_label_scale,
    member_label_scale,
    with_label_scale,
)
from dist_ens.methods import LossFunction, MemberLoss, Method, loss_of_function, loss_of_objective
from dist_ens.randomness import PREDICT, pinned_generator
from dist_ens.state import State, refuse_lists
from dist_ens.types import (
    Batch,
    Inputs,
    Key,
    Metrics,
    ModelState,
    Network,
    Optimizer,
    Outputs,
    Params,
    PyTree,
    Shapes,
    Specs,
)

if TYPE_CHECKING:
    from dist_ens.evaluation.calibration import Calibration


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """An ensemble of networks that share one architecture, optimizer and loss.

    Up to rounding, a member depends on the seed and its `member_id` alone. It does not depend on
    the number of members, their layout or their execution. Its step sees the whole batch.

    The programs of an ensemble are compiled once and found again by later calls. If the process has
    no folder for JAX's compilation cache, it takes that of the command line, `~/.cache/dist_ens`.

    Attributes:
        member: Network of one member, in any form that `as_member` accepts.
        optimizer: Optimizer of one member, with `init` and `update` like Optax's optimizers. It is
            given the loss as a function if it computes it again, as `optax.lbfgs()` does.
        loss: Objective, such as `losses.categorical(10)`, or a function
            `loss_fn(params, model_state, batch, key) -> (loss, (model_state, aux))`. If it also
            takes `train`, it is given True in training and False in evaluation.
        num_members: Number of members, at least 1.
        seed: Seed of all random numbers, in [0, 2**32).
        layout: Layout of members and data. Default: all devices, with the largest ensemble axis
            that divides both the members and the devices.
        execution: Execution of the members of a device: `auto`, or `WAY[+LOWERING][+STEPS]`. With
            `auto`, `fit` times the candidates; elsewhere the first candidate is used.
        methods: Transformations of the loss. The first one is applied first.
        member_ids: Ids of the members, different whole numbers from 0 on. Default: 0, 1, 2, …
        waves: Number of waves in which a device updates its members. The members of one wave are on
            the device, the others wait in the host's memory. It is raised to the next number that
            makes all waves equally large.
        microbatches: Number of equal parts of the batch that are taken one after another, with
            their gradients averaged. A warning before the first update says so if the loss of the
            batch is not the mean over its parts.
        compute_dtype: Type of the network's own arithmetic, such as "bfloat16". Default: float32.
        num_groups: Number of groups of members, each trained on other examples. A member's group
            is its id modulo this number.
        dropout_samples: Number of predictions with dropout that are averaged for each member.
            Default: one prediction without dropout.
        failures: Response to failed updates: a `FailurePolicy`, or the name of a policy, such as
            "skip". Default: updates are not checked.
        own_step: Step in place of a gradient of the loss and an update of the optimizer, which
            `from_step` sets. `loss` is then what scores the members, or None.
        batch_specs: Parts of a batch that hold no rows, and are therefore not divided over the
            data axis: a dict from their keys to "shared", such as `{"boundary": "shared"}`, or
            "shared" for the whole batch. Every host gives equal arrays for them. It matters only
            for a data axis above 1. Default: "batch", every leaf holds rows.

    Raises:
        UserError: If an argument has a value that it cannot have.

    >>> import optax
    >>> from dist_ens.losses import categorical
    >>> def init(key, inputs):
    ...     return {"w": jax.random.normal(key, (3, 2))}, ()
    >>> def apply(params, model_state, inputs, key, train):
    ...     return inputs @ params["w"], model_state
    >>> ensemble = Ensemble((init, apply), optax.sgd(0.1), categorical(2), num_members=4)
    >>> batch = {"inputs": np.ones((8, 3), np.float32), "labels": np.ones(8, np.int32)}
    >>> state = ensemble.init(batch)
    >>> state, metrics = ensemble.update(state, batch)
    >>> state.step
    Array([1, 1, 1, 1], dtype=int32)
    >>> metrics["loss"].shape
    (4,)
    """

    member: Network
    optimizer: Optimizer
    loss: Objective | LossFunction | None
    _: dataclasses.KW_ONLY
    num_members: int
    seed: int = 0
    layout: Layout = None  # type: ignore[assignment]  # None is replaced in __post_init__.
    execution: str = AUTO
    methods: Sequence[Method] = ()
    member_ids: Sequence[int] | None = None
    waves: int = 1
    microbatches: int = 1
    compute_dtype: str | None = None
    num_groups: int = 1
    dropout_samples: int | None = None
    failures: FailurePolicy | str | None = None
    own_step: OwnStep | None = None
    batch_specs: Specs = "batch"

    @classmethod
    def from_step(
        cls,
        *,
        init: Callable[[Key, Batch], PyTree],
        step: Callable[[PyTree, Batch, Key], tuple[PyTree, Metrics]],
        apply: Callable[[PyTree, Inputs], Outputs] | None = None,
        objective: Objective | None = None,
        eval_loss: Callable[[PyTree, Batch, Key], tuple[jax.Array, Metrics]] | None = None,
        num_members: int,
        seed: int = 0,
        layout: Layout | None = None,
        execution: str = AUTO,
        member_ids: Sequence[int] | None = None,
        waves: int = 1,
        failures: FailurePolicy | str | None = None,
        batch_specs: Specs = "batch",
    ) -> "Ensemble":
        """Returns an ensemble whose members take a step of your own.

        `Ensemble(network, optimizer, loss)` is the special case whose step is the gradient of a
        loss and an update of an optimizer. With a step of your own, a member may be anything that a
        step changes, such as two networks with two optimizers. The state is the `params` of the
        ensemble's `State`. The key of a step is that of a loss function, which the page on
        randomness gives.

        Args:
            init: Initialiser of one member, `init(key, batch) -> state`. The state is any pytree of
                arrays. The batch is zeros in the shapes of the data.
            step: Step of one member, `step(state, batch, key) -> (state, metrics)`. The new state
                has the structure, shapes and types of the old one, and the metrics are a dict of
                numbers. A metric "loss" is shown in the progress, but is not needed.
            apply: Forward pass of one member, `apply(state, inputs) -> outputs`, for `predict` and
                `objective`. The outputs of a row must not depend on other rows, since inputs are
                padded and data is scored in parts. Default: the members cannot predict.
            objective: Objective that scores the outputs of `apply` and gives predictions their
                distribution. Default: none.
            eval_loss: Function of one member, `eval_loss(state, batch, key) -> (loss, metrics)`, by
                which data is scored as by a loss function. Default: none.
            num_members: See `Ensemble`, as for all further arguments.
            seed: See `Ensemble`.
            layout: See `Ensemble`.
            execution: See `Ensemble`.
            member_ids: See `Ensemble`.
            waves: See `Ensemble`.
            failures: See `Ensemble`. A step fails if its metric "loss" is not finite, or if a
                finite number of the state becomes infinite or NaN.
            batch_specs: See `Ensemble`.

        Raises:
            UserError: If an argument has a value that it cannot have.

        >>> def init(key, batch):
        ...     return {"w": jax.random.normal(key, (3,)), "average": jax.numpy.zeros(3)}
        >>> def step(state, batch, key):
        ...     w = state["w"] - 0.1 * (state["w"] - batch["x"].mean(axis=0))
        ...     state = {"w": w, "average": 0.9 * state["average"] + 0.1 * w}
        ...     return state, {"norm": jax.numpy.linalg.norm(w)}
        >>> ensemble = Ensemble.from_step(init=init, step=step, num_members=4)
        >>> batch = {"x": np.ones((8, 3), np.float32)}
        >>> state, metrics = ensemble.update(ensemble.init(batch), batch)
        >>> state.params["average"].shape, metrics["norm"].shape
        ((4, 3), (4,))
        """
        own_step = OwnStep(init, step, apply)
        return cls(
            own_step.member,
            optax.identity(),
            loss_of_scoring(objective, eval_loss, has_apply=apply is not None),
            num_members=num_members,
            seed=seed,
            layout=layout,  # type: ignore[arg-type]  # None is replaced in __post_init__.
            execution=execution,
            member_ids=member_ids,
            waves=waves,
            failures=failures,
            own_step=own_step,
            batch_specs=batch_specs,
        )

    def __post_init__(self) -> None:
        use_compile_cache_by_default()
        require_optimizer(self.optimizer)
        if self.objective is None and (self.own_step is None or self.loss is not None):
            if not callable(self.loss):
                raise UserError(
                    f"The loss is {kind_of(self.loss)}. Give an objective, such as "
                    "dist_ens.losses.categorical(10), or a function "
                    "loss_fn(params, model_state, batch, key)."
                )
            check_signature(self.loss)
        if self.execution != AUTO:
            Execution.parse(self.execution)
        checked: dict[str, Any] = {
            **checked_counts(self),
            "member": as_member(self.member),
            "methods": checked_methods(self.methods),
            "compute_dtype": checked_dtype(self.compute_dtype),
            "failures": checked_policy(self.failures),
        }
        check_batch_specs(self.batch_specs, checked["microbatches"])
        if self.member_ids is not None:
            checked["member_ids"] = checked_ids(self.member_ids, checked["num_members"])
        if self.layout is None:
            devices = cluster.devices_for(checked["num_members"])
            checked["layout"] = Layout.make(checked["num_members"], devices=devices)
        elif not isinstance(self.layout, Layout):
            raise UserError(
                f"layout is {kind_of(self.layout)}, not a Layout. Make one with "
                f"Layout.make({self.num_members})."
            )
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.layout.num_members != self.num_members:
            raise UserError(
                f"The layout is for {counted(self.layout.num_members, 'member')}, and num_members "
                f"is {self.num_members}. Make the layout with Layout.make({self.num_members})."
            )
        object.__setattr__(self, "waves", Waves.at_least(self.layout, self.waves).count)

    @property
    def objective(self) -> Objective | None:
        """Objective by which the members are scored; None if the loss is a function."""
        return self.loss if isinstance(self.loss, Objective) else None

    @property
    def trained_objective(self) -> Objective | None:
        """Objective that is trained; None for a loss function or a user's own step."""
        return self.objective if self.own_step is None else None

    @property
    def failure_policy(self) -> FailurePolicy:
        """Policy for failed updates."""
        return FailurePolicy.of(self.failures)

    @property
    def uses_positions(self) -> bool:
        """Whether a method uses the positions of the examples, as `bootstrap` does."""
        return any(getattr(method, "uses_positions", False) for method in self.methods)

    def init(self, batch: Batch) -> State:
        """Returns the state at step 0, each member created on the device that holds it.

        Args:
            batch: Batch, or its shapes and types (`jax.ShapeDtypeStruct`), leaves [batch, ...].
                The network is given its inputs, `batch["inputs"]`. With a loss function, a batch
                that is no dict with this key is the inputs itself.

        Returns:
            The state, leaves [members, ...].

        Raises:
            UserError: If the batch has no inputs for the objective.
        """
        return self._initializer(batch)(self.ids, self.seed)

    def compile_init(self, batch: Batch) -> None:
        """Begins to compile the program of `init` in a thread, and does not wait.

        Args:
            batch: Batch, or its shapes and types; see `init`.
        """
        _ = self._initializer(batch).compiled

    def abstract_state(self, batch: Batch) -> State:
        """Returns shapes, types and shardings of the state; see `init`."""
        return self._initializer(batch).abstract_state

    def state_of(
        self, params: Sequence[Params], model_states: Sequence[ModelState] | None = None
    ) -> State:
        """Returns the state, at step 0, of networks that were trained elsewhere.

        Args:
            params: Parameters, one pytree for each member. They may also be modules of equinox or
                flax.nnx, or all variables of a flax.linen module, which hold a model state too.
            model_states: Model states, one for each member. Default: those that `params` hold, or
                none.

        Returns:
            The state, for predictions or further training. If the objective standardises labels,
            the labels have mean 0 and standard deviation 1 until `fit` sets them.

        Raises:
            UserError: If the members cannot be stacked, their number is not `num_members`, or they
                do not fit the network. The fit is not checked here if the shapes of the network
                depend on its inputs.
        """
        is_whole = model_states is not None and any(map(has_label_scale, model_states))
        state = initial_state.state_from(
            params,
            model_states,
            member=self.network if is_whole else self.member,
            optimizer=self.optimizer,
            layout=self.layout,
            ids=self.ids,
            seed=self.seed,
            waves=self.waves,
            is_checked=self.failure_policy.is_checked,
        )
        if self.objective is not None and self.objective.standardize:
            return begin_label_scale(self.layout, state)
        return state

    def update(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        """Updates every member on one batch.

        Labels are not standardised here, even with `standardize=True`, unless `fit` has set their
        mean and standard deviation in the state. Only `fit` knows all training labels.

        The values of labels are not checked here, as they may be on a device. A class of -1 counts
        as the last one, and a class that does not exist makes the loss NaN. `fit` refuses both.

        Args:
            state: State of the ensemble. It is donated and must not be used again.
            batch: Batch of the step. With a data axis of 1 it may be any pytree of arrays, or
                empty. With a longer one, its leaves are [batch, ...], but for those of
                `batch_specs`. On several hosts, each host gives the examples of its columns of the
                mesh, `layout.host_columns`.

        Returns:
            The new state, and metrics by name, float32[members]: `loss` and the auxiliary values of
            the objective or the loss function. They are means over the global batch, computed
            before the update.

        Raises:
            UserError: If a leaf of the batch does not divide over the data axis, or the loss
                function is not valid.
        """
        _require_alive(state)
        here, state = self.at(self.with_record(state))
        return (here._one_step_in_waves if here.waves > 1 else here._one_step)(state, batch)

    @cached_property
    def update_steps(self) -> Update:
        """The update of several steps in one call: `update_steps(state, batches)`.

        `batches` are `Batches`, `MemberBatches` or `Drawn`, or a bare pytree with leaves
        [steps, batch, ...] on the layout. It returns the new state and metrics by name,
        float32[steps, members]. It donates the given state, and is compiled once for each number
        of steps.
        """
        if self.waves > 1:
            return update_in_waves(self._in_waves, self.of_wave.update_steps)
        return dispatched(self.step, self.layout, self._execution)

    def predict(
        self, state: State, inputs: Inputs, *, calibration: "Calibration | None" = None
    ) -> Prediction:
        """Returns the pooled prediction of the members, with its uncertainty.

        Args:
            state: State of the ensemble or of some members, on any layout.
            inputs: Inputs, any pytree with leaves [batch, ...]. Every host gives all of them. With
                a loss function, inputs whose leaves have different lengths are given to the network
                as they are, and so are all inputs of an ensemble with `batch_specs`.
            calibration: Calibration of the same state, from `dist_ens.calibrate`. Default: none.

        Returns:
            The prediction, on the devices. With an objective, its fields are those of the
            predictive distribution. With a loss function, they are computed leaf by leaf. With a
            calibration, the fields of the ensemble are calibrated, in float64 on the host, and
            `sets` or `interval` hold the conformal prediction. `members` are not calibrated, and
            the parts of a calibrated entropy are None.

        Raises:
            UserError: If the network was given without `apply` or does not take the inputs, inputs
                on the host are NaN or infinite, the ensemble has several groups, or the calibration
                is that of another prediction.
        """
        here, needed, placed, size = self._placed(state, inputs)
        with explained_inputs(inputs, partial(here._outputs_of_one, needed)):
            prediction = here._predict(needed, placed)
        prediction = settled(here.layout, prediction if size is None else prediction.first(size))
        if state.class_names:
            prediction = dataclasses.replace(prediction, class_names=state.class_names)
        if calibration is None:
            return prediction
        return calibration.applied(prediction, here, needed, inputs)

    def apply(self, state: State, inputs: Inputs) -> Outputs:
        """Returns the outputs of every member's network, leaves [members, batch, ...].

        Args:
            state: State of the ensemble or of some members, on any layout.
            inputs: Inputs; see `predict`.

        Raises:
            UserError: If the network was given without `apply` or does not take the inputs, or
                inputs on the host are NaN or infinite.
        """
        here, needed, placed, size = self._placed(state, inputs)
        with explained_inputs(inputs, partial(here._outputs_of_one, needed)):
            return settled(here.layout, unpadded(here.outputs(needed, placed), size))

    @cached_property
    def outputs(self) -> Callable[[State, Inputs], Outputs]:
        """The outputs of all members for inputs on the layout: `outputs(state, inputs)`.

        `inputs` has leaves [batch, ...] with the spec "batch". With several groups of members, it
        has leaves [groups, batch, ...], and each member takes the inputs of its group. The outputs
        have leaves [members, batch, ...], or [members, batch, samples, ...] with `dropout_samples`.
        """
        if self.waves > 1:
            return results_in_waves(self._in_waves, self.of_wave.outputs, MEMBER_BATCH)
        return jax.jit(self._outputs)

    def microbatch_warning(self, state: State, batches: CallBatches) -> str | None:
        """Returns a warning if the loss of a batch is not the mean over its microbatches.

        Args:
            state: State of the ensemble.
            batches: Batches of a call on the layout, of which the first is compared.

        Returns:
            The warning; None without microbatches, or if both losses are equal.
        """
        step = self.gradient_step
        if self.microbatches == 1 or isinstance(step, OwnStep):
            return None
        if self.waves > 1:
            of_first = batches_of_wave(self._in_waves, batches, 0)
            return self.of_wave.microbatch_warning(self._in_waves.take(state, 0), of_first)
        return microbatch_warning(step, self.layout, state, batches)

    @property
    def step_of_one(self) -> Callable[..., tuple[State, Metrics]]:
        """The step of one member without mesh, jit or lowerings: `step(state, batch, index=None)`.

        The leaves of `state` are those of one member, and `batch` is the whole batch. The speed of
        other executions is measured against this step.
        """
        return without_axes(self.gradient_step)

    def trace_update(self, state: State, batches: CallBatches | PyTree) -> None:
        """Traces `update_steps` in the ensemble's own execution, and computes nothing.

        Args:
            state: State of the ensemble, or its shapes and types.
            batches: Batches of a call, or their shapes and types.

        Raises:
            Exception: Any error that the network, or a lowering of one of its operations, raises.
        """
        jax.eval_shape(steps_of_all(self.step, self.layout, self._execution), state, batches)

    def traced_update(self, state: State, batches: CallBatches | PyTree) -> ClosedJaxpr:
        """Returns the traced update of one member after another, without lowerings.

        Args:
            state: State of the ensemble, or its shapes and types.
            batches: Batches of a call, or their shapes and types.
        """
        return self._plain_update.trace(state, batches).jaxpr

    @cached_property
    def _plain_update(self) -> jax.stages.Wrapped:
        return jax.jit(steps_of_all(self.step, self.layout, Execution.parse("map+scanned")))

    @cached_property
    def of_wave(self) -> "Ensemble":
        """The ensemble of the members of one wave, on the devices."""
        of_one = self._in_waves.layout_of_one
        return self._with_step(
            dataclasses.replace(
                self, layout=of_one, num_members=of_one.num_members, member_ids=None, waves=1
            )
        )

    def on(self, layout: Layout, execution: str | None = None) -> "Ensemble":
        """Returns the same ensemble on another layout and, if given, with another execution.

        The same arguments return the same object, whose programs are compiled once.
        """
        execution = execution or self.execution
        key = layout, layout.is_fixed, execution
        variants = self.__dict__.setdefault("_variants", {})
        if key not in variants:
            other = dataclasses.replace(self, layout=layout, execution=execution)
            variants[key] = self._with_step(other)
            variants[key].__dict__["_variants"] = variants
        return variants[key]

    def with_members(self, member_ids: Sequence[int]) -> "Ensemble":
        """Returns the same ensemble with other members, on a new layout.

        Args:
            member_ids: Ids of the members, different whole numbers from 0 on.
        """
        count = len(member_ids)
        layout = Layout.make(count, devices=cluster.devices_for(count))
        return self._with_step(
            dataclasses.replace(
                self, layout=layout, num_members=count, member_ids=tuple(member_ids), waves=1
            )
        )

    def _with_step(self, other: "Ensemble") -> "Ensemble":
        """Returns an ensemble of other members or another layout, which gets the traced step."""
        other.__dict__["step"] = self.step
        return other

    def with_record(self, state: State) -> State:
        """Returns a state with a record of failed updates if this ensemble checks updates.

        Args:
            state: State of the ensemble, of any layout. Its own record is kept. An ensemble that
                checks nothing removes it.
        """
        if not self.failure_policy.is_checked:
            return state if state.failures == () else state._replace(failures=())
        if isinstance(state.failures, FailureRecord):
            return state
        record = no_failures(state.step.shape)
        like = jax.tree.map(lambda _: state.step, record)
        return state._replace(failures=copied_like(record, like))

    @property
    def _in_waves(self) -> Waves:
        return Waves(self.layout, self.waves)

    @cached_property
    def _execution(self) -> Execution:
        return Execution.parse("vmap" if self.execution == AUTO else self.execution)

    @cached_property
    def ids(self) -> np.ndarray:
        """Ids of the members, int32[members]."""
        if self.member_ids is None:
            return np.arange(self.num_members, dtype=np.int32)
        return np.asarray(self.member_ids, np.int32)

    @cached_property
    def network(self) -> Member:
        """The member that is trained: with its compute type, and the scale of its labels."""
        member = self.member
        if self.objective is not None:
            member = with_compute_dtype(member, self.compute_dtype or "float32")
            if self.objective.standardize:
                member = with_label_scale(member)
        return member

    @cached_property
    def bare_loss(self) -> MemberLoss:
        """The loss of one member without methods, `loss(params, model_state, batch, info)`."""
        if self.loss is None:
            raise UserError(
                "This ensemble has a step of its own and nothing to score it by. Give from_step or "
                "evaluate objective=..., or eval_loss=eval_loss(state, batch, key) -> (loss, "
                "metrics)."
            )
        if isinstance(self.loss, Objective):
            return loss_of_objective(self.loss, self.network)
        return self.member.adapt_loss(loss_of_function(self.loss, self.compute_dtype))

    @cached_property
    def gradient_step(self) -> GradientStep | OwnStep:
        """The step of one member on the whole batch, including the methods."""
        if self.own_step is not None:
            return dataclasses.replace(self.own_step, failures=self.failure_policy)
        loss = reduce(lambda inner, method: method(inner), self.methods, self.bare_loss)
        return GradientStep(
            loss, self.optimizer, self.objective, self.microbatches, self.failure_policy
        )

    @cached_property
    def step(self) -> Step:
        """The step of one member, which is traced once for all programs that contain it."""
        return jax.jit(self.gradient_step, inline=True)

    def _initializer(self, batch: Batch) -> initial_state.Initializer:
        """Returns the program that makes the state for batches of such shapes and types."""
        shapes = initial_state.shapes_of(self.inputs_of(batch))
        key = (jax.tree.structure(shapes), *jax.tree.leaves(shapes))
        if key not in self._programs:
            make = initial_state.state_of_one(
                self.network, self.optimizer, shapes, is_checked=self.failure_policy.is_checked
            )
            self._programs[key] = initial_state.Initializer(make, self.layout, self.waves)
        return self._programs[key]

    def inputs_of(self, batch: Batch) -> Inputs | Batch:
        """Returns what the network is initialised with: `batch["inputs"]`.

        With a loss function, a batch that is no dict with this key is the inputs itself. With a
        step of the user's own, it is the batch.

        Raises:
            UserError: If the batch has no inputs under the objective's key.
        """
        if self.own_step is not None:
            return batch
        if self.objective is None:
            has_inputs = isinstance(batch, dict) and Objective.INPUTS in batch
            return batch[Objective.INPUTS] if has_inputs else batch
        key = self.objective.INPUTS
        if not isinstance(batch, dict) or key not in batch:
            keys = ", ".join(map(repr, batch)) if isinstance(batch, dict) else type(batch).__name__
            raise UserError(
                f"The objective {self.objective.name} takes batches with the key {key!r}: got "
                f"{keys}. Give a dict with {key!r} and {self.objective.LABELS!r}, or use a loss "
                "function for other batches."
            )
        return batch[key]

    @cached_property
    def _programs(self) -> dict[Hashable, Any]:
        """Cache of values that are known once there is a state, such as the program of one step."""
        return {}

    @cached_property
    def evaluation_programs(self) -> dict[Hashable, Any]:
        """Programs that score this ensemble, kept with it so that they are compiled once."""
        return {}

    def _one_step(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        # A dict of specs names the leaves of one structure of batches.
        names_leaves = not isinstance(self.batch_specs, str)
        key = ("step", jax.tree.structure(batch)) if names_leaves else "step"
        if key not in self._programs:
            specs = specs_of_batch(self.batch_specs, batch)
            placed = self.layout.placed(batch, specs, "The batch")
            if self.microbatches > 1:
                rows_for_microbatches(self.microbatches, placed)
                of_step = Batches(jax.tree.map(lambda leaf: leaf[None], placed))
                self._warn_of_microbatches(state, of_step)
            execution = self._rule(state, placed) if self.execution == AUTO else self.execution
            self._programs[key] = Lifted(
                self.step,
                layout=self.layout,
                in_specs=(MEMBERS, specs),
                out_specs=MEMBERS,
                # A single step is neither scanned nor dispatched with others.
                execution=dataclasses.replace(Execution.parse(execution), steps=None),
                donate_argnums=(0,),
                names=("The state", "The batch"),
            )
        with explained_errors(), explained_memory(self):
            return self._programs[key](state, batch)

    def _one_step_in_waves(self, state: State, batch: Batch) -> tuple[State, Metrics]:
        of_step = jax.tree.map(host_array, batch)
        specs = specs_of_batch(self.batch_specs, batch)
        placed = Batches.put(self.layout, [of_step], specs)
        if "compared" not in self._programs:
            self._programs["compared"] = True
            self._warn_of_microbatches(state, placed)
        state, metrics = self.update_steps(state, placed)
        return state, {name: values[0] for name, values in metrics.items()}

    def _warn_of_microbatches(self, state: State, batches: CallBatches) -> None:
        with explained_errors(), explained_memory(self):
            warning = self.microbatch_warning(state, batches)
        if warning is not None and cluster.is_main():
            logging.warning(warning)

    def _rule(self, state: State, batch: Batch) -> str:
        """Returns the execution that the rule chooses for one step."""
        traced = self.traced_update(state, Batches.shapes_of_step(batch))
        return candidates(self.layout, traced, 1)[0]

    def _outputs(self, state: State, inputs: Inputs) -> Outputs:
        in_groups = self.num_groups > 1

        @pinned_generator()
        def of_one(state: State, inputs: Inputs) -> Outputs:
            params = evaluation_params(state.params, state.opt_state)
            own = inputs
            if in_groups:
                group = state.member_id % self.num_groups
                own = jax.tree.map(lambda leaf: leaf[group], inputs)

            key = jax.random.fold_in(state.key, PREDICT)
            if self.dropout_samples is None:
                outputs = self.network.evaluate(params, state.model_state, own, key)[0]
                return require_rows(self.objective, outputs, own)

            def sample(key: Key) -> Outputs:
                outputs = self.network.apply(params, state.model_state, own, key, False)[0]
                return require_rows(self.objective, outputs, own)

            return jax.vmap(sample, out_axes=1)(jax.random.split(key, self.dropout_samples))

        specs = (MEMBERS, BATCHES if in_groups else BATCH)
        way = self._execution
        member = lowered(of_one, way, self.layout)
        return sharded(member, self.layout, specs, MEMBER_BATCH, way)(state, inputs)

    def _outputs_of_one(self, state: State, inputs: Shapes) -> Outputs:
        """Returns the shapes of one member's outputs, from those of the state and of a batch."""

        def outputs(params: Params, model_state: ModelState, key: Key, inputs: Inputs) -> Outputs:
            found = self.network.evaluate(params, model_state, inputs, key)[0]
            return require_rows(self.objective, found, inputs)

        of_one = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
            (state.params, state.model_state, state.key),
        )
        return jax.eval_shape(outputs, *of_one, inputs)

    @cached_property
    def _predict(self) -> Callable[[State, Inputs], Prediction]:
        if self.num_groups > 1:
            raise UserError(
                f"predict pools all members, and this ensemble has {self.num_groups} groups of "
                "members that were trained on other examples. Use apply, or dist-ens predict."
            )
        objective = self.objective

        def pooled(outputs: Outputs, state: State) -> Prediction:
            if objective is None:
                return predict_leaves(outputs)
            has_samples = self.dropout_samples is not None
            samples = jax.numpy.moveaxis(outputs, 2, 1) if has_samples else outputs
            prediction = objective.distribution.predict(samples, has_samples=has_samples)
            if objective.standardize:
                prediction = prediction.in_unit(*member_label_scale(state))
            return prediction

        if self.waves > 1:
            pool = jax.jit(pooled)
            return lambda state, inputs: pool(self.outputs(state, inputs), state)
        return jax.jit(lambda state, inputs: pooled(self._outputs(state, inputs), state))

    def _placed(self, state: State, inputs: Inputs) -> tuple["Ensemble", State, Inputs, int | None]:
        """Returns ensemble, needed state and inputs on one layout, and the number of examples.

        The number is None if the inputs hold no rows, and are therefore not padded.
        """
        if not self.member.has_apply:
            raise UserError(
                "This ensemble cannot predict: its member has no apply. Give one to "
                "as_member(init=..., apply=...) or Ensemble.from_step(..., apply=...), or call the "
                "network yourself with state.params."
            )
        if not isinstance(state, State):
            raise UserError(
                f"The state is {kind_of(state)}. Give a State, such as result.state of "
                "what fit returned."
            )
        _require_alive(state)
        if self.objective is not None:  # A loss function may take inputs that are missing.
            check_finite_inputs("The argument inputs", inputs)
        here, state = self.at(state)
        size: int | None = None
        if self.objective is None and (self.batch_specs != "batch" or rows_of(inputs) is None):
            refuse_lists(inputs, "the argument inputs", and_numbers=False)
            placed = here.layout.placed(inputs, REPLICATED, "The inputs")
        else:
            placed, size = padded_inputs(here.layout, inputs)
        return here, here._needed(state), placed, size

    def _needed(self, state: State) -> State:
        """Returns a state without the optimizer's state, unless predictions depend on it.

        To pass more arrays to a program takes time.
        """
        if "evaluates_others" not in self._programs:
            self._programs["evaluates_others"] = evaluates_others(state.opt_state)
        if self._programs["evaluates_others"] or self.waves > 1:
            return state._replace(class_names=())
        return state._replace(opt_state=(), failures=(), class_names=())

    def at(self, state: State) -> tuple["Ensemble", State]:
        """Returns this ensemble and a state on one layout, the state's own layout if possible.

        If the state has another number of members, as after `select_members`, the ensemble of those
        members is returned.

        Args:
            state: State of the ensemble or of some members, on any layout.
        """
        elsewhere = self.__dict__.setdefault("_elsewhere", {})
        if state.step.shape[0] != self.num_members:
            ids = tuple(to_host(state.member_id).tolist())
            if ids not in elsewhere:
                elsewhere[ids] = self.with_members(ids)
            return elsewhere[ids], elsewhere[ids].layout.moved(state, MEMBERS)
        mesh = getattr(state.step.sharding, "mesh", None)
        if mesh is None or mesh is self.layout.mesh or mesh == self.layout.mesh:
            return self, state
        if mesh not in elsewhere:
            elsewhere[mesh] = self.on(Layout(mesh, self.num_members))
        return elsewhere[mesh], state


def _require_alive(state: State) -> None:
    """Raises a `UserError` if a state was donated to an earlier update."""
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise UserError(
            "The state was given to an update before, which has freed its arrays. Go on with the "
            "state that it returned: state, metrics = ensemble.update(state, batch)."
        )
