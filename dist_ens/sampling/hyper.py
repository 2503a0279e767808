"""Settings whose values differ from member to member, such as learning rates.

The functions below describe how a value is drawn. It depends on the seed, the name of the setting
and the id of the member alone, so a member keeps it in an ensemble of any size.
"""

import ast
import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import jax
import numpy as np

from dist_ens.ground.errors import UserError, counted, did_you_mean, kind_of
from dist_ens.ground.randomness import HYPER, member_key

__all__ = ["choice", "log_uniform", "uniform"]


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The distribution of a setting; the functions of this module make it."""

    kind: str
    args: tuple[float, ...]

    def __str__(self) -> str:
        return f"{self.kind}({', '.join(f'{each:g}' for each in self.args)})"

    def at(self, share: np.ndarray) -> np.ndarray:
        """Returns the values below which the given shares of all draws are, float64[members]."""
        if self.kind == "choice":
            return np.asarray(self.args)[(share * len(self.args)).astype(int)]
        low, high = self.args
        if self.kind == "uniform":
            return low + (high - low) * share
        return low * (high / low) ** share


def uniform(low: float, high: float) -> Drawn:
    """Returns the uniform distribution on [low, high).

    >>> uniform(0.0, 0.5).at(np.array([0.5])).tolist()
    [0.25]
    """
    return _of_range("uniform", low, high)


def log_uniform(low: float, high: float) -> Drawn:
    """Returns the distribution on [low, high) whose logarithm is uniform; 0 < low < high.

    >>> log_uniform(1e-4, 1e-2).at(np.array([0.5])).round(6).tolist()
    [0.001]
    """
    return _of_range("log_uniform", low, high)


def choice(*values: float) -> Drawn:
    """Returns the distribution that takes each of some numbers equally often.

    >>> choice(0.0, 0.1, 0.3).at(np.array([0.0, 0.5, 0.99])).tolist()
    [0.0, 0.1, 0.3]
    """
    if not values:
        raise UserError("choice() has no values. Give numbers, such as choice(0.0, 0.1).")
    return Drawn("choice", tuple(map(partial(_number, "choice"), values)))


_KINDS: Mapping[str, Callable[..., Drawn]] = {
    "uniform": uniform,
    "log_uniform": log_uniform,
    "choice": choice,
}


class Hyper(dict[str, np.ndarray]):
    """The values of the members of an ensemble by the name of the setting, float32[members] each.

    Attributes:
        spec: Distribution of each setting, or its values by the ids of the members.
    """

    def __init__(
        self, spec: Mapping[str, Drawn | Mapping[int, float]], ids: Sequence[int], seed: int
    ) -> None:
        self.spec = dict(spec)
        super().__init__({name: self._values(name, ids, seed) for name in sorted(spec)})

    @classmethod
    def of(cls, given: "Mapping[str, object] | None", ids: Sequence[int], seed: int) -> "Hyper":
        """Returns the values of the members with some ids, from what an `Ensemble` is given."""
        if isinstance(given, Hyper):  # That of an ensemble of other members.
            return cls(given.spec, ids, seed)
        if given is not None and not isinstance(given, Mapping):
            raise UserError(
                f"hyper is {kind_of(given)}. Give a dict from names to values, such as "
                "hyper={'learning_rate': dist_ens.hyper.log_uniform(1e-4, 1e-2)}."
            )
        specs = {name: _spec(name, value, ids) for name, value in (given or {}).items()}
        return cls(specs, ids, seed)

    def by_id(self, ids: Sequence[int]) -> dict[str, dict[str, float]]:
        """Returns the values by the ids of the members, as the record of a run holds them."""
        keys = list(map(str, ids))
        return {name: dict(zip(keys, each.tolist(), strict=True)) for name, each in self.items()}

    def _values(self, name: str, ids: Sequence[int], seed: int) -> np.ndarray:
        spec = self.spec[name]
        if isinstance(spec, Drawn):
            return spec.at(_shares(name, ids, seed)).astype(np.float32)
        if absent := [member_id for member_id in ids if member_id not in spec]:
            raise UserError(
                f"hyper[{name!r}] has values for the members {[*spec]}, and none for {absent}. "
                "Give a distribution, which has a value for every member, or more values."
            )
        return np.array([spec[member_id] for member_id in ids], np.float32)


def parsed(name: str, text: str) -> Drawn | float | Sequence[float]:
    """Returns the numbers or the distribution that a text such as `choice(0.0, 0.1)` describes."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call):
            return ast.literal_eval(call)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.keywords:
            return _KINDS[call.func.id](*map(ast.literal_eval, call.args))
    except (SyntaxError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, UserError):
            raise
    hint = did_you_mean(text.partition("(")[0], _KINDS)
    raise UserError(
        f"hyper.{name} is {text!r}.{hint} Give a number, a list of one number for each member, or "
        "one of uniform(LOW, HIGH), log_uniform(LOW, HIGH) and choice(A, B, …)."
    )


