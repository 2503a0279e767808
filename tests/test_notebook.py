"""The notebook of README's block."""

import json
import re

from conftest import ROOT


def test_the_notebook_runs_the_block_of_readme():
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"```python\n(.*?)```", readme, re.DOTALL)[1]
    notebook = json.loads((ROOT / "examples/digits.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    shown = "\np"  # A notebook shows the value of the last line.
    assert [line for line in ("\n".join(cells) + "\n").splitlines() if line] == (
        [line for line in (block + shown).splitlines() if line]
    )
