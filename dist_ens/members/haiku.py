"""Members made from Haiku transforms. Haiku is optional; the extra `[haiku]` installs it."""

import inspect

from dist_ens.ground.types import Inputs, Key, ModelState, Network, Outputs, Params, PyTree
from dist_ens.members.member import Member, require_parameters
from dist_ens.members.modes import given_arguments, input_arguments, switch_arguments


def from_haiku(transformed: Network) -> Member:
    """Returns a member made from `hk.transform(fn)` or `hk.transform_with_state(fn)`.

    `fn` is called with one batch of inputs. If it takes several, they are a tuple, or a dict by the
    names of the arguments. An argument of `fn` that switches between training and
    evaluation, such as `is_training`, is set if it has a usual name (see
    `dist_ens.members.modes`). The member's `init` runs `fn` in training mode, as Haiku's own
    examples do. For dropout outside training, `fn` should draw with the key from
    `hk.maybe_next_rng_key()`, which is None if there is no key. A network that draws with
    `hk.next_rng_key()` where it predicts is always given a key.

    Args:
        transformed: Network, an `hk.Transformed` or `hk.TransformedWithState`, with or without
            `hk.without_apply_rng`.

    Returns:
        The member. Its model state is Haiku's state, or `()` for `hk.Transformed`.

    >>> import haiku as hk, jax
    >>> network = hk.transform(lambda x: hk.Linear(2, w_init=hk.initializers.Constant(1.0))(x))
    >>> member = from_haiku(network)
    >>> params, model_state = member.init(jax.random.key(0), jax.numpy.zeros((1, 3)))
    >>> member.apply(params, model_state, jax.numpy.array([[1.0, 2.0, 3.0]]), None, False)[0]
    Array([[6., 6.]], dtype=float32)
    """
    import haiku as hk

    stateful = isinstance(transformed, hk.TransformedWithState)
    names = [*inspect.signature(transformed.apply).parameters]
    takes_key = names[1 + stateful : 2 + stateful] == ["rng"]

    def init(key: Key, inputs: Inputs, **given: PyTree) -> tuple[Params, ModelState]:
        of_mode = switch_arguments(transformed.init, True)
        arguments = {**of_mode, **given_arguments(transformed.init, given)}
        args, named = input_arguments(transformed.init, inputs)
        made = transformed.init(key, *args, **named, **arguments)
        params, model_state = made if stateful else (made, ())
        require_parameters(params)
        return params, model_state

    def apply(
        params: Params,
        model_state: ModelState,
        inputs: Inputs,
        key: Key | None,
        train: bool,
        **given: PyTree,
    ) -> tuple[Outputs, ModelState]:
        leading = [params, *([model_state] if stateful else []), *([key] if takes_key else [])]
        of_mode = switch_arguments(transformed.apply, train, given=len(leading) + 1)
        arguments = {**of_mode, **given_arguments(transformed.apply, given)}
        args, named = input_arguments(transformed.apply, inputs, given=len(leading))
        returned = transformed.apply(*leading, *args, **named, **arguments)
        outputs, new_state = returned if stateful else (returned, ())
        return outputs, new_state if train else model_state

    def parts_of(params: Params, model_state: ModelState | None) -> tuple[Params, ModelState]:
        if model_state is None:
            model_state = {} if stateful else ()
        return params, model_state

    return Member(init, apply, "a Haiku network", takes_given=True, parts_of=parts_of)
