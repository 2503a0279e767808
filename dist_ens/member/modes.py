"""How a network is told whether it is trained, and whether it listened."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal

# Names by which networks call the switch: of the first a value of True trains, of the second not.
TRAINING = ("train", "training", "is_training", "is_train", "training_mode", "train_mode")
EVALUATION = (
    "deterministic",
    "inference",
    "use_running_average",
    "eval",
    "evaluate",
    "is_eval",
    "eval_mode",
    "test",
    "testing",
    "is_test",
)
# Of one network's parameters, model state and inputs, and the name of the data axis.
IdleLayers = Callable[[Any, Any, Any, str], list[str]]


def switches(train: bool) -> dict[str, bool]:
    """Returns the value of every switch that is recognised, by its name."""
    return dict.fromkeys(TRAINING, train) | dict.fromkeys(EVALUATION, not train)


def switch_arguments(fn: Callable[..., Any], train: bool, *, given: int = 2) -> dict[str, bool]:
    """Returns the arguments of a function that switch between training and evaluation.

    Args:
        fn: Function of a network, such as the class's `__call__`.
        train: Whether the network is trained.
        given: Number of arguments that come before and are none, such as `self` and the inputs.

    Returns:
        Values by name, of those of `TRAINING` and `EVALUATION` that the function takes.

    >>> switch_arguments(lambda params, x, is_training, deterministic=None: x, train=True)
    {'is_training': True, 'deterministic': False}
    """
    values = switches(train)
    names = [*inspect.signature(fn).parameters][given:]
    return {name: values[name] for name in names if name in values}


def idle_layers_of(
    apply: Callable[..., tuple[Any, Any]], layers: Callable[[Any, Any, Any, str], Sequence[str]]
) -> IdleLayers:
    """Returns a function that names the layers that wait for a switch which never comes.

    Args:
        apply: The member's.
        layers: Names the layers that draw random numbers or collect statistics in training.

    Returns:
        A function of parameters, model state, inputs (shapes will do) and the name of the data
        axis. It returns the layers' names if a step of training computes what evaluation computes,
        and none otherwise.
    """

    def idle(params: Any, model_state: Any, inputs: Any, axis_name: str) -> list[str]:
        names = list(layers(params, model_state, inputs, axis_name))
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
    return jax.vmap(fn, in_axes=None, out_axes=None, axis_size=1, axis_name=axis_name)


def _live_equations(jaxpr: Jaxpr) -> str:
    """Returns a traced function as text, without what contributes to none of its results."""
    needed = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    live = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            live.append(eqn)
            needed.update(v for v in eqn.invars if not isinstance(v, Literal))
    return str(jaxpr.replace(eqns=live[::-1]))
