"""Tables, figures and one self-contained page from run folders. Reads files only: no torch, no network."""

from gradshare.reports.compare import compare_runs
from gradshare.reports.figures import curves, gates
from gradshare.reports.findings import Finding, findings
from gradshare.reports.formats import csv_table, markdown_table
from gradshare.reports.page import report_page
from gradshare.reports.run_tables import table
from gradshare.reports.runs import Run, find_runs, read_run
from gradshare.reports.terminal import rich_table, rich_thresholds
from gradshare.reports.wording import ARMS
from gradshare.reports.write import write_report

__all__ = [
    "ARMS",
    "Finding",
    "Run",
    "compare_runs",
    "csv_table",
    "curves",
    "find_runs",
    "findings",
    "gates",
    "markdown_table",
    "read_run",
    "report_page",
    "rich_table",
    "rich_thresholds",
    "table",
    "write_report",
]
