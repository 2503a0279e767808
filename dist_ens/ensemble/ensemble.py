"""`Ensemble`: the network, optimizer and loss of one member, lifted over the mesh."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr
from numpy.typing import ArrayLike, DTypeLike

from dist_ens.ensemble.batches import CallBatches
from dist_ens.ensemble.checks import (
    check_batch_specs,
    check_divided,
    check_heads,
    check_loss,
    checked_dtype,
    checked_ids,
    checked_methods,
)
from dist_ens.ensemble.failure_policy import FailurePolicy
from dist_ens.ensemble.initial_state import begin_label_scale, network_for, state_from
from dist_ens.ensemble.optimizer import check_optimizer
from dist_ens.ensemble.own_step import OwnStep, loss_of_scoring
from dist_ens.ensemble.padding import AppliedCalibration, explained_inputs, placed_inputs, unpadded
from dist_ens.ensemble.programs import Programs
from dist_ens.ensemble.shared_arrays import placed_shared
from dist_ens.ensemble.update_steps import Update
from dist_ens.ensemble.variants import Variants
from dist_ens.execution.spec import AUTO, Execution
from dist_ens.ground.errors import UserError, counted
from dist_ens.ground.numbers import MOST_DROPOUT_SAMPLES, MOST_SEED, whole_number
from dist_ens.ground.predictors import predictor_ids
from dist_ens.ground.state import State
from dist_ens.ground.types import (
    Batch,
    Inputs,
    Key,
    Metrics,
    ModelState,
    Network,
    OptimizerOfMember,
    Outputs,
    Params,
    PyTree,
    Specs,
)
from dist_ens.layout import Layout, Waves, settled, to_host
from dist_ens.losses import Objective, Prediction
from dist_ens.members import as_member
from dist_ens.members.member import has_label_scale
from dist_ens.methods import LossFunction, Method
from dist_ens.processes import cluster
from dist_ens.processes.compile_cache import use_compile_cache_by_default
from dist_ens.sampling.hyper import Drawn, Hyper


class Ensemble(Variants):
    """An ensemble of networks that share one architecture, optimizer and loss.

    Up to rounding, a member depends on the seed and its `member_id` alone. It does not depend on
    the number of members, their layout or their execution. Its step sees the whole batch.

    Its programs are compiled once and found again by later calls. If the process has no folder for
    JAX's compilation cache, it takes that of the command line, `~/.cache/dist_ens`.

    Attributes:
        member: Network of one member, in any form that `as_member` accepts.
        optimizer: Optimizer of one member, with `init` and `update` like Optax's optimizers. It is
            given the loss as a function if it computes it again, as `optax.lbfgs()` does. With
            `hyper` it may be a function that makes it, `lambda hyper: optax.adam(hyper["rate"])`.
        loss: Objective, such as `losses.categorical(10)`, or a function
            `loss_fn(params, model_state, batch, key) -> (loss, (model_state, aux))`. If it also
            takes `train`, it is given True in training and False in evaluation.
        num_members: Number of members, at least 1.
        seed: Seed of all random numbers, in [0, 2**32).
        layout: Layout of members and data. Default: all devices, with the largest ensemble axis
            that divides both the members and the devices; of CPU cores, as many as divide the
            members.
        execution: Execution of the members of a device, such as `vmap` or `unroll+masks`. With
            `auto`, `fit` times the candidates, and every program outside of `fit` takes the first
            candidate for its own operations.
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
        failure_policy: Response to failed updates, a `FailurePolicy`, or the name of a policy, such
            as "skip". Default: updates are not checked.
        own_step: Step in place of a gradient of the loss and an update of the optimizer, which
            `from_step` sets. `loss` is then what scores the members, or None.
        hyper: Settings whose values differ from member to member: a dict from names to one number
            for each member, float[members], or a distribution, such as
            `dist_ens.hyper.log_uniform(1e-4, 1e-2)`. An optimizer may be made by a function
            `optimizer(hyper)` of them, {name: float32[]}. Loss functions, steps and networks with
            an argument `hyper` are given them, and methods `info.hyper`. Once made, the attribute
            holds the values, float32[members].
        batch_specs: Parts of a batch that hold no rows, and are therefore not divided over the
            data axis: a dict from their keys to "shared", such as `{"boundary": "shared"}`, or
            "shared" for the whole batch. Every host gives equal arrays for them. Training looks at
            it for a data axis above 1, evaluation always. Default: "batch", every leaf holds rows.
        shared: Arrays that all members share and no update changes, such as a network that was
            trained before: a pytree of arrays, or `dist_ens.from_file(path)`. They are on each
            device once. Networks, loss functions and steps with an argument `shared` are given
            them. Once made, the attribute holds them on the devices, as `shared.arrays`.
        ids: Ids of the members, int32[members].
        objective: Objective by which the members are scored; None if the loss is a function.

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

    def __init__(
        self,
        member: Network,
        optimizer: OptimizerOfMember,
        loss: Objective | LossFunction | None,
        *,
        num_members: int,
        seed: int = 0,
        layout: Layout | None = None,
        execution: str = AUTO,
        methods: Iterable[Method] = (),
        member_ids: Sequence[int] | None = None,
        waves: int = 1,
        microbatches: int = 1,
        compute_dtype: DTypeLike | None = None,
        num_groups: int = 1,
        dropout_samples: int | None = None,
        failure_policy: FailurePolicy | str | None = None,
        own_step: OwnStep | None = None,
        hyper: Mapping[str, Drawn | ArrayLike | str] | None = None,
        batch_specs: Specs = "batch",
        shared: PyTree = (),
    ) -> None:
        use_compile_cache_by_default()
        check_optimizer(optimizer, may_be_made=hyper is not None)
        if own_step is None or loss is not None:
            check_loss(loss)
        Execution.parse(execution)
        self.member = as_member(member)
        self.optimizer, self.loss, self.own_step = optimizer, loss, own_step
        self.num_members = whole_number("num_members", num_members, least=1)
        self.seed = whole_number("seed", seed, least=0, most=MOST_SEED)
        self.microbatches = whole_number("microbatches", microbatches, least=1)
        self.num_groups = whole_number("num_groups", num_groups, least=1)
        self.dropout_samples = dropout_samples
        if dropout_samples is not None:
            self.dropout_samples = whole_number(
                "dropout_samples", dropout_samples, least=1, most=MOST_DROPOUT_SAMPLES
            )
        self.execution, self.methods = execution, checked_methods(methods)
        self.compute_dtype = checked_dtype(compute_dtype)
        self.failure_policy = FailurePolicy.of(failure_policy)
        check_batch_specs(batch_specs, self.microbatches)
        self.batch_specs = batch_specs
        if layout is None:
            layout = Layout.make(self.num_members, devices=cluster.devices_for(self.num_members))
        if layout.num_members != self.num_members:
            raise UserError(
                f"The layout is for {counted(layout.num_members, 'member')}, and num_members "
                f"is {self.num_members}. Make the layout with Layout.make({self.num_members})."
            )
        check_divided(layout.model_axis, Execution.parse(execution).members, waves)
        self.layout = layout
        self.waves = Waves.at_least(layout, whole_number("waves", waves, least=1)).count
        self.member_ids = checked_ids(member_ids, self.num_members)
        self.ids = np.asarray(self.member_ids or range(self.num_members), np.int32)
        self.hyper = Hyper.of(hyper, self.ids.tolist(), self.seed)
        self.shared = placed_shared(self.layout, self.member.base_of, shared)
        self.objective = loss if isinstance(loss, Objective) else None
        self.trained_objective = self.objective if own_step is None else None
        check_heads(self.member, self.objective, self.methods, self.num_groups)
        self.network = network_for(self.member, self.objective, self.compute_dtype)
        self.uses_positions = any(getattr(m, "uses_positions", False) for m in self.methods)
        self.programs = Programs(self)

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
        failure_policy: FailurePolicy | str | None = None,
        hyper: Mapping[str, Drawn | ArrayLike] | None = None,
        batch_specs: Specs = "batch",
        shared: PyTree = (),
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
            num_members: Number of members, as for `Ensemble`, which describes the other arguments.
            failure_policy: Policy. A step fails if its metric "loss" is not finite, or if a finite
                number of the state becomes infinite or NaN.

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
            layout=layout,
            execution=execution,
            member_ids=member_ids,
            waves=waves,
            failure_policy=failure_policy,
            own_step=own_step,
            hyper=hyper,
            batch_specs=batch_specs,
            shared=shared,
        )

    @property
    def heads(self) -> int | None:
        """Number of heads of each member; None for members without heads."""
        return self.member.heads

    @property
    def num_predictors(self) -> int:
        """Number of members, or of all their heads, which predict, are scored and are pooled."""
        return self.num_members * (self.heads or 1)

    def predictor_ids(self, state: State) -> np.ndarray:
        """Returns the ids of the predictors of a state, on every host: 3, or "3.1" for a head."""
        return predictor_ids(to_host(state.member_id), self.heads)

    def predictors_of(self, positions: Sequence[int]) -> list[int]:
        """Returns the positions of the predictors that belong to members at some positions."""
        count = self.heads or 1
        return [position * count + head for position in positions for head in range(count)]

    def init(self, batch: Batch) -> State:
        """Returns the state at step 0, each member created on the device that holds it.

        Args:
            batch: Batch, or its shapes and types (`jax.ShapeDtypeStruct`), leaves [batch, ...].
                The network is given its inputs, `batch["inputs"]`. With a loss function, a batch
                that is no dict with this key is the inputs itself.

        Returns:
            The state, leaves [members, ...].
        """
        return self.programs.initializer(batch)(self.ids, self.seed, self.hyper)

    def compile_init(self, batch: Batch) -> None:
        """Begins to compile the program of `init(batch)` in a thread, and does not wait."""
        _ = self.programs.initializer(batch).compiled

    def abstract_state(self, batch: Batch) -> State:
        """Returns shapes, types and shardings of the state; see `init`."""
        return self.programs.initializer(batch).abstract_state

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
            UserError: If the members cannot be stacked, or their number is not `num_members`.
        """
        is_whole = model_states is not None and any(map(has_label_scale, model_states))
        member = self.network if is_whole else self.member
        state = state_from(self, params, model_states, member)
        if self.objective is not None and self.objective.standardize:
            return begin_label_scale(self.layout, state, self.objective.label_shape)
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
        here, state = self.at(self.with_record(state))
        return here.programs.update(state, batch)

    @property
    def update_steps(self) -> Update:
        """The update of several steps in one call, `update_steps(state, batches)`.

        A bare pytree of batches has leaves [steps, batch, ...] on the layout. The new state is
        returned with metrics by name, float32[steps, members]. The given state is donated.
        """
        return self.programs.update_steps

    def predict(
        self,
        state: State,
        inputs: Inputs,
        *,
        calibration: AppliedCalibration | None = None,
        weights: ArrayLike | None = None,
    ) -> Prediction:
        """Returns the pooled prediction of the members, with its uncertainty.

        Args:
            state: State of the ensemble or of some members, on any layout.
            inputs: Inputs, any pytree with leaves [batch, ...]. Every host gives all of them. With
                a loss function, inputs whose leaves have different lengths are given to the network
                as they are, and so are all inputs of an ensemble with `batch_specs`.
            calibration: Calibration of the same state and weights, from `dist_ens.calibrate`.
                Default: none.
            weights: Weights of the members in the pool, such as those of `dist_ens.select`; not
                negative, float[members], in the order of the state. Default: equal weights.

        Returns:
            The prediction, on the devices. With an objective, its fields are those of the
            predictive distribution. With a loss function, they are computed leaf by leaf. With a
            calibration, the fields of the ensemble are calibrated, in float64 on the host, and
            `sets` or `interval` hold the conformal prediction. `members` are not calibrated, and
            the parts of a calibrated entropy are None.

        Raises:
            UserError: If the network has no `apply` or does not take the inputs, inputs on the host
                are NaN or infinite, the ensemble has several groups, the weights do not fit the
                members, or the calibration is that of another prediction.
        """
        here, needed, placed, size = placed_inputs(self, state, inputs)
        weights = here.programs.checked_weights(weights)
        with explained_inputs(inputs):
            prediction = here.programs.predict(needed, placed, weights)
        prediction = settled(here.layout, prediction if size is None else prediction.first(size))
        if state.class_names:
            prediction = dataclasses.replace(prediction, class_names=state.class_names)
        if calibration is None:
            return prediction
        return calibration.applied(prediction, here, needed, inputs, weights)

    def apply(self, state: State, inputs: Inputs) -> Outputs:
        """Returns the outputs of every member's network, leaves [members, batch, ...].

        Args:
            state: State of the ensemble or of some members, on any layout.
            inputs: Inputs; see `predict`, as for the errors.
        """
        here, needed, placed, size = placed_inputs(self, state, inputs)
        with explained_inputs(inputs):
            return settled(here.layout, unpadded(here.outputs(needed, placed), size))

    @property
    def outputs(self) -> Callable[[State, Inputs], Outputs]:
        """The outputs of all members for inputs on the layout, `outputs(state, inputs)`.

        The inputs of several groups of members have leaves [groups, batch, ...]. The outputs have
        leaves [members, batch, ...], or [members, batch, samples, ...] with `dropout_samples`.
        """
        return self.programs.outputs

    def traced_update(self, state: State, batches: CallBatches | PyTree) -> ClosedJaxpr:
        """Returns the traced update of one member after another, without lowerings."""
        batches = self.programs.with_shared(batches)
        return self.programs.plain_update.trace(state, batches).jaxpr
