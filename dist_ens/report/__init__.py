"""What a run tells people and scripts: metric lines, progress, the table, the summary, the page.

Only process 0 reports; the caller sees to that. `report.page` draws, and is imported where a page
is written: its libraries take a second.
"""

from dist_ens.report.files import (
    CURVES,
    PAGE,
    SUMMARY,
    pace_before,
    write_atomically,
    write_scores,
    write_summary,
)
from dist_ens.report.metrics_file import METRICS
from dist_ens.report.rates import plot_rates
from dist_ens.report.run_files import RunReport, read_run, write_report

__all__ = [
    "CURVES",
    "METRICS",
    "PAGE",
    "SUMMARY",
    "RunReport",
    "pace_before",
    "plot_rates",
    "read_run",
    "write_atomically",
    "write_report",
    "write_scores",
    "write_summary",
]
