"""The gradients of a member's loss over a batch."""

import jax

from dist_ens.ensemble.loss_checks import check_loss_outputs, explained_errors
from dist_ens.ensemble.microbatches import Loss, gradients_in_parts
from dist_ens.losses import Objective
from dist_ens.losses.averaging import averaged
from dist_ens.methods import LossInfo, MemberLoss
from dist_ens.methods.loss import LossResults
from dist_ens.state import State
from dist_ens.types import Gradients, Key, Metrics, ModelState, Params, PyTree


def gradients_of(
    loss: MemberLoss,
    objective: Objective | None,
    microbatches: int,
    params: Params,
    state: State,
    examples: PyTree,
    key: Key,
) -> tuple[Gradients, ModelState, Metrics]:
    """Returns the gradients, the new model state and the metrics of a batch.

    Args:
        loss: Loss of the member.
        objective: Objective of the ensemble; None if its loss is a function.
        microbatches: Number of equal parts in which the batch is taken.
        params: Parameters of the member.
        state: State of the member, whose parameters are not used.
        examples: Batch and positions of its examples, leaves [batch, ...].
        key: Key of the member and step, [].
    """
    of_examples = loss_of_member(loss, objective, state)
    args = params, state.model_state, examples, key
    if microbatches > 1:
        return gradients_in_parts(of_examples, microbatches, *args)
    gradient = jax.grad(lambda *args: averaged(of_examples(*args)), has_aux=True)
    grads, (model_state, metrics) = gradient(*args)
    return grads, model_state, metrics


def loss_of_member(loss: MemberLoss, objective: Objective | None, state: State) -> Loss:
    """Returns the loss of a member, `of_examples(params, model_state, examples, key)`.

    Args:
        loss: Loss of the member.
        objective: Objective of the ensemble; None if its loss is a function.
        state: State of the member, of which only the key and the id are used.
    """

    def of_examples(
        params: Params, model_state: ModelState, examples: PyTree, key: Key
    ) -> LossResults:
        batch, index = examples
        info = LossInfo(key, state.key, state.member_id, index, objective)
        with explained_errors():
            results = loss(params, model_state, batch, info)
            value, new_state, metrics = check_loss_outputs(results, model_state)
        return value, (new_state, metrics)

    return of_examples