@jax.tree_util.register_pytree_node_class
class Given(dict[str, jax.Array]):
    """The values of one member, as a user's function is given them: {name: float32[]}."""

    def __missing__(self, name: str) -> jax.Array:
        raise UserError(
            f"hyper[{name!r}] is read, and hyper has {', '.join(self) or 'no values'}."
            f"{did_you_mean(str(name), self)} Give the ensemble hyper={{{name!r}: …}}."
        )

    def tree_flatten(self) -> tuple[tuple[jax.Array, ...], tuple[str, ...]]:
        return tuple(self.values()), tuple(self)

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Sequence[jax.Array]) -> "Given":
        return cls(zip(names, values, strict=True))


def _of_range(kind: str, low: float, high: float) -> Drawn:
    ends = _number(kind, low), _number(kind, high)
    if not ends[0] < ends[1] or (kind == "log_uniform" and ends[0] <= 0):
        below = "0 < low < high" if kind == "log_uniform" else "low < high"
        raise UserError(f"{kind}({low}, {high}) has no values. Give bounds with {below}.")
    return Drawn(kind, ends)


def _number(kind: str, value: object) -> float:
    try:
        number = float(value)  # type: ignore[arg-type]  # It may be anything.
    except (TypeError, ValueError, OverflowError):
        number = np.nan
    with np.errstate(over="ignore", under="ignore"):
        held = np.float32(number)
    if not np.isfinite(held) or (held == 0) != (number == 0):
        raise UserError(f"{kind} takes numbers that float32 holds, and got {value!r}.")
    return number


def _spec(name: object, value: object, ids: Sequence[int]) -> Drawn | dict[int, float]:
    """Returns a distribution, or the values of the members by their ids."""
    if isinstance(value, str):
        value = parsed(str(name), value)
    if isinstance(value, Drawn):
        return value
    try:
        given = np.asarray(value)
        if given.dtype.kind == "c":  # NumPy would drop the imaginary parts.
            raise ValueError("it is complex")
        values = given.astype(np.float64)
        if not (isinstance(name, str) and np.isfinite(values.astype(np.float32)).all()):
            raise ValueError("it has no name, or is not finite")
    except (TypeError, ValueError) as error:
        raise UserError(
            f"hyper[{name!r}] is {kind_of(value)}, and not finite numbers under a name. Give one "
            "for each member, or a distribution, such as dist_ens.hyper.uniform(0.0, 0.5)."
        ) from error
    if values.shape not in ((), (len(ids),)):
        raise UserError(
            f"hyper[{name!r}] has the shape {list(values.shape)}, and there are "
            f"{counted(len(ids), 'member')}. Give one number for each, or one for all of them."
        )
    return dict(zip(map(int, ids), np.broadcast_to(values, len(ids)).tolist(), strict=True))


def _shares(name: str, ids: Sequence[int], seed: int) -> np.ndarray:
    """Returns the uniform draw of each member for a setting, in [0, 1), float64[members]."""

    def share(member_id: jax.Array) -> jax.Array:
        key = jax.random.fold_in(member_key(seed, member_id), HYPER)
        return jax.random.uniform(jax.random.fold_in(key, zlib.crc32(name.encode())))

    with jax.transfer_guard("allow"), jax.threefry_partitionable(True):
        return np.asarray(jax.vmap(share)(jax.numpy.asarray(ids, np.int32)), np.float64)
