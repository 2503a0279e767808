"""A Griffe extension that shows the examples of docstrings as code.

Docstrings end with bare doctests. Markdown would read their `>>>` as quotations.
"""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?m)^(?:>>> .*\n?)(?:.+\n?)*")


class DoctestFences(griffe.Extension):
    """Puts each paragraph that begins with `>>>` between fences."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub(
                lambda match: f"```pycon\n{match.group().rstrip()}\n```\n", obj.docstring.value
            )
