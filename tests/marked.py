"""Cases of a table that are left out by default."""

import pytest


def long(*cases):
    """Marks cases as long. Each is a value, or a tuple of values for several parameters."""
    tuples = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*case, marks=pytest.mark.long) for case in tuples]
