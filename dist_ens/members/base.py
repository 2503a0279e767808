"""A network in `shared`, which all members have in common and which is not trained."""

from collections.abc import Callable

import jax

from dist_ens.ground.errors import UserError
from dist_ens.ground.state import differing, leaf_name
from dist_ens.ground.types import Inputs, Key, ModelState, Params, PyTree
from dist_ens.members.member import Member

_MOST_NAMED = 5


def base_of(member: Member) -> Callable[[PyTree], tuple[Params, ModelState]]:
    """Returns a function that makes parameters and model state from a network of the library.

    A pair of them is taken as it is.
    """

    def parts(given: PyTree) -> tuple[Params, ModelState]:
        is_pair = type(given) is tuple and len(given) == 2
        return given if is_pair else member.parts_of(given, None)

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
