"""A network in `shared`, which all members have in common and which is not trained."""

from collections.abc import Callable

import jax

from dist_ens.ground.errors import UserError
from dist_ens.ground.state import differing, leaf_name
from dist_ens.ground.types import Inputs, Key, ModelState, Network, Params, PyTree
from dist_ens.members.adapt import as_member
from dist_ens.members.member import Member

_MOST_NAMED = 5


def whole_network(network: Network, what: str) -> Member:
    """Returns a network as a member; raises a `UserError` if it has heads, or a shared base.

    `what` is the function that makes a member of it, for the message.
    """
    member = as_member(network)
    if member.has_base or member.heads is not None:
        has = "is one on shared arrays" if member.has_base else "has heads"
        raise UserError(
            f"{what} takes a whole network of one predictor, and {member.name} {has}. Give it the "
            "network itself."
        )
    return member


def base_of(member: Member) -> Callable[[PyTree], tuple[Params, ModelState]]:
    """Returns a function that makes parameters and model state from a network of the library.

    A pair of them is taken as it is.
    """

    def parts(given: PyTree) -> tuple[Params, ModelState]:
        is_pair = type(given) is tuple and len(given) == 2
        params, model_state = given if is_pair else (given, None)
        return member.parts_of(params, None if is_pair and model_state == () else model_state)

    return parts


def checked_base(
    member: Member, key: Key, inputs: Inputs, shared: PyTree
) -> tuple[Params, ModelState]:
    """Returns the parameters and the model state of a network in `shared`.

    Raises:
        UserError: If there is none, or its arrays have other shapes than the network's.
    """
    if shared is None:
        raise UserError(
            f"The network {member.name} is shared by all members, and the ensemble has no shared "
            "arrays. Give Ensemble(..., shared=...) its parameters."
        )
    expected = _shapes(jax.eval_shape(member.init, key, inputs))
    found = _shapes(shared)
    wrong = [
        f"{name} is {found.get(name, 'absent')} in shared, {expected.get(name, 'absent')} in the "
        "network"
        for name in differing(expected, found)
    ]
    if wrong:
        raise UserError(
            f"The shared arrays do not fit the network {member.name}: "
            f"{'; '.join(wrong[:_MOST_NAMED])}. Give the parameters of this network, and its model "
            "state if it has one: shared=(params, model_state)."
        )
    return shared


def _shapes(parts: tuple[Params, ModelState]) -> dict[str, str]:
    # The types may differ, such as those of a base in bfloat16.
    return {
        f"{part}{leaf_name(path) if path else ''}": str([*leaf.shape])
        for part, tree in zip(("params", "model_state"), parts, strict=True)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
