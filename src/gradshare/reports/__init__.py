"""Tables, figures and one self-contained page from run folders. Reads files only: no torch, no network."""

from gradshare.reports.comparison import Comparison, compare_runs
from gradshare.reports.model import Run, read_run, read_runs
from gradshare.reports.terminal import rich_table
from gradshare.reports.write import write_report

__all__ = ["Comparison", "Run", "compare_runs", "read_run", "read_runs", "rich_table", "write_report"]
