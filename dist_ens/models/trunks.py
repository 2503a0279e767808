"""Heads on a trunk that all members share."""

import jax
import jax.numpy as jnp

from dist_ens.ground.types import Inputs, Key, ModelState, Network, Outputs, Params, PyTree
from dist_ens.members import Member, as_member
from dist_ens.members.base import base_of, checked_base
from dist_ens.members.member import with_forward
from dist_ens.members.modes import Apply


def heads(trunk: Network, head: Network) -> Member:
    """Returns a member that is a head on the outputs of a trunk that all members share.

    The trunk is in `shared`, and is not trained. It predicts as in evaluation, without dropout. Its
    outputs for a batch do not depend on the member, and are computed once for all members of a
    device.

    Args:
        trunk: Network from inputs to features, in any form that `as_member` takes. It must predict
            without a key.
        head: Network from features to outputs, in any form that `as_member` takes.

    Returns:
        The member, whose parameters and model state are those of the head.

    Raises:
        UserError: When the member is initialised, if the arrays in `shared` are not those of the
            trunk.

    >>> import optax, dist_ens
    >>> trunk = dist_ens.models.mlp((4,), 8)
    >>> head = dist_ens.models.mlp((8,), 3, hidden_sizes=())
    >>> base, _ = trunk.init(jax.random.key(0), jnp.zeros((1, 4)))
    >>> member = heads(trunk, head)
    >>> ensemble = dist_ens.Ensemble(
    ...     member, optax.adam(1e-3), dist_ens.losses.categorical(3), num_members=16, shared=base
    ... )
    >>> state = ensemble.init({"inputs": jnp.zeros((1, 4)), "labels": jnp.zeros(1, int)})
    >>> state.params[0]["w"].shape
    (16, 8, 3)
    """
    base, top = as_member(trunk), as_member(head)

    def features_of(inputs: Inputs, shared: PyTree) -> PyTree:
        return base.apply(*shared, inputs, None, False)[0]

    def init(
        key: Key, inputs: Inputs, shared: PyTree = None, **given: PyTree
    ) -> tuple[Params, ModelState]:
        parts = checked_base(base, key, inputs, shared)
        shapes = jax.eval_shape(features_of, inputs, parts)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return top.init(key, zeros, **(given if top.takes_given else {}))

    def on_trunk(apply: Apply) -> Apply:
        def forward(
            params: Params,
            model_state: ModelState,
            inputs: Inputs,
            key: Key | None,
            train: bool,
            shared: PyTree = None,
            **given: PyTree,
        ) -> tuple[Outputs, ModelState]:
            features = features_of(inputs, shared)
            return apply(
                params, model_state, features, key, train, **(given if top.takes_given else {})
            )

        return forward

    return with_forward(
        top,
        on_trunk,
        init=init,
        name=f"heads({base.name}, {top.name})",
        takes_given=True,
        base_of=base_of(base),
    )
