"""The collectives of a compiled program, read from its HLO: their kinds, mesh axes and bytes."""

import dataclasses
import math
import re

import numpy as np

from dist_ens.layout import AXES, DATA, ENSEMBLE

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_OPERATION = re.compile(rf"= (.*?)\b({'|'.join(_KINDS)})(-start)?\(")
# Between TPU slices, XLA sends the data of a collective through the hosts.
_SENT = re.compile(r"= (.*?)\bsend\(.*_xla_megascale_transfer_type=\"(\w+)\"")
# Forms in which XLA writes the groups of devices of a collective.
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{(.*?)\}\}")
_ORDER = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
_OF_MESH = re.compile(rf"replica_groups=mesh\[(.*?)\]{_ORDER} ?\{{(.*?)\}}")
_TILED = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: `all-reduce`, `all-gather`, `reduce-scatter`, …
        axis: Mesh axis that it crosses: `ensemble`, `data`, `model`, `both` for the first two,
            other names joined by `+`, or `none` if it joins no devices.
        bytes: Bytes of its result on each device.
    """

    kind: str
    axis: str
    bytes: int


def collectives(hlo: str, device_ids: np.ndarray) -> list[Collective]:
    """Returns the collectives in the text of a compiled program, in their order.

    One in the body of a loop counts once, and so does one with an asynchronous start and end.
    `device_ids` are those of the mesh, int[ensemble_axis, data_axis], with a model axis if it has
    one.
    """
    found = []
    chains: set[str] = set()
    shape = device_ids.shape
    for line in hlo.splitlines():
        if sent := _SENT.search(line):
            groups = _groups_of_slices(line, device_ids)
            kind = sent.group(2).lower().replace("_", "-")
            size = _bytes(_parts(_plain(sent.group(1)))[0])
            found.append(Collective(kind, _axis(groups, shape), size))
            continue
        match = _OPERATION.search(line)
        # XLA:TPU writes the start, the overlap and the end of a fused collective separately.
        chain = re.findall(r'chain_id="(.*?)"', line)
        if not match or chains.intersection(chain):
            continue
        chains.update(chain)
        result, kind, start = match.groups()
        axis = _axis(_groups(line, math.prod(shape)), shape)
        found.append(Collective(kind, axis, _bytes(_result(result, kind) if start else result)))
    return found


def _result(shape: str, kind: str) -> str:
    """Returns the shape of a collective's result, given that of its start with the operands."""
    parts = _parts(_plain(shape))
    holds_operands = kind != "all-reduce" or parts[0].startswith("(")
    return parts[1] if holds_operands else shape


def _plain(shape: str) -> str:
    return re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", shape).strip()


def _parts(shape: str) -> list[str]:
    """Returns the elements of a tuple shape, which may be tuples themselves."""
    parts, depth = [""], 0
    for character in shape[1:-1]:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _bytes(shape: str) -> int:
    total = 0
    for dtype, lengths in _ARRAY.findall(_plain(shape)):
        digits = re.search(r"\d+", dtype)
        bits = int(digits.group()) if digits else 8  # The type `pred` has 8 bits.
        count = np.prod([int(n.lstrip("<=")) for n in lengths.split(",") if n], dtype=np.int64)
        total += -(-bits * int(count) // 8)
    return total


def _groups(line: str, num_devices: int) -> list[list[int]]:
    """Returns the groups of devices of a collective, by their positions in a mesh."""
    if "replica_groups={}" in line:
        return [[*range(num_devices)]]
    if match := _LISTED.search(line):
        return _numbers(match[1])
    if match := _OF_MESH.search(line):
        lengths = {name: int(length) for name, length in re.findall(r"'(\w+)'=(\d+)", match[1])}
        joined = [[*lengths].index(name) for name in re.findall(r"'(\w+)'", match[4])]
        grid = np.arange(math.prod(lengths.values()))
        if match[2]:
            grid = _in_order(grid, match[2], match[3])
        grid = grid.reshape(*lengths.values())
        last = range(grid.ndim - len(joined), grid.ndim)
        count = math.prod(grid.shape[axis] for axis in joined)
        return np.moveaxis(grid, joined, last).reshape(-1, count).tolist()
    if match := _TILED.search(line):
        groups, size = int(match[1]), int(match[2])
        return (
            _in_order(np.arange(groups * size), match[3], match[4]).reshape(groups, size).tolist()
        )
    raise ValueError(f"The devices of a collective are written in a form unknown here: {line}")


def _in_order(ids: np.ndarray, shape: str, order: str | None) -> np.ndarray:
    """Returns ids in another order: as the transposed array of some shape."""
    ids = ids.reshape([*map(int, shape.split(","))])
    return ids if order is None else ids.transpose([*map(int, order.split(","))])


def _numbers(text: str) -> list[list[int]]:
    """Returns the groups of a text such as `0,1},{2,3`."""
    return [[int(i) for i in group.split(",")] for group in text.split("},{")]


def _groups_of_slices(line: str, device_ids: np.ndarray) -> list[list[int]]:
    """Returns the groups of devices of a transfer between slices, by positions in the mesh."""
    positions = {number: place for place, number in enumerate(device_ids.ravel().tolist())}
    if match := re.search(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+)(?::(\d+))?\}"', line):
        slices, first = [int(number) for number in match[1].split(",")], int(match[2])
        of_a_slice = range(first, int(match[3] or first) + 1)
        groups = [[100_000 * number + local for number in slices] for local in of_a_slice]
    elif match := re.search(r"_xla_megascale_target=\{\{(.*?)\}\}", line):
        groups = _numbers(match[1])
    else:
        raise ValueError(f"The slices of a collective are written in a form unknown here: {line}")
    return [[positions[i] for i in group] for group in groups]


def _axis(groups: list[list[int]], shape: tuple[int, ...]) -> str:
    crossed = []
    for name, places in zip(AXES, np.indices(shape).reshape(len(shape), -1), strict=False):
        if any(len({*places[group]}) > 1 for group in groups):
            crossed.append(name)
    return "both" if crossed == [ENSEMBLE, DATA] else "+".join(crossed) or "none"
