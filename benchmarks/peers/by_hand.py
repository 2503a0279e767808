"""A member's state and training step, as people write them by hand in JAX."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers.order import Order
from benchmarks.workloads import Workload
from dist_ens.experiment import make_optimizer
from dist_ens.ground.randomness import INIT, member_key

_SEED = 0


class MemberState(NamedTuple):
    """The state of a member.

    Attributes:
        params: Parameters, a pytree.
        model_state: Other state of the network, such as running statistics, a pytree.
        opt_state: State of the optimizer, a pytree.
    """

    params: Any
    model_state: Any
    opt_state: Any


Step = Callable[[MemberState, Any, Any], tuple[MemberState, jax.Array]]


def first_states(workload: Workload) -> list[MemberState]:
    """Returns the members' states before the first step, equal to those of dist_ens for seed 0."""
    optimizer, inputs = make_optimizer(workload.optimizer), workload.batch["inputs"]

    @jax.jit
    def first_state(member_id: jax.Array) -> MemberState:
        key = jax.random.fold_in(member_key(_SEED, member_id), INIT)
        params, model_state = workload.member.init(key, jnp.zeros(inputs.shape, inputs.dtype))
        return MemberState(params, model_state, optimizer.init(params))

    return [first_state(jnp.int32(m)) for m in range(workload.num_members)]


def stacked_first_states(workload: Workload) -> MemberState:
    """Returns the states of `first_states` as one pytree of NumPy arrays, leaves [members, ...]."""
    return jax.tree.map(lambda *leaves: np.stack(leaves), *first_states(workload))


def make_step(workload: Workload) -> Step:
    """Returns the step of one member, `step(state, inputs, labels) -> (state, loss)`."""
    optimizer, member = make_optimizer(workload.optimizer), workload.member

    def step(state: MemberState, inputs: Any, labels: Any) -> tuple[MemberState, jax.Array]:
        def loss_of(params: Any) -> tuple[jax.Array, Any]:
            outputs, model_state = member.apply(
                params, state.model_state, inputs, jax.random.key(_SEED), True
            )
            return workload.loss(outputs, labels).mean(), model_state

        (loss, model_state), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return MemberState(params, model_state, opt_state), loss

    return step


class StepOfAll:
    """A way that calls one step of all members, on batches that NumPy gathers on the host.

    Args:
        workload: Workload to train.
        step: Step of all members, `step(states, inputs, labels) -> (states, losses)`. It donates
            the states, leaves [members, ...]. `batch_axis` says how the batch is mapped.
        states: States of the members before the first step, leaves [members, ...].
    """

    def __init__(self, workload: Workload, step: Callable[..., Any], states: Any) -> None:
        self._workload = workload
        self._order = Order(workload)
        self._step = step
        self.states = states

    def run(self, num_steps: int) -> None:
        """Trains every member for some more steps, and waits until they are done."""
        workload, losses = self._workload, []
        orders = self._order.draw(num_steps)
        for step in range(num_steps):
            order = orders[:, step] if workload.own_batches else orders[0, step]
            self.states, loss = self._step(
                self.states, workload.inputs[order], workload.labels[order]
            )
            losses.append(loss)
        jax.block_until_ready((self.states, losses))


def batch_axis(workload: Workload) -> int | None:
    """Returns the axis of a batch that is mapped over members; None if they share the batch."""
    return 0 if workload.own_batches else None
