"""One member, lifted over the mesh."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr

from dist_ens.config.execution_spec import Execution
from dist_ens.ensemble.batches import (
    batch_of,
    by_member,
    located,
    one_step,
    placement,
    steps_in,
    steps_of_member,
)
from dist_ens.ensemble.loop import Loop
from dist_ens.ensemble.optimizer_state import optimizer_state
from dist_ens.ensemble.waves import predict_in_waves, update_in_waves
from dist_ens.errors import UserError
from dist_ens.execution.apply import lowered, over_members
from dist_ens.execution.lowerings import CONVOLUTION
from dist_ens.execution.rewrite import contains
from dist_ens.layout import (
    BATCH,
    BATCHES,
    DATA,
    MEMBER_BATCH,
    MEMBER_METRICS,
    MEMBERS,
    REPLICATED,
    Layout,
    Waves,
    data_index,
    data_mean,
    data_size,
    data_sum,
    leaves_that_differ,
)
from dist_ens.losses import Loss, TrainingScores, accuracy, softmax_cross_entropy
from dist_ens.members import Member
from dist_ens.members.modes import on_one_column
from dist_ens.methods import ExampleLoss, Method, of_outputs
from dist_ens.randomness import EXAMPLES, INIT, PREDICT, UPDATE, member_key, pinned_generator
from dist_ens.state import State, stack_members, without_weak_types

# What an update takes of a batch.
_EXAMPLES = ("inputs", "labels")

ExampleWeight = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """An ensemble of one member's kind: its init, update and predict.

    A member is itself: its numbers depend on the seed and its `member_id`, never on how many
    members there are, where they lie or how they are run, up to rounding. (Dropout masks also
    depend on the length of the data axis: each of its columns draws its own.)

    Attributes:
        member: The network.
        optimizer: Of one member.
        layout: Where members and data lie.
        loss: Of one member, per example.
        training_scores: What is reported beside the loss, per example.
        methods: What is done to the loss, the first the innermost.
        example_weight: Of a member's key and positions in the split: how much it learns from each
            example; None: alike from all.
        microbatches: Parts of a device's batch, taken one after another, their gradients averaged.
        execution: How a device runs its members: `WAY[+LOWERING][+STEPS]`; see
            `dist_ens.execution`.
        waves: Parts of a device's members that are on it one after another; with more than one, the
            state is in the hosts' memory.
        num_groups: Of members, each with examples of its own; a member's is its id modulo their
            number.
        dropout_samples: Predictions of each member that draw what it drops, as in training; None:
            one that drops nothing.
    """

    member: Member
    optimizer: optax.GradientTransformation
    layout: Layout
    loss: Loss = softmax_cross_entropy
    training_scores: TrainingScores = accuracy
    methods: tuple[Method, ...] = ()
    example_weight: ExampleWeight | None = None
    microbatches: int = 1
    execution: str = "vmap"
    waves: int = 1
    num_groups: int = 1
    dropout_samples: int | None = None

    def init(
        self,
        seed: int,
        inputs: jax.ShapeDtypeStruct,
        member_ids: Sequence[int] | None = None,
    ) -> State:
        """The ensemble at step 0, born on the mesh.

        Args:
            seed: In [0, 2**32).
            inputs: Shape and type of a batch of inputs, [batch, ...].
            member_ids: The members' lasting names; default 0, 1, 2, …

        Returns:
            The state, leaves [members, ...], each device holding its own members only.

        Raises:
            UserError: If the number of ids is not the layout's.
        """
        ids = self._ids(member_ids)
        if self.waves > 1:
            by_wave = ids.reshape(self.layout.ensemble_axis, self.waves, -1).swapaxes(0, 1)
            born_waves = [
                self.of_wave.init(seed, inputs, wave.ravel().tolist()) for wave in by_wave
            ]
            waiting = [self._in_waves.off_devices(wave) for wave in born_waves]
            return self._in_waves.join(waiting, MEMBERS)
        state = self.abstract_state(inputs)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        born = jax.jit(self._init(inputs), out_shardings=shardings)
        return born(self.layout.put_members(ids), np.uint32(seed))

    def abstract_state(self, inputs: jax.ShapeDtypeStruct) -> State:
        """Shapes, types and shardings of the state; see `init`."""
        ids = jax.ShapeDtypeStruct((self.layout.num_members,), jnp.int32)
        shapes = jax.eval_shape(self._init(inputs), ids, jax.ShapeDtypeStruct((), jnp.uint32))

        def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            waits = self._in_waves.resting_sharding(leaf.dtype) if self.waves > 1 else None
            sharding = waits or self.layout.sharding(MEMBERS)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(placed, shapes)

    def state_of(
        self,
        params: Sequence[Any],
        model_states: Sequence[Any] | None = None,
        *,
        seed: int = 0,
        member_ids: Sequence[int] | None = None,
    ) -> State:
        """An ensemble of networks that were trained elsewhere, at step 0 of a new optimizer.

        Args:
            params: One pytree per member.
            model_states: Likewise; default: none has any.
            seed: In [0, 2**32).
            member_ids: The members' lasting names; default 0, 1, 2, …

        Returns:
            The state, to predict with or to train on.

        Raises:
            UserError: If the members cannot be stacked, or are not as many as the layout's.
        """
        ids = self._ids(member_ids)
        if not isinstance(params, list | tuple):
            raise UserError(
                "The members trained elsewhere are a list, one pytree of parameters each. "
                f"Received: a {type(params).__name__}. If it is stacked already, unstack_members "
                "makes the list."
            )
        if len(params) != len(ids):
            raise UserError(
                "One pytree of parameters is needed per member. Received: "
                f"{len(params)} for {len(ids)} members. Make the layout with "
                f"num_members={len(params)}."
            )
        stacked = without_weak_types(stack_members(params))
        keys = jax.vmap(partial(member_key, seed))(jnp.asarray(ids))
        with pinned_generator():
            begin = jax.vmap(partial(optimizer_state, self.optimizer))
            opt_state = on_one_column(begin, DATA)(stacked, keys)
        state = self.layout.put_members(
            without_weak_types(
                State(
                    step=jnp.zeros(len(ids), jnp.int32),
                    member_id=jnp.asarray(ids),
                    key=keys,
                    params=stacked,
                    model_state=() if model_states is None else stack_members(model_states),
                    opt_state=opt_state,
                )
            )
        )
        return state if self.waves == 1 else self._in_waves.off_devices(state)

    @cached_property
    def update_steps(self) -> Any:
        """The update of some steps: `update_steps(state, batches) -> (state, metrics)`.

        `batches` is a dict of `inputs` and `labels`, leaves [steps, batch, ...], from
        `Layout.put`, or a split on the device from which they are `Drawn`. The given state is
        donated: it must not be used again. `metrics` is a dict of float32[steps, members]: `loss`,
        of the loss function, and the training scores, means over the global batch before each
        update. Compiled once for each number of steps; it is a jitted function, but where the
        execution is `loop`, its steps are `single` or there are waves: those dispatch one.
        """
        if self.waves > 1:
            return update_in_waves(self._in_waves, self.of_wave.update_steps)
        if self._execution.members == "loop":
            alone = dataclasses.replace(self._execution, members="unroll")
            return Loop(
                self.layout,
                lambda layout: (
                    dataclasses.replace(self, layout=layout, execution=str(alone)).update_steps
                ),
            )
        if self._execution.steps == "single":
            return self._step_after_step()

        def update(state: State, batches: Any) -> tuple[State, dict[str, jax.Array]]:
            return self._lifted_update(state, batches)

        return jax.jit(update, donate_argnums=0)

    @property
    def step_of_one(self) -> Any:
        """A step of one member as it is written by hand: `step(state, batch) -> (state, metrics)`.

        The leaves of `state` are one member's, `batch` is a dict of `inputs`, `labels` and, where
        examples are weighed, `index`: leaves [batch, ...], of the whole batch. Not jitted, on no
        mesh, no operation in another form: what the other ways are measured against.
        """
        # What averages over the data axis finds one, of one place.
        return on_one_column(self._member_update, DATA)

    def _step_after_step(self) -> Any:
        """`update` as a program of one step, dispatched for each step of a call."""

        @partial(jax.jit, donate_argnums=0)
        def update(state: State, batches: Any, number: jax.Array) -> Any:
            return self._lifted_update(state, one_step(batches, number))

        @jax.jit
        def in_order(metrics: list[Any]) -> Any:
            return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *metrics)

        numbers: list[jax.Array] = []

        def update_each(state: State, batches: Any) -> tuple[State, dict[str, jax.Array]]:
            count, metrics = steps_in(batches), []
            if len(numbers) < count:
                numbers[:] = self.layout.put_numbers(count)
            for number in numbers[:count]:
                state, metrics_of_step = update(state, batches, number)
                metrics.append(metrics_of_step)
            return state, in_order(metrics)

        return update_each

    def check_columns(self, state: State) -> None:
        """Checks that all columns of the mesh hold the same model state.

        Floating-point leaves are averaged over the columns. An integer that a network computes
        from its examples is not, and would differ.

        Args:
            state: What an update returned. Every host must call this, once is enough.

        Raises:
            UserError: If a leaf differs; the message names it.
        """
        tree = {
            f".model_state{jax.tree_util.keystr(path)}": leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(state.model_state)
            if not jnp.issubdtype(leaf.dtype, jnp.inexact)
        }
        if self.waves > 1:
            tree = self._in_waves.take(tree, 0)
        layout = self.layout if self.waves == 1 else self._in_waves.layout_of_one
        different = leaves_that_differ(layout, tree)
        if different:
            raise UserError(
                f"After an update the columns of mesh {self.layout} hold different values of "
                f"{', '.join(different)}: each column computed it from its own part of the batch. "
                "Floating-point state is averaged over the columns, integers are not. Combine it "
                'in the network, as by jax.lax.psum(value, "data").'
            )

    def trace_update(self, state: State, batches: Any) -> None:
        """Traces the update in its own execution, and computes nothing.

        Args:
            state: As `update` has it; shapes will do.
            batches: Likewise.

        Raises:
            Exception: What the network, or a lowering of one of its operations, raises.
        """
        jax.eval_shape(self._lifted_update, state, batches)

    def traced_update(self, state: State, batches: Any) -> ClosedJaxpr:
        """The update of one member after another, no operation in another form.

        Args:
            state: As `update` has it; shapes will do.
            batches: Likewise.

        Returns:
            What `contains` looks into.
        """
        plain = dataclasses.replace(self, execution="map+scanned")
        return jax.make_jaxpr(plain._lifted_update)(state, batches)

    @cached_property
    def of_wave(self) -> "Ensemble":
        """The ensemble of the members of one wave, on the devices."""
        return dataclasses.replace(self, layout=self._in_waves.layout_of_one, waves=1)

    @property
    def _in_waves(self) -> Waves:
        return Waves(self.layout, self.waves)

    def _lifted_update(self, state: State, batches: Any) -> tuple[State, dict[str, jax.Array]]:
        return self.layout.shard_map(
            self._device_update,
            in_specs=(MEMBERS, placement(batches)),
            out_specs=(MEMBERS, MEMBER_METRICS),
        )(state, batches)

    @cached_property
    def predict(self) -> Any:
        """The prediction, jitted but for waves: `predict(state, inputs) -> outputs`.

        `inputs` is [batch, ...], from `Layout.put` with `BATCH`; of several groups of members it is
        [groups, batch, ...], with `BATCHES`, and each member takes those of its group. The outputs
        are [members, batch, ..., outputs], where they were computed; with `dropout_samples`
        [members, batch, samples, ..., outputs].
        """

        if self.waves > 1:
            return predict_in_waves(self._in_waves, self.of_wave.predict)

        in_groups = self.num_groups > 1

        @pinned_generator()
        def one(member: tuple[Any, Any, jax.Array, jax.Array], inputs: jax.Array) -> jax.Array:
            params, model_state, member_id, key = member
            own = inputs[member_id % self.num_groups] if in_groups else inputs

            def sample(key: jax.Array | None) -> jax.Array:
                return self.member.apply(params, model_state, own, key, False)[0]

            if self.dropout_samples is None:
                return sample(None)
            key = jax.random.fold_in(jax.random.fold_in(key, PREDICT), data_index())
            return jax.vmap(sample, out_axes=1)(jax.random.split(key, self.dropout_samples))

        def predict(state: State, inputs: jax.Array) -> jax.Array:
            return self.layout.shard_map(
                over_members(lowered(one, self._execution), self._execution),
                in_specs=(MEMBERS, BATCHES if in_groups else BATCH),
                out_specs=MEMBER_BATCH,
            )((state.params, state.model_state, state.member_id, state.key), inputs)

        return jax.jit(predict)

    @cached_property
    def _execution(self) -> Execution:
        return Execution.parse(self.execution)

    def _ids(self, member_ids: Sequence[int] | None) -> np.ndarray:
        count = self.layout.num_members
        ids = np.arange(count) if member_ids is None else np.asarray(member_ids)
        if len(ids) != count or len(set(ids.tolist())) != count:
            raise UserError(
                f"The layout is for {count} members, each with an id of its own. Received: "
                f"member_ids={ids.tolist()}. Make the layout with num_members={len(set(ids))}."
            )
        return ids.astype(np.int32)

    def _init(self, inputs: jax.ShapeDtypeStruct) -> Any:
        @pinned_generator()
        def one(member_id: jax.Array, seed: jax.Array) -> State:
            key = member_key(seed, member_id)
            params, model_state = self.member.init(
                jax.random.fold_in(key, INIT), jnp.zeros(inputs.shape, inputs.dtype)
            )
            params = without_weak_types(params)
            return without_weak_types(
                State(
                    step=jnp.zeros((), jnp.int32),
                    member_id=member_id,
                    key=key,
                    params=params,
                    model_state=model_state,
                    opt_state=optimizer_state(self.optimizer, params, key),
                )
            )

        def init(member_ids: jax.Array, seed: jax.Array) -> State:
            # One after another: it runs once, and batched random numbers take XLA's CPU compiler
            # twice as long.
            return self.layout.shard_map(
                lambda ids, seed: jax.lax.map(lambda member_id: one(member_id, seed), ids),
                in_specs=(MEMBERS, REPLICATED),
                out_specs=MEMBERS,
            )(member_ids, seed)

        return init

    def _device_update(self, state: State, batches: Any) -> tuple[State, dict[str, jax.Array]]:
        """All steps of one call, for the members of one device: metrics [steps, members]."""

        # Traced once, however often it is called.
        update_on = jax.jit(lowered(self._member_update, self._execution), inline=True)

        count = steps_in(batches)
        batches = located(batches, state.member_id, self.layout)
        own, shared = by_member(batches)

        def steps_of_one(member: tuple[State, Any], shared: Any) -> tuple[State, Any]:
            state, own = member

            def update_one(state: State, step: Any) -> tuple[State, dict[str, jax.Array]]:
                return update_on(state, batch_of(shared, step))

            steps = steps_of_member(own, shared)

            def step_number(number: int) -> Any:
                return jax.tree.map(lambda leaf: leaf[number], steps)

            if self._scans(count, update_one, state, step_number(0)):
                return jax.lax.scan(update_one, state, steps)
            metrics = []
            for number in range(count):
                state, metrics_of_step = update_one(state, step_number(number))
                metrics.append(metrics_of_step)
            return state, jax.tree.map(lambda *leaves: jnp.stack(leaves), *metrics)

        state, metrics = over_members(steps_of_one, self._execution)((state, own), shared)
        return state, jax.tree.map(jnp.transpose, metrics)

    @pinned_generator()
    def _member_update(self, state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        """One step of one member, on one column's part of the batch."""
        key = jax.random.fold_in(jax.random.fold_in(state.key, UPDATE), state.step)
        key = jax.random.fold_in(key, data_index())

        grads, model_state, metrics = self._gradients(state, batch, key)
        grads, (model_state, metrics) = data_sum(grads), data_mean((model_state, metrics))
        updates, opt_state = self.optimizer.update(grads, state.opt_state, state.params)
        state = state._replace(
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            model_state=model_state,
            opt_state=opt_state,
        )
        return without_weak_types(state), metrics

    def _gradients(self, state: State, batch: Any, key: jax.Array) -> tuple[Any, Any, Any]:
        """Returns gradients, model state and metrics of this column's part of the batch.

        The loss whose gradient is taken is this part's share of the global mean, so that gradients
        are summed over the parts. A network that looks at the gradient of an example on its way
        back, such as one that clips it, then meets the same numbers however the batch is divided.
        What looks at the gradient of a parameter meets that of this part alone.
        """
        _check_parts_of(batch)
        parts = data_size() * self.microbatches

        def loss_of(params: Any, model_state: Any, batch: Any, key: jax.Array) -> Any:
            def forward(inputs: jax.Array, key: jax.Array) -> tuple[jax.Array, Any]:
                return self.member.apply(params, model_state, inputs, key, True)

            examples = {name: batch[name] for name in _EXAMPLES}
            learnt = self._learn(forward, examples, key, state.member_id)
            losses = learnt.losses
            if self.example_weight is not None:
                of_examples = self.example_weight(
                    jax.random.fold_in(state.key, EXAMPLES), batch["index"]
                )
                losses *= of_examples.reshape(-1, *(1,) * (losses.ndim - 1))
            scores = self.training_scores(learnt.outputs, batch["labels"])
            metrics = {"loss": losses} | scores
            metrics = {name: values.mean() for name, values in metrics.items()}
            return metrics["loss"] / parts, (learnt.model_state, metrics)

        gradients = jax.grad(loss_of, has_aux=True)
        if self.microbatches == 1:
            grads, (model_state, metrics) = gradients(state.params, state.model_state, batch, key)
            return grads, model_state, metrics

        def accumulate(carry: tuple[Any, Any], part: tuple[Any, jax.Array]) -> Any:
            model_state, total = carry
            examples, number = part
            grads, (model_state, metrics) = gradients(
                state.params, model_state, examples, jax.random.fold_in(key, number)
            )
            return (model_state, jax.tree.map(jnp.add, total, (grads, metrics))), None

        count = self.microbatches
        in_parts = jax.tree.map(lambda leaf: leaf.reshape(count, -1, *leaf.shape[1:]), batch)
        first = jax.tree.map(lambda leaf: leaf[0], in_parts)
        shapes = jax.eval_shape(gradients, state.params, state.model_state, first, key)
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (shapes[0], shapes[1][1]))
        (model_state, total), _ = jax.lax.scan(
            accumulate, (state.model_state, nothing), (in_parts, jnp.arange(count))
        )
        grads, metrics = total
        return grads, model_state, jax.tree.map(lambda leaf: leaf / count, metrics)

    @cached_property
    def _learn(self) -> ExampleLoss:
        return reduce(lambda learn, method: method(learn), self.methods, of_outputs(self.loss))

    def _scans(self, count: int, update_one: Any, state: State, step: Any) -> bool:
        """Whether the steps of a call are a loop inside the program: a `while`, even of one step.

        In one the gradient of a convolution's weights runs 20 to 50 times slower on a CPU, unless
        the convolution's layout is canonical.
        """
        steps, convolutions = self._execution.steps, self._execution.convolutions
        if count == 1 or steps is not None:
            return count > 1 and steps == "scanned"
        if self.layout.platform != "cpu" or convolutions == "canonical":
            return True
        return not contains(jax.make_jaxpr(update_one)(state, step), CONVOLUTION)


def _check_parts_of(batch: Mapping[str, Any]) -> None:
    """Raises a `UserError` if a batch has a part that the loss would never see."""
    unseen = sorted(batch.keys() - {*_EXAMPLES, "index"})
    if unseen:
        raise UserError(
            f"The batch has parts that no loss takes: {', '.join(map(repr, unseen))}. A loss takes "
            "'inputs' and 'labels' alone. Leave the other parts out of the batch; where they weigh "
            "or mask examples, leave out the examples that do not count."
        )
