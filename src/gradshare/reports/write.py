"""Run folders in, report files out."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from gradshare.reports.compare import Comparison, compare_runs
from gradshare.reports.figures import curves, gates, image
from gradshare.reports.page import report_page
from gradshare.reports.runs import Run, find_runs, is_run
from gradshare.reports.tables import csv_table, markdown_table


def write_report(folder: Path, command: str | None = None) -> Comparison:
    """Compare the runs in `folder` and write the report beside them; the comparison is returned.

    Writes report.html, curves and gates (PNG and SVG), table.md and table.csv; and summary.json, unless the folder is
    itself a run, whose own summary.json stays.

    Args:
        folder: a run folder, or a folder with run folders one or two levels below.
        command: the command line to show on the page.
    """
    folder = Path(folder)
    runs = find_runs(folder)
    comparison = compare_runs(runs)
    files = report_files(runs, comparison, command)
    if not is_run(folder):
        files["summary.json"] = (json.dumps(comparison, indent=2, allow_nan=False) + "\n").encode()
    for name, content in files.items():
        replace_file(folder / name, content)
    return comparison


def report_files(runs: list[Run], comparison: Comparison, command: str | None) -> dict[str, bytes]:
    """Every file of the report, by name."""
    drawings = {"curves": curves(runs), "gates": gates(runs)}
    images = {
        f"{name}.{kind}": image(figure, kind)
        for name, figure in drawings.items()
        if figure is not None
        for kind in ("png", "svg")
    }
    page = report_page(runs, comparison, images["curves.svg"], images.get("gates.svg"), command)
    texts = {"table.md": markdown_table(comparison), "table.csv": csv_table(comparison), "report.html": page}
    return {**images, **{name: text.encode(errors="replace") for name, text in texts.items()}}


def replace_file(path: Path, content: bytes) -> None:
    """Write beside and rename: a reader sees the old file or the new one, never a part."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
