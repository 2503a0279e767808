"""What a compiled update says of itself: its collectives, and the mesh axis that each crosses."""

import re

import numpy as np

_KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
)
_OPERATION = re.compile(rf"= .*?\b({'|'.join(_KINDS)})(-start)?\(")


def collectives(hlo: str, ensemble: int, data: int) -> list[tuple[str, str]]:
    """Kind and axis of every collective in a compiled program.

    Args:
        hlo: Text of the compiled module.
        ensemble: Rows of its mesh.
        data: Columns of its mesh.

    Returns:
        `(kind, axis)` with axis `data`, `ensemble`, `both`, or `none` where it joins no devices.

    Raises:
        ValueError: For a collective whose devices are written in a form not known here.
    """
    found = []
    for line in hlo.splitlines():
        match = _OPERATION.search(line)
        if match:
            groups = _groups(line, ensemble, data)
            found.append((match.group(1), _axis(groups, data)))
    return found


def _groups(line: str, ensemble: int, data: int) -> list[list[int]]:
    grid = np.arange(ensemble * data).reshape(ensemble, data)
    if match := re.search(r"replica_groups=\{\{(.*?)\}\}", line):
        return [[int(i) for i in group.split(",")] for group in match.group(1).split("},{")]
    if re.search(r"replica_groups=\{\}", line):
        return [grid.ravel().tolist()]
    if match := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line):
        axes = re.findall(r"'(\w+)'", match.group(2))
        rows = grid if axes == ["data"] else grid.T if axes == ["ensemble"] else grid.reshape(1, -1)
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


def _axis(groups: list[list[int]], data: int) -> str:
    crosses_rows = any(len({i // data for i in group}) > 1 for group in groups)
    crosses_columns = any(len({i % data for i in group}) > 1 for group in groups)
    if crosses_rows:
        return "both" if crosses_columns else "ensemble"
    return "data" if crosses_columns else "none"
