"""Run folders in, report files out."""

from __future__ import annotations

import shlex
from pathlib import Path

from gradshare.errors import path_of
from gradshare.files import write_whole
from gradshare.reports.comparison import Comparison, compare_runs
from gradshare.reports.figures import image_files
from gradshare.reports.formats import csv_experiments, csv_runs, latex_page, markdown_page, summary_text
from gradshare.reports.model import read_runs
from gradshare.reports.page import report_page
from gradshare.reports.panels import curves, gates
from gradshare.reports.tables import all_tables
from gradshare.runs.folder import RunFolder


def write_report(folder: Path, command: str | None = None) -> Comparison:
    """Compare the runs in a folder and write the report beside them.

    Writes report.html, table.md, table.tex, table.csv (a row for each run), experiments.csv (a row for each arm), and
    curves and gates as PNG and SVG, one of each for every data set and inner rate; and summary.json, unless the folder
    is itself a run, which has a summary.json of its own.

    Args:
        folder: a run folder, or a folder with run folders below it: a comparison, a grid.
        command: the command line to show on the page, by default the one that writes this report.
    """
    folder = path_of(folder)
    comparison = compare_runs(read_runs(folder))
    files = report_files(comparison, command or f"gradshare report {shlex.quote(str(folder))}")
    if RunFolder(folder).exists():
        del files["summary.json"]
    for name, content in files.items():
        write_whole(folder / name, content)
    return comparison


def report_files(comparison: Comparison, command: str) -> dict[str, bytes]:
    """The content of every file of a report, by name."""
    tables = all_tables(comparison)
    texts = {
        "table.md": markdown_page(tables),
        "table.tex": latex_page(tables),
        "table.csv": csv_runs(comparison),
        "experiments.csv": csv_experiments(comparison),
        "report.html": report_page(comparison, command),
        "summary.json": summary_text(comparison),
    }
    images = {**image_files("curves", curves(comparison)), **image_files("gates", gates(comparison))}
    return {**images, **{name: text.encode(errors="replace") for name, text in texts.items()}}
