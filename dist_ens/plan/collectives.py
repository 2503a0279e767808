"""The collectives of a compiled program, read from its HLO: their kinds, mesh axes and bytes."""

import dataclasses
import re

import numpy as np

from dist_ens.layout import DATA, ENSEMBLE

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
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
        kind: Kind of the collective: `all-reduce`, `all-gather`, `reduce-scatter`, …
        axis: Mesh axis that the collective crosses: `ensemble`, `data`, `both`, or `none` if it
            joins no devices.
        bytes: Bytes of its result on each device.
    """

    kind: str
    axis: str
    bytes: int


def collectives(hlo: str, device_ids: np.ndarray) -> list[Collective]:
    """Returns the collectives in a compiled program, in the order of its text.

    A collective in the body of a loop counts once. The start and the end of an asynchronous
    collective count as one.

    Args:
        hlo: Text of the compiled module, for any platform.
        device_ids: Ids of the devices of the mesh, int[ensemble_axis, data_axis].

    Raises:
        ValueError: If the devices of a collective are written in an unknown form.
    """
    found = []
    chains: set[str] = set()
    rows, columns = device_ids.shape
    for line in hlo.splitlines():
        if sent := _SENT.search(line):
            groups = _groups_of_slices(line, device_ids)
            kind = sent.group(2).lower().replace("_", "-")
            size = _bytes(_parts(_plain(sent.group(1)))[0])
            found.append(Collective(kind, _axis(groups, columns), size))
            continue
        match = _OPERATION.search(line)
        if not match:
            continue
        # XLA:TPU writes the start, the overlap and the end of a fused collective separately.
        chain = re.search(r'chain_id="(.*?)"', line)
        if chain and chain.group(1) in chains:
            continue
        if chain:
            chains.add(chain.group(1))
        result, kind, start = match.groups()
        axis = _axis(_groups(line, rows, columns), columns)
        found.append(Collective(kind, axis, _bytes(_result(result, kind) if start else result)))
    return found


def _result(shape: str, kind: str) -> str:
    """Returns the shape of a collective's result, given the shape of its asynchronous start.

    The start also holds the operands. Only that of an all-reduce may hold the result alone.
    """
    parts = _parts(_plain(shape))
    holds_operands = kind != "all-reduce" or parts[0].startswith("(")
    return parts[1] if holds_operands else shape


def _plain(shape: str) -> str:
    """Returns a shape without layouts and comments."""
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
    """Returns the bytes of all arrays of a shape, without padding."""
    total = 0
    for dtype, lengths in _ARRAY.findall(_plain(shape)):
        digits = re.search(r"\d+", dtype)
        bits = int(digits.group()) if digits else 8  # The type `pred` has 8 bits.
        count = np.prod([int(n.lstrip("<=")) for n in lengths.split(",") if n], dtype=np.int64)
        total += -(-bits * int(count) // 8)
    return total


def _groups(line: str, ensemble_axis: int, data_axis: int) -> list[list[int]]:
    """Returns the groups of devices of a collective, by their positions in the mesh.

    Raises:
        ValueError: If the devices are written in an unknown form.
    """
    grid = np.arange(ensemble_axis * data_axis).reshape(ensemble_axis, data_axis)
    if match := re.search(r"replica_groups=\{\{(.*?)\}\}", line):
        return [[int(i) for i in group.split(",")] for group in match.group(1).split("},{")]
    if re.search(r"replica_groups=\{\}", line):
        return [grid.ravel().tolist()]
    if match := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line):
        axes = re.findall(r"'(\w+)'", match.group(2))
        rows = grid if axes == [DATA] else grid.T if axes == [ENSEMBLE] else grid.reshape(1, -1)
        return rows.tolist()
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        shape = [int(n) for n in match.group(3).split(",")]
        ids = np.arange(np.prod(shape)).reshape(shape)
        if match.group(4):
            ids = ids.transpose([int(n) for n in match.group(4).split(",")])
        return ids.reshape(int(match.group(1)), int(match.group(2))).tolist()
    if match := re.search(r"source_target_pairs=\{\{(.*?)\}\}", line):
        return [[int(i) for i in pair.split(",")] for pair in match.group(1).split("},{")]
    raise ValueError(f"The devices of a collective are written in a form unknown here: {line}")


def _groups_of_slices(line: str, device_ids: np.ndarray) -> list[list[int]]:
    """Returns the groups of devices of a transfer between slices, by their positions in the mesh.

    Raises:
        ValueError: If the slices are written in an unknown form.
    """
    positions = {number: place for place, number in enumerate(device_ids.ravel().tolist())}
    if match := re.search(r'_xla_megascale_target="\{([\d,]+)\}x\{(\d+)(?::(\d+))?\}"', line):
        slices = [int(number) for number in match.group(1).split(",")]
        first = int(match.group(2))
        of_a_slice = range(first, int(match.group(3) or first) + 1)
        of_groups = [[100_000 * number + local for number in slices] for local in of_a_slice]
    elif match := re.search(r"_xla_megascale_target=\{\{(.*?)\}\}", line):
        of_groups = [[int(i) for i in group.split(",")] for group in match.group(1).split("},{")]
    else:
        raise ValueError(f"The slices of a collective are written in a form unknown here: {line}")
    return [[positions[i] for i in group] for group in of_groups]


def _axis(groups: list[list[int]], data_axis: int) -> str:
    """Returns the mesh axis that groups of devices cross; see `Collective.axis`."""
    crosses_rows = any(len({i // data_axis for i in group}) > 1 for group in groups)
    crosses_columns = any(len({i % data_axis for i in group}) > 1 for group in groups)
    if crosses_rows:
        return "both" if crosses_columns else ENSEMBLE
    return DATA if crosses_columns else "none"
