"""Checks of the arguments of an `Ensemble`."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import DTypeLike

from dist_ens.ensemble.failure_policy import POLICIES, FailurePolicy
from dist_ens.errors import UserError, counted, first_line, kind_of
from dist_ens.ground.numbers import (
    MOST_DROPOUT_SAMPLES,
    MOST_SEED,
    require_one_of,
    whole_number,
)
from dist_ens.losses import Objective
from dist_ens.methods import Method, adversarial, bootstrap, label_smoothing, mixup
from dist_ens.signatures import call_error, name_of
from dist_ens.state import described
from dist_ens.types import Inputs, Outputs, Shapes

if TYPE_CHECKING:
    from dist_ens.ensemble.ensemble import Ensemble


def checked_counts(ensemble: "Ensemble") -> dict[str, int]:
    """Returns the whole numbers among the arguments of an ensemble, as Python integers.

    Raises:
        UserError: If an argument is not a whole number, or is out of range.
    """
    counts = {
        name: whole_number(name, getattr(ensemble, name), least=1)
        for name in ("num_members", "waves", "microbatches", "num_groups")
    }
    counts["seed"] = whole_number("seed", ensemble.seed, least=0, most=MOST_SEED)
    if ensemble.dropout_samples is not None:
        counts["dropout_samples"] = whole_number(
            "dropout_samples", ensemble.dropout_samples, least=1, most=MOST_DROPOUT_SAMPLES
        )
    return counts


def checked_ids(member_ids: object, num_members: int) -> tuple[int, ...]:
    """Returns the members' ids as Python integers.

    Raises:
        UserError: If an id is not a whole number from 0 on, two ids are equal, or their number is
            not `num_members`.
    """
    if not isinstance(member_ids, Iterable):
        raise UserError(f"member_ids is {member_ids!r}. Give a list with one id for each member.")
    ids = tuple(whole_number("An id in member_ids", each, least=0) for each in member_ids)
    if len(ids) != num_members or len(set(ids)) != len(ids):
        raise UserError(
            f"member_ids is {list(ids)} for {counted(num_members, 'member')}. Give each member a "
            "different id."
        )
    return ids


def check_ids_of_groups(member_ids: Sequence[int], num_groups: int) -> None:
    """Raises a `UserError` unless each group of members has as many as the others, in turn."""
    is_in_turn = all(each % num_groups == n % num_groups for n, each in enumerate(member_ids))
    if not is_in_turn or len(member_ids) % num_groups:
        raise UserError(
            f"The members {repr(list(member_ids))[:200]} are not the same number of each of the "
            f"{num_groups} groups, in turn. The group of a member is its id modulo {num_groups}. "
            f"Take whole sets of members, such as those with the ids 0 to {num_groups - 1}."
        )


def check_batch_specs(declared: object, microbatches: int) -> None:
    """Raises a `UserError` unless an ensemble can use its `batch_specs`."""
    names = jax.tree.leaves(declared)
    if not isinstance(declared, str | Mapping) or not {"batch", "shared"}.issuperset(names):
        raise UserError(
            f"batch_specs is {declared!r}. Give a dict from keys of the batch to 'shared', or "
            "'shared' for the whole batch."
        )
    if microbatches > 1 and "shared" in names:
        raise UserError(
            f"microbatches={microbatches} divides every leaf of a batch into parts, and "
            f"batch_specs={declared!r} names leaves without rows. Leave one of them out."
        )


def checked_policy(failures: object) -> FailurePolicy:
    """Returns the policy for failed updates.

    Args:
        failures: Policy, its name, or None for the default.

    Raises:
        UserError: If it is something else, or the name is unknown.
    """
    if failures is not None and not isinstance(failures, FailurePolicy | str):
        raise UserError(
            f"failures is {kind_of(failures)}. Give the name of a policy, such as 'skip', or a "
            f"dist_ens.FailurePolicy. The policies are {', '.join(POLICIES)}."
        )
    return FailurePolicy.of(failures)


def checked_methods(methods: object) -> tuple[Method, ...]:
    """Returns the methods of an ensemble as a tuple.

    Raises:
        UserError: If a method cannot be called with a loss, or two methods cannot be combined.
    """
    if callable(methods) or not isinstance(methods, Iterable):
        raise UserError(
            f"methods is {_shown(methods)}, not a tuple. Give a tuple of methods, such as "
            "methods=(dist_ens.methods.bootstrap(),)."
        )
    methods = tuple(methods)
    for method in methods:
        if method in (adversarial, bootstrap, label_smoothing, mixup):
            raise UserError(
                f"methods holds {_shown(method)}, which makes a method and is none. Call it, such "
                f"as dist_ens.methods.{name_of(method)}(...)."
            )
        error = call_error(method, 1)
        if error is not None:
            raise UserError(
                f"methods holds {_shown(method)}, which cannot be called with a loss: {error}. "
                "Give a function from a loss to a loss, such as dist_ens.methods.bootstrap()."
            )
    if all(any(getattr(m, kind, False) for m in methods) for kind in ("is_mixup", "is_bootstrap")):
        raise UserError(
            "The method mixup would mix out-of-bag examples into those of the member, which "
            "bootstrap draws. Leave one of the two methods out."
        )
    return methods


def checked_dtype(dtype: DTypeLike | None) -> str | None:
    """Returns the name of the type in which a network computes; None if `dtype` is None.

    Raises:
        UserError: If the type is not one of `float32` and `bfloat16`.
    """
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    require_one_of("compute_dtype", name, ("float32", "bfloat16"))
    return name


@contextlib.contextmanager
def explained_inputs(inputs: Inputs, takes: Callable[[Shapes], object]) -> Iterator[None]:
    """Turns what a network raises for inputs that it does not take into a `UserError`.

    Args:
        inputs: Inputs of the network, for the message.
        takes: Function of shapes and types of inputs that raises an error unless the network takes
            them.
    """
    try:
        yield
    except (UserError, RuntimeError):  # A device may be full, or an array deleted.
        raise
    except Exception as error:  # The network of a user may raise anything.
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype), inputs)
        if _accepts(takes, one):
            raise UserError(
                f"The inputs {described(inputs)} are one example, and the members take a batch "
                f"such as {described(one)}. Reshape the array; a single example is an array of "
                "length 1."
            ) from error
        is_dict = isinstance(inputs, Mapping) and Objective.INPUTS in inputs
        remedy = (
            f"Give data[{Objective.INPUTS!r}] alone, if the network was trained on that."
            if is_dict
            else "Give inputs like those of the training data, [examples, ...]."
        )
        raise UserError(
            f"The network does not take the inputs {described(inputs)}: {type(error).__name__}: "
            f"{first_line(error)} {remedy}"
        ) from error


def require_rows(objective: Objective | None, outputs: Outputs, inputs: Inputs) -> Outputs:
    """Returns the outputs of a network after a check that they have a row for each example.

    Args:
        objective: Objective that reads the outputs. None for a loss function, which takes any.
        outputs: Outputs of one member.
        inputs: Inputs of one member, leaves [batch, ...].

    Raises:
        ValueError: If the outputs do not have the shape [batch, ..., outputs].
    """
    if objective is None:
        return outputs
    size: int = jax.tree.leaves(inputs)[0].shape[0]
    shape: tuple[int, ...] = getattr(outputs, "shape", ())
    if len(shape) < 2 or shape[0] != size:
        raise ValueError(
            f"The outputs are {described(outputs)}, and {objective.name} takes [{size}, ..., "
            "outputs]."
        )
    return outputs


def _accepts(takes: Callable[[Shapes], object], inputs: Shapes) -> bool:
    """Returns whether a function takes inputs without an error."""
    with contextlib.suppress(Exception):
        takes(inputs)
        return True
    return False


def rows_of(batch: Shapes) -> int | None:
    """Returns the number of rows that every leaf of a batch has; None if they do not agree."""
    lengths = {np.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    return lengths.pop()[0] if len(lengths) == 1 and lengths != {()} else None


def rows_for_microbatches(count: int, batch: Shapes) -> int:
    """Returns the number of rows of a batch, which are divided into microbatches.

    Raises:
        UserError: If the leaves of the batch have different numbers of rows.
    """
    rows = rows_of(batch)
    if rows is None:
        raise UserError(
            f"microbatches={count} divides the rows of a batch into parts, and the leaves of this "
            f"batch have no common number of rows: {described(batch)}. Leave microbatches out."
        )
    return rows


def check_microbatches(field: str, count: int, global_batch_size: int) -> None:
    """Raises a `UserError` unless the batch divides into microbatches.

    Args:
        field: Name of the argument or field that holds the number of microbatches.
        count: Number of microbatches.
        global_batch_size: Number of examples in the batch, over all hosts.
    """
    if global_batch_size % count:
        raise UserError(
            f"{field}={count} must divide the batch, which has "
            f"{counted(global_batch_size, 'example')}. Use a divisor of {global_batch_size}."
        )


def _shown(value: object) -> str:
    if isinstance(value, type):
        return kind_of(value)
    return f"the function {name_of(value)}" if callable(value) else repr(value)[:80]
