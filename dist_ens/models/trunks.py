"""Heads on a trunk, which all members share, or which each member trains with its heads."""

import jax
import jax.numpy as jnp

from dist_ens.ground.numbers import whole_number
from dist_ens.ground.types import Inputs, Key, ModelState, Network, Outputs, Params, PyTree
from dist_ens.members import Member, as_member
from dist_ens.members.base import base_of, checked_base, whole_network
from dist_ens.members.member import with_forward
from dist_ens.members.modes import Apply

_TRUNK, _HEADS = "trunk", "heads"


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
    base, top = whole_network(trunk, "heads"), as_member(head)
    if top.has_base:
        whole_network(head, "heads")  # It raises, as there is one shared base.

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


def trunk_and_heads(trunk: Network, head: Network, heads: int) -> Member:
    """Returns a member with heads on the outputs of one trunk, all of which are trained.

    Args:
        trunk: Network from inputs to features, in any form that `as_member` takes.
        head: Network from features to outputs, in any form that `as_member` takes.
        heads: Number of heads, at least 1.

    Returns:
        The member. Its parameters and its model state are dicts of `trunk` and `heads`, and the
        leaves of the latter are [heads, ...].

    >>> import dist_ens
    >>> trunk = dist_ens.models.mlp((4,), 8)
    >>> head = dist_ens.models.mlp((8,), 3, hidden_sizes=())
    >>> member = trunk_and_heads(trunk, head, heads=5)
    >>> params, model_state = member.init(jax.random.key(0), jnp.zeros((1, 4)))
    >>> member.apply(params, model_state, jnp.zeros((2, 4)), None, False)[0].shape
    (5, 2, 3)
    """
    base, top = (whole_network(each, "trunk_and_heads") for each in (trunk, head))
    heads = whole_number("heads", heads, least=1)

    def init(key: Key, inputs: Inputs, **given: PyTree) -> tuple[Params, ModelState]:
        of_trunk, of_heads = (given if each.takes_given else {} for each in (base, top))
        trunk_key, *keys = jax.random.split(key, 1 + heads)
        params, model_state = base.init(trunk_key, inputs, **of_trunk)
        features, _ = jax.eval_shape(
            lambda: base.apply(params, model_state, inputs, None, False, **of_trunk)
        )
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), features)
        own, own_state = jax.vmap(lambda key: top.init(key, zeros, **of_heads))(jnp.stack(keys))
        return {_TRUNK: params, _HEADS: own}, {_TRUNK: model_state, _HEADS: own_state}

    def apply(
        params: Params,
        model_state: ModelState,
        inputs: Inputs,
        key: Key | None,
        train: bool,
        **given: PyTree,
    ) -> tuple[Outputs, ModelState]:
        of_trunk, of_heads = (given if each.takes_given else {} for each in (base, top))
        trunk_key, keys = key, None
        if key is not None:
            trunk_key, *own = jax.random.split(key, 1 + heads)
            keys = jnp.stack(own)
        features, new_state = base.apply(
            params[_TRUNK], model_state[_TRUNK], inputs, trunk_key, train, **of_trunk
        )

        def of_head(
            params: Params, model_state: ModelState, key: Key | None
        ) -> tuple[Outputs, ModelState]:
            return top.apply(params, model_state, features, key, train, **of_heads)

        outputs, own_state = jax.vmap(of_head)(params[_HEADS], model_state[_HEADS], keys)
        return outputs, {_TRUNK: new_state, _HEADS: own_state}

    name = f"trunk_and_heads({base.name}, {top.name})"
    return Member(init, apply, name=name, heads=heads, takes_given=True)
