"""Embeddings of categories, in front of a network."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from dist_ens.ground.types import Inputs, Key, ModelState, Network, Outputs, Params, PyTree
from dist_ens.members import Member, as_member
from dist_ens.members.member import whole_parts, with_forward
from dist_ens.members.modes import Apply

_NETWORK, _EMBEDDINGS = "network", "embeddings"
_DRAW = 1  # Number by which the key of the embeddings differs from that of the network.
_LARGEST_SIZE = 50


def embedding_size(num_values: int) -> int:
    """Returns the length of a category's vector: half the number of categories, at most 50.

    >>> embedding_size(40), embedding_size(1000)
    (20, 50)
    """
    return min(_LARGEST_SIZE, (num_values + 1) // 2)


def with_embeddings(network: Network, num_values: Sequence[int]) -> Member:
    """Returns a member that replaces the numbers of categories by vectors that it learns.

    The last columns of the inputs are numbers of categories. The network is given the other
    columns, and then the vectors of the categories. Numbers of categories must not be rounded or
    mixed: use `compute_dtype="float32"`, and neither `mixup` nor `adversarial`.

    Args:
        network: Network, in any form that `as_member` takes, of inputs float[batch, columns].
        num_values: Number of categories of each of the last columns, which hold 0 to `num_values`.
            The number `num_values` itself is a category that training never saw: its vector is 0.

    Returns:
        The member. Its parameters are `{"network": parameters of the network, "embeddings": list of
        float[num_values + 1, size]}`, with the sizes of `embedding_size`.

    >>> import dist_ens
    >>> mlp = dist_ens.models.mlp((1 + 20,), 1, hidden_sizes=(8,))  # One number and a vector of 20.
    >>> member = with_embeddings(mlp, [40])
    >>> params, model_state = member.init(jax.random.key(0), jnp.zeros((1, 2)))
    >>> member.apply(params, model_state, jnp.array([[0.5, 39.0]]), None, False)[0].shape
    (1, 1)

    Source: Guo and Berkhahn (2016), https://arxiv.org/abs/1604.06737.
    """
    member = as_member(network)

    def embedded(vectors: Sequence[jax.Array], inputs: Inputs) -> jax.Array:
        numbers, codes = jnp.split(inputs, [inputs.shape[1] - len(num_values)], axis=1)
        codes = codes.astype(jnp.int32).T
        found = [of_column[code] for of_column, code in zip(vectors, codes, strict=True)]
        return jnp.concatenate([numbers, *found], axis=1)

    def init(key: Key, inputs: Inputs, **given: PyTree) -> tuple[Params, ModelState]:
        keys = jax.random.split(jax.random.fold_in(key, _DRAW), len(num_values))
        vectors = [
            # Training never reads the last row, so it stays 0.
            jax.random.normal(k, (count + 1, embedding_size(count))).at[-1].set(0)
            for k, count in zip(keys, num_values, strict=True)
        ]
        params, model_state = member.init(key, embedded(vectors, inputs), **given)
        return {_NETWORK: params, _EMBEDDINGS: vectors}, model_state

    def of_vectors(apply: Apply) -> Apply:
        def forward(
            params: Params,
            model_state: ModelState,
            inputs: Inputs,
            key: Key | None,
            train: bool,
            **given: PyTree,
        ) -> tuple[Outputs, ModelState]:
            vectors = embedded(params[_EMBEDDINGS], inputs)
            return apply(params[_NETWORK], model_state, vectors, key, train, **given)

        return forward

    return with_forward(
        member,
        of_vectors,
        init=init,
        name=f"with_embeddings({member.name})",
        parts_of=whole_parts,
    )
