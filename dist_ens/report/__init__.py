"""The report of a run: its summary, its metrics file, its curves and its HTML page.

Only process 0 may call these functions. `report.page` is imported when a page is written, because
its plotting libraries take a second to import.
"""

from dist_ens.report.files import (
    METRICS,
    PAGE,
    SCORES,
    SUMMARY,
    keep_answers,
    pace_before,
    read_answers,
    read_run,
    redraw,
    write_report,
    write_summary,
)

__all__ = [
    "METRICS",
    "PAGE",
    "SCORES",
    "SUMMARY",
    "keep_answers",
    "pace_before",
    "read_answers",
    "read_run",
    "redraw",
    "write_report",
    "write_summary",
]
