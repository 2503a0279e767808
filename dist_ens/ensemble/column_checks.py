"""Check of a user's loss function on a mesh with several columns."""

import jax
from jax.extend.core import Jaxpr

from dist_ens.ensemble.loss_checks import (
    check_loss_outputs,
    explained_errors,
    local_weighted_mean,
)
from dist_ens.errors import UserError
from dist_ens.execution.rewrite import nested
from dist_ens.layout import BATCH, MEMBERS, Layout, data_index, differing_leaves
from dist_ens.losses.averaging import averaged, traced_anew, tracing_loss
from dist_ens.methods import LossInfo, MemberLoss
from dist_ens.randomness import UPDATE, pinned_generator
from dist_ens.state import State
from dist_ens.types import Batch, ModelState, Params


def check_columns_of_loss(layout: Layout, loss: MemberLoss, state: State, batch: Batch) -> None:
    """Checks the loss of the first member of each row of the mesh, on one batch.

    A loss that averages through `batch_mean` must be the same number in every column. Any other
    loss is averaged over the columns. This is right for a plain mean over equal parts, and wrong
    for a weighted mean over one column's examples.

    Args:
        layout: Layout with a data axis above 1.
        loss: Loss of a member.
        state: State of the ensemble on the layout.
        batch: Batch of a step on the layout, leaves [batch, ...].

    Raises:
        UserError: If the loss divides by a sum over one column's examples, or uses `batch_mean`
            and still differs between columns.
    """
    uses_batch_mean: list[bool] = []

    @pinned_generator()
    def value(state: State, batch: Batch) -> jax.Array:
        one = jax.tree.map(lambda leaf: leaf[0], state)
        key = jax.random.fold_in(jax.random.fold_in(one.key, UPDATE), one.step)
        key = jax.random.fold_in(key, data_index())
        # Only methods that count examples need positions, and any positions will do for the check.
        index = jax.numpy.arange(len(jax.tree.leaves(batch)[0]))
        info = LossInfo(key, one.key, one.member_id, index, None)

        def of_column(params: Params, model_state: ModelState, batch: Batch) -> jax.Array:
            with tracing_loss() as scope, explained_errors():
                results = averaged(loss(params, model_state, batch, info))
                value, *_ = check_loss_outputs(results, model_state)
            uses_batch_mean.append(scope.uses_batch_mean)
            return value

        value = traced_anew(of_column)(one.params, one.model_state, batch)
        return jax.numpy.reshape(value, (1,))

    program = layout.shard_map(value, in_specs=(MEMBERS, BATCH), out_specs=MEMBERS)
    traced = jax.make_jaxpr(program)(state, batch).jaxpr
    body = _body(traced)
    num_of_batch = len(jax.tree.leaves(batch))
    if body is not None:
        division = local_weighted_mean(body, set(body.invars[-num_of_batch:]))
        if division is not None:
            raise UserError(
                "The loss divides by a sum over one column's part of the batch, so it is not the "
                f"mean over the global batch on mesh {layout}. Use dist_ens.losses.batch_mean("
                "values, weights=weights), which sums over all columns."
            )
    if uses_batch_mean[-1]:
        different = differing_leaves(layout, {"loss": jax.jit(program)(state, batch)})
        if different:
            raise UserError(
                f"The loss differs between the columns of mesh {layout}, although it uses "
                "batch_mean: another part of it depends on one column's examples. Average that "
                "part with dist_ens.losses.batch_mean too."
            )


def _body(jaxpr: Jaxpr) -> Jaxpr | None:
    """Returns the function inside the shard_map of a traced program."""
    for eqn in jaxpr.eqns:
        inner = nested(eqn.params)
        if eqn.primitive.name == "shard_map":
            return inner[0]
        for each in inner:
            found = _body(each)
            if found is not None:
                return found
    return None
