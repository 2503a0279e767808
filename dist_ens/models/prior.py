"""Randomised prior functions."""

import jax

from dist_ens.ground.types import Inputs, Key, ModelState, Network, Outputs, Params, PyTree
from dist_ens.members import Member, as_member
from dist_ens.members.member import whole_parts, with_forward
from dist_ens.members.modes import Apply

_NETWORK, _PRIOR = "network", "prior"
_DRAW = 1  # Number by which the key of the prior differs from that of the network.


def with_prior(network: Network, scale: float = 1.0) -> Member:
    """Returns a member with a randomised prior function, which is not trained.

    With f the network and p a second network of the same kind, whose parameters are drawn once for
    each member, the outputs are

        f(x) + scale * p(x)

    Where there are no data, members differ as their priors do.

    Args:
        network: Network, in any form that `as_member` takes. Its outputs are floating-point arrays.
        scale: Scale of the prior.

    Returns:
        The member. Its parameters are those of the network. Its model state is
        `{"network": model state of the network, "prior": parameters and model state of the prior}`.

    >>> import dist_ens, jax.numpy as jnp
    >>> member = with_prior(dist_ens.models.mlp((4,), 1, hidden_sizes=(8,)), scale=3.0)
    >>> params, model_state = member.init(jax.random.key(0), jnp.zeros((1, 4)))
    >>> member.apply(params, model_state, jnp.ones((2, 4)), None, False)[0].shape
    (2, 1)

    Source: Osband et al. (2018), https://arxiv.org/abs/1806.03335.
    """
    member = as_member(network)

    def init(key: Key, inputs: Inputs, **given: PyTree) -> tuple[Params, ModelState]:
        params, model_state = member.init(key, inputs, **given)
        prior = member.init(jax.random.fold_in(key, _DRAW), inputs, **given)
        return params, {_NETWORK: model_state, _PRIOR: prior}

    def with_sum(apply: Apply) -> Apply:
        def forward(
            params: Params,
            model_state: ModelState,
            inputs: Inputs,
            key: Key | None,
            train: bool,
            **given: PyTree,
        ) -> tuple[Outputs, ModelState]:
            outputs, of_network = apply(params, model_state[_NETWORK], inputs, key, train, **given)
            of_prior, _ = apply(*model_state[_PRIOR], inputs, None, False, **given)
            summed = jax.tree.map(lambda a, b: a + scale * b, outputs, of_prior)
            return summed, {**model_state, _NETWORK: of_network}

        return forward

    return with_forward(
        member,
        with_sum,
        init=init,
        name=f"with_prior({member.name})",
        parts_of=whole_parts,
    )
