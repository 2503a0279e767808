"""Switches between training and evaluation: their names, their values, and checks of them."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.extend.core import Jaxpr, Literal

from dist_ens.types import Inputs, ModelState, Network, Outputs, Params, PyTree, Tree

# Usual names of the switch. True means training in the first group, and evaluation in the second.
TRAINING = ("train", "training", "is_training", "is_train", "training_mode", "train_mode")
EVALUATION = ("deterministic", "inference", "use_running_average", "is_eval", "eval_mode")
# The additional names are switches only as arguments of a call. As fields they may mean anything.
EVALUATION_ARGUMENTS = (*EVALUATION, "eval", "evaluate", "test", "testing", "is_test")
# Function of the parameters, model state and inputs of a network, and of the data axis's name. It
# returns the names of the layers that training does not switch on.
IdleLayers = Callable[[Params, ModelState, Inputs, str], list[str]]


def switches(train: bool) -> dict[str, bool]:
    """Returns the values of all switches that are recognised as fields, by name."""
    return dict.fromkeys(TRAINING, train) | dict.fromkeys(EVALUATION, not train)


def switch_arguments(fn: Callable[..., object], train: bool, *, given: int = 2) -> dict[str, bool]:
    """Returns values for the arguments of a function that switch between training and evaluation.

    Args:
        fn: Forward pass of a network, such as the class's `__call__`.
        train: Whether the network is trained.
        given: Number of leading arguments that are not switches, such as `self` and the inputs.

    Returns:
        Values by name, for the arguments in `TRAINING` and `EVALUATION_ARGUMENTS`. Arguments that
        `functools.partial` has already set are left out.

    >>> switch_arguments(lambda params, x, is_training, deterministic=None: x, train=True)
    {'is_training': True, 'deterministic': False}
    """
    values = dict.fromkeys(TRAINING, train) | dict.fromkeys(EVALUATION_ARGUMENTS, not train)
    is_set = fn.keywords if isinstance(fn, functools.partial) else {}
    names = [*inspect.signature(fn).parameters][given:]
    return {name: values[name] for name in names if name in values and name not in is_set}


def may_have_switch(layer: Network) -> bool:
    """Returns whether a layer may have a switch to training, with a usual name or another name.

    Args:
        layer: Network, or part of one, whose class has a `__call__`.

    Returns:
        Whether its call may have a switch (see `call_may_have_switch`), or the layer has a field
        that is True or False.
    """
    return call_may_have_switch(type(layer).__call__) or any(
        isinstance(value, bool) and not name.startswith("_") for name, value in vars(layer).items()
    )


def call_may_have_switch(fn: Callable[..., object]) -> bool:
    """Returns whether an argument has a usual name, or True, False or None as its default.

    Args:
        fn: Forward pass of a network.
    """
    known = {*TRAINING, *EVALUATION_ARGUMENTS}
    return any(
        argument.name in known
        or (argument.name != "key" and isinstance(argument.default, bool | None))
        for argument in inspect.signature(fn).parameters.values()
    )


class Layers(NamedTuple):
    """The layers of a network that compute other results in training than in evaluation.

    Attributes:
        dropping: Names of the layers with dropout.
        counting: Names of the layers that collect statistics of batches.
        may_have_switch: Whether the user's own part of the network may have a switch to training.
    """

    dropping: Sequence[str]
    counting: Sequence[str]
    may_have_switch: bool

    @property
    def that_wait(self) -> list[str]:
        """Names of the layers that training should switch on.

        Statistics may be frozen on purpose in a network without a switch. Dropout that is never on
        serves no purpose.
        """
        frozen = not self.dropping and not self.may_have_switch
        return [] if frozen else [*self.dropping, *self.counting]


def idle_layers_of(
    apply: Callable[..., tuple[Outputs, ModelState]],
    layers: Callable[[Params, ModelState, Inputs, str], Layers],
) -> IdleLayers:
    """Returns a function that names the layers that training does not switch on.

    Args:
        apply: Forward pass of the member.
        layers: Function that names the layers that should compute other results in training. It
            takes the same arguments as the returned function.

    Returns:
        A function of parameters, model state, inputs (arrays or shapes) and the name of the data
        axis. It returns the layers' names if training computes the same results as evaluation, and
        an empty list otherwise.
    """

    def idle(params: Params, model_state: ModelState, inputs: Inputs, axis_name: str) -> list[str]:
        names = layers(params, model_state, inputs, axis_name).that_wait
        if not names:
            return []
        traced = [
            _live_equations(
                jax.make_jaxpr(
                    on_one_column(
                        lambda p, s, x, key, train=train: apply(
                            p, s, x, key if train else None, train
                        ),
                        axis_name,
                    )
                )(params, model_state, inputs, jax.eval_shape(lambda: jax.random.key(0))).jaxpr
            )
            for train in (True, False)
        ]
        return names if traced[0] == traced[1] else []

    return idle


def on_one_column(fn: Callable[..., Tree], axis_name: str) -> Callable[..., Tree]:
    """Returns a function that runs `fn` under a data axis with one column.

    Args:
        fn: Function that may use collectives over the data axis.
        axis_name: Name of the data axis.
    """

    def alone(*args: PyTree) -> Tree:
        columns = jax.vmap(fn, in_axes=None, out_axes=0, axis_size=1, axis_name=axis_name)(*args)
        return jax.tree.map(lambda leaf: leaf[0], columns)

    return alone


def _live_equations(jaxpr: Jaxpr) -> str:
    """Returns a traced function as text, without the operations that no result depends on."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return str(jaxpr.replace(eqns=live[::-1]))
