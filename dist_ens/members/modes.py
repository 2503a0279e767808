"""How a network is told whether it is trained, and whether it listened."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, Literal

# Names by which networks call the switch: of the first a value of True trains, of the second not.
TRAINING = ("train", "training", "is_training", "is_train", "training_mode", "train_mode")
EVALUATION = ("deterministic", "inference", "use_running_average", "is_eval", "eval_mode")
# These are switches as arguments of a call; a field of such a name may be anything.
EVALUATION_ARGUMENTS = (*EVALUATION, "eval", "evaluate", "test", "testing", "is_test")
# Of one network's parameters, model state and inputs, and the name of the data axis.
IdleLayers = Callable[[Any, Any, Any, str], list[str]]


def switches(train: bool) -> dict[str, bool]:
    """Returns the value of every switch that is recognised as a field, by its name."""
    return dict.fromkeys(TRAINING, train) | dict.fromkeys(EVALUATION, not train)


def switch_arguments(fn: Callable[..., Any], train: bool, *, given: int = 2) -> dict[str, bool]:
    """Returns the arguments of a function that switch between training and evaluation.

    Args:
        fn: Function of a network, such as the class's `__call__`.
        train: Whether the network is trained.
        given: Number of arguments that come before and are none, such as `self` and the inputs.

    Returns:
        Values by name, of those of `TRAINING` and `EVALUATION_ARGUMENTS` that the function takes.
        What `functools.partial` has set already is left out.

    >>> switch_arguments(lambda params, x, is_training, deterministic=None: x, train=True)
    {'is_training': True, 'deterministic': False}
    """
    values = dict.fromkeys(TRAINING, train) | dict.fromkeys(EVALUATION_ARGUMENTS, not train)
    is_set = fn.keywords if isinstance(fn, functools.partial) else {}
    names = [*inspect.signature(fn).parameters][given:]
    return {name: values[name] for name in names if name in values and name not in is_set}


def may_have_switch(layer: Any) -> bool:
    """Returns whether a layer may be switched to training, by a name that is recognised or not.

    Args:
        layer: A network, or a part of one, of a class that has a `__call__`.

    Returns:
        Whether its call has an argument of a usual name or with a default of True, False or None,
        or the layer has a field that is True or False.
    """
    known = {*TRAINING, *EVALUATION_ARGUMENTS}
    arguments = inspect.signature(type(layer).__call__).parameters.values()
    return any(
        argument.name in known
        or (argument.name != "key" and isinstance(argument.default, bool | None))
        for argument in arguments
    ) or any(
        isinstance(value, bool) and not name.startswith("_") for name, value in vars(layer).items()
    )


class Layers(NamedTuple):
    """Layers of a network that do something else in training.

    Attributes:
        dropping: Names of the layers that draw random numbers.
        counting: Names of the layers that collect statistics of batches.
        may_have_switch: Whether some part of the network, but for the library's layers, may be
            switched to training.
    """

    dropping: Sequence[str]
    counting: Sequence[str]
    may_have_switch: bool

    @property
    def that_wait(self) -> list[str]:
        """Names of the layers that should not be idle.

        Statistics may be frozen on purpose, in a network without a switch. Dropout that never drops
        serves no purpose.
        """
        frozen = not self.dropping and not self.may_have_switch
        return [] if frozen else [*self.dropping, *self.counting]


def idle_layers_of(
    apply: Callable[..., tuple[Any, Any]], layers: Callable[[Any, Any, Any, str], Layers]
) -> IdleLayers:
    """Returns a function that names the layers that wait for a switch which never comes.

    Args:
        apply: The member's.
        layers: Names the layers that do something else in training.

    Returns:
        A function of parameters, model state, inputs (shapes will do) and the name of the data
        axis. It returns the layers' names if a step of training computes what evaluation computes,
        and none otherwise.
    """

    def idle(params: Any, model_state: Any, inputs: Any, axis_name: str) -> list[str]:
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


def on_one_column(fn: Callable[..., Any], axis_name: str) -> Callable[..., Any]:
    """Returns a function inside which the data axis exists, with one column."""

    def alone(*args: Any) -> Any:
        columns = jax.vmap(fn, in_axes=None, out_axes=0, axis_size=1, axis_name=axis_name)(*args)
        return jax.tree.map(lambda leaf: leaf[0], columns)

    return alone


def _live_equations(jaxpr: Jaxpr) -> str:
    """Returns a traced function as text, without what contributes to none of its results."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return str(jaxpr.replace(eqns=live[::-1]))
