"""Benchmark of the time from the start of Python to scores: README's block, and it by hand.

    python -m benchmarks.first_answer

Both are run as processes in turn: the script by hand (`first_answer_by_hand.py`), README's block
without anything in its cache folder, and README's block again with the cache that this has left. A
ratio is the time of README's block over that of the script before it, so dist_ens is faster if it
is below 1. The median and the range over the rounds are printed.
"""

import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

from launch import cli

_ROUNDS = flags.DEFINE_integer("rounds", 7, "Number of rounds.", lower_bound=1)
_HERE = pathlib.Path(__file__).parent


def main() -> None:
    """Prints a line for the first and one for the second start."""
    readme = (_HERE.parent / "README.md").read_text()
    block = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    if block is None:
        raise SystemExit("README.md has no block of Python.")
    ratios: dict[str, list[float]] = {"first start": [], "second start": []}
    seconds: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder) / "readme.py"
        script.write_text(block[1])
        for number in range(_ROUNDS.value + 1):  # The first round reads libraries from the disk.
            cache = pathlib.Path(folder) / f"cache_{number}"
            by_hand = _secs(_HERE / "first_answer_by_hand.py", cache)
            first, second = _secs(script, cache), _secs(script, cache)
            if number:
                seconds.append(by_hand)
                ratios["first start"].append(first / by_hand)
                ratios["second start"].append(second / by_hand)
    print(f"by hand: {statistics.median(seconds):.2f} s")
    for name, values in ratios.items():
        print(
            f"{name}: {statistics.median(values):.3f} of it "
            f"({min(values):.3f} to {max(values):.3f})"
        )


def _secs(script: pathlib.Path, cache: pathlib.Path) -> float:
    """Returns the seconds that a script takes as a process, with a folder for its caches."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, script],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"XDG_CACHE_HOME": str(cache)},
    )
    return time.perf_counter() - started


if __name__ == "__main__":
    cli.run(main)
