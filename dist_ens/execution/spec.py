"""The language of executions: how a device runs its members, such as `vmap` or `unroll+masks`.

A name is `EXECUTION[+LOWERING][+STEPS]`. A lowering is another form of a slow operation. `register`
adds a word of your own, in Python or in the file of a config, which can then name it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Self

from jax.extend.core import ClosedJaxpr, Primitive

from dist_ens.ground.errors import UserError, did_you_mean
from dist_ens.ground.types import PyTree
from dist_ens.layout import Layout

# `fit` chooses an execution of this name by timing, and other programs by a rule; see `by_rule`.
AUTO = "auto"
STEPS = {
    "scanned": "the steps of a call in a loop inside the program",
    "unrolled": "the steps of a call one after another in one program",
    "single": "a program of one step, dispatched step after step",
}
# candidates(layout, traced, num_steps) -> names of executions to time for a program.
Candidates = Callable[[Layout, ClosedJaxpr, int], Sequence[str]]


@dataclasses.dataclass(frozen=True)
class MemberExecution:
    """An execution of the members of a device: the first word of a name.

    Attributes:
        name: Word that names it.
        over_members: Function `over_members(fn, in_axes, out_axes, chunk_size)` that makes a
            function of all members of a device from a function of one member. The axes are those of
            `jax.vmap`.
        takes_size: Whether the name has a number of members, as in `chunk:4`.
        candidates: Function `candidates(layout, traced, num_steps)` of the layout, the traced
            update and the number of steps in a call. It returns the names of executions that `auto`
            should time. Default: none.
    """

    name: str
    over_members: Callable[..., Callable[..., PyTree]]
    takes_size: bool = False
    candidates: Candidates = lambda layout, traced, num_steps: ()


@dataclasses.dataclass(frozen=True)
class Lowering:
    """Another form of an operation, with the same values up to rounding.

    Attributes:
        name: Word that names it.
        primitive: Primitive of JAX that is replaced. A name has at most one lowering of each.
        rule: Function `rule(*arrays, columns, **params)` that returns the results. `columns` is the
            length of the data axis, and `params` are the parameters of the primitive.
        candidates: See `MemberExecution`.
    """

    name: str
    primitive: Primitive
    rule: Callable[..., PyTree]
    candidates: Candidates = lambda layout, traced, num_steps: ()


MEMBER_EXECUTIONS: dict[str, MemberExecution] = {}
LOWERINGS: dict[str, Lowering] = {}


def register(word: MemberExecution | Lowering) -> None:
    """Adds a word to the language of executions.

    Args:
        word: Execution of members or lowering, which replaces another of the same name.
    """
    if isinstance(word, MemberExecution):
        MEMBER_EXECUTIONS[word.name] = word
    else:
        LOWERINGS[word.name] = word


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """The execution of the members of a device. It changes the results by rounding errors only.

    Attributes:
        members: Name of an execution of members, without the size, or `auto`.
        chunk_size: Number of members batched at a time, for `chunk` only.
        lowerings: Names of the lowerings, at most one for each operation.
        steps: Execution of the steps of a call, a key of `STEPS`. None scans them, except for one
            step, and for convolutions left to XLA on a CPU, whose gradient is slow inside a loop.
    """

    members: str = "vmap"
    chunk_size: int | None = None
    lowerings: tuple[str, ...] = ()
    steps: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the execution of a name, such as `unroll+masks` or `chunk:4+patches+scanned`.

        The words after the first may come in any order.

        Args:
            text: Name of the execution, `EXECUTION[+LOWERING][+STEPS]`, or `auto`.

        Raises:
            UserError: If a word is unknown, or two words are of one kind.

        >>> str(Execution.parse("chunk:4+masks+patches"))
        'chunk:4+patches+masks'
        """
        if text == AUTO:
            return cls(members=AUTO)
        first, *words = text.split("+")
        name, size = _parsed_members(first, text)
        kinds: dict[object, str] = {}
        for word in words:
            if word not in LOWERINGS and word not in STEPS:
                raise _unknown(word, text, [*LOWERINGS, *STEPS])
            kind = LOWERINGS[word].primitive if word in LOWERINGS else "steps"
            if kind in kinds:
                raise UserError(
                    f"The execution {text!r} says twice how to run {kind}: {kinds[kind]} and "
                    f"{word}. Leave one out."
                )
            kinds[kind] = word
        lowerings = tuple(word for word in LOWERINGS if word in words)
        return cls(members=name, chunk_size=size, lowerings=lowerings, steps=kinds.get("steps"))

    def lowering_of(self, primitive: object) -> str | None:
        """Returns the name of the lowering of an operation; None if it is left to XLA."""
        return next((n for n in self.lowerings if LOWERINGS[n].primitive is primitive), None)

    def __str__(self) -> str:
        size = "" if self.chunk_size is None else f":{self.chunk_size}"
        return "+".join(
            [self.members + size, *self.lowerings, *([self.steps] if self.steps else [])]
        )


def _parsed_members(word: str, text: str) -> tuple[str, int | None]:
    name, colon, size = word.partition(":")
    is_sized = size.isdecimal() and int(size) > 0
    if name not in MEMBER_EXECUTIONS or MEMBER_EXECUTIONS[name].takes_size != (
        bool(colon) and is_sized
    ):
        raise _unknown(
            word, text, [n + ":K" * each.takes_size for n, each in MEMBER_EXECUTIONS.items()]
        )
    return name, int(size) if colon else None


def _unknown(word: str, text: str, known: Iterable[str]) -> UserError:
    within = "" if word == text else f" in {text!r}"
    hint = did_you_mean(word, known)
    return UserError(
        f"The execution {word!r}{within} is unknown.{hint} Choose one of {', '.join(known)}, as in "
        f"vmap, chunk:4 or unroll+masks, or use {AUTO} alone."
    )
