"""The ways in which a device runs its members, by name: `vmap`, `unroll+masks`, `chunk:4+patches`.

A name is `WAY[+LOWERING][+STEPS]`. A lowering is another form of a slow operation.
"""

import dataclasses
import difflib
from typing import Self

from dist_ens.errors import UserError

AUTO = "auto"  # An execution of this name is chosen by measuring when the run begins.
WAYS = {
    "vmap": "one batched program for all members",
    "unroll": "one program with the operations of one member after another",
    "map": "one member after another in a loop inside the program",
    "chunk:K": "K members batched at a time, one chunk after another",
    "loop": "the program of one member, dispatched once for each member: the reference",
}
CONVOLUTIONS = {
    "patches": "convolutions as patches and one matrix product",
    "canonical": "convolutions in the layout NHWC x HWIO, with neighbouring pixels as features if "
    "channels are few, and kernel gradients as products of shifts or patches",
    "apart": "a separate convolution for each member, instead of a grouped convolution",
}
PRODUCTS = {
    "aligned": "matrix products padded to whole vectors, or sums if terms or weights are few",
    "flat": "weight gradients with many terms as products of two matrices, the narrower first",
}
MAX_POOLING = {"masks": "the gradient of max-pooling by comparison, without a scatter"}
STEPS = {
    "scanned": "the steps of a call in a loop inside the program",
    "unrolled": "the steps of a call one after another in one program",
    "single": "a program of one step, dispatched step after step",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """The execution of the members of a device. It changes the results by rounding errors only.

    Attributes:
        members: Way to run the members, a key of `WAYS` without the size.
        chunk_size: Number of members batched at a time, for `chunk` only.
        convolutions: Lowering of convolutions, a key of `CONVOLUTIONS`. None leaves them to XLA.
        products: Lowering of matrix products, a key of `PRODUCTS`. None leaves them to XLA.
        max_pooling: Lowering of max-pooling, a key of `MAX_POOLING`. None leaves it to XLA.
        steps: Way to run the steps of a call, a key of `STEPS`. None scans them, except for one
            step, and for convolutions left to XLA on a CPU, whose gradient is slow inside a loop.
    """

    members: str = "vmap"
    chunk_size: int | None = None
    convolutions: str | None = None
    products: str | None = None
    max_pooling: str | None = None
    steps: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Returns the execution of a name, `WAY[+LOWERING][+STEPS]`.

        The words after the first may come in any order.

        Args:
            text: Name of the execution: `vmap`, `unroll+masks`, `chunk:4+patches+masks+scanned`, …

        Raises:
            UserError: If a word is unknown, or two words are of one kind.

        >>> str(Execution.parse("chunk:4+masks+patches"))
        'chunk:4+patches+masks'
        """
        way, *words = text.split("+")
        name, colon, size = way.partition(":")
        sized = f"{name}:K" in WAYS and size.isdecimal() and int(size) > 0
        if way not in [known for known in WAYS if ":" not in known] and not sized:
            raise _unknown(way, text, [*WAYS])
        fields: dict[str, str] = {}
        kinds = {
            "convolutions": CONVOLUTIONS,
            "products": PRODUCTS,
            "max_pooling": MAX_POOLING,
            "steps": STEPS,
        }
        for word in words:
            field = next((f for f, known in kinds.items() if word in known), None)
            if field is None:
                raise _unknown(word, text, [w for known in kinds.values() for w in known])
            if field in fields:
                raise UserError(
                    f"The execution {text!r} says twice how to run {field.replace('_', '-')}: "
                    f"{fields[field]} and {word}. Leave one out."
                )
            fields[field] = word
        return cls(members=name, chunk_size=int(size) if colon else None, **fields)

    def __str__(self) -> str:
        way = self.members if self.chunk_size is None else f"{self.members}:{self.chunk_size}"
        rest = (self.convolutions, self.products, self.max_pooling, self.steps)
        return "+".join([way, *(word for word in rest if word)])


def _unknown(word: str, text: str, known: list[str]) -> UserError:
    """Returns an error about an unknown word of an execution.

    Args:
        word: Word that is unknown.
        text: Name of the whole execution.
        known: Words that are known at this place.
    """
    near = difflib.get_close_matches(word, known, n=1)
    if word == AUTO:
        return UserError(
            f"The execution {text!r} adds words to {AUTO}, which chooses lowering and steps too. "
            f"Use {AUTO} alone."
        )
    if word.startswith("chunk") and "chunk:K" in known:
        hint = " K is a number of members, such as 4 in chunk:4."
    else:
        hint = f" Did you mean {near[0]!r}?" if near else ""
    within = "" if word == text else f" in {text!r}"
    return UserError(
        f"The execution {word!r}{within} is unknown.{hint} Choose one of {', '.join(known)}, as in "
        "WAY[+LOWERING][+STEPS], or use auto."
    )
