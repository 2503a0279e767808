"""Switches between training and evaluation: their names and their values."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence

from dist_ens.ground.types import Inputs, ModelState, Outputs, PyTree

# Usual names of the switch. True means training in the first group, and evaluation in the second.
TRAINING = ("train", "training", "is_training", "is_train", "training_mode", "train_mode")
EVALUATION = ("deterministic", "inference", "use_running_average", "is_eval", "eval_mode")
# The additional names are switches only as arguments of a call. As fields they may mean anything.
EVALUATION_ARGUMENTS = (*EVALUATION, "eval", "evaluate", "test", "testing", "is_test")
# Forward pass of a member, `apply(params, model_state, inputs, key, train)`.
# Some also take `hyper`, the settings of the member, and `shared`, the arrays of all members.
Apply = Callable[..., tuple[Outputs, ModelState]]


def switches(train: bool) -> dict[str, bool]:
    """Returns the values of all switches that are recognised as fields, by name."""
    return dict.fromkeys(TRAINING, train) | dict.fromkeys(EVALUATION, not train)


def switch_arguments(fn: Callable[..., object], train: bool, *, given: int = 2) -> dict[str, bool]:
    """Returns values, by name, for the arguments of a function that switch training and evaluation.

    The first `given` arguments are not switches, such as `self` and the inputs. Arguments that
    `functools.partial` has already set are left out.
    """
    values = dict.fromkeys(TRAINING, train) | dict.fromkeys(EVALUATION_ARGUMENTS, not train)
    is_set = fn.keywords if isinstance(fn, functools.partial) else {}
    names = [*inspect.signature(fn).parameters][given:]
    return {name: values[name] for name in names if name in values and name not in is_set}


def given_arguments(fn: Callable[..., object], given: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Returns those of the given `hyper` and `shared` that a function takes by name."""
    if not given:
        return {}
    taken = inspect.signature(fn).parameters
    return {name: value for name, value in given.items() if name in taken}


def input_arguments(
    fn: Callable[..., object], inputs: Inputs, *, given: int = 1, others: Sequence[str] = ()
) -> tuple[tuple[Inputs, ...], dict[str, Inputs]]:
    """Returns the inputs of a network as the positional and the named arguments of its call.

    A network that needs several inputs takes a tuple of them. A network that can be given several
    inputs takes a dict by their names. Otherwise the inputs are one argument. The first `given`
    arguments of the call, those named `others`, `hyper`, `shared` and the switches are not
    inputs.
    """
    no_inputs = {*TRAINING, *EVALUATION_ARGUMENTS, "hyper", "shared", *others}
    taken = {
        name: argument.default is argument.empty
        for name, argument in [*inspect.signature(fn).parameters.items()][given:]
        if argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        and name not in no_inputs
    }
    required = {name for name, is_required in taken.items() if is_required}
    if isinstance(inputs, Mapping) and len(taken) > 1 and required <= inputs.keys() <= taken.keys():
        return (), dict(inputs)
    is_tuple = type(inputs) is tuple  # A NamedTuple is one input.
    return inputs if is_tuple and len(required) > 1 else (inputs,), {}


def named_arguments(fn: Callable[..., object], **values: object) -> dict[str, object]:
    """Returns those of some named arguments that a function takes."""
    taken = inspect.signature(fn).parameters.values()
    if any(argument.kind is argument.VAR_KEYWORD for argument in taken):
        return values
    return {name: values[name] for name in values.keys() & {each.name for each in taken}}
