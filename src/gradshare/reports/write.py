"""Run folders in, report files out."""

from __future__ import annotations

import json
import os
import re
import shlex
import tempfile
from pathlib import Path

from gradshare.files import writing
from gradshare.reports.compare import Comparison, compare_runs
from gradshare.reports.experiments import setting, value_text
from gradshare.reports.figures import curves, gates, image
from gradshare.reports.formats import csv_experiments, csv_table, latex_page, markdown_page
from gradshare.reports.hover import Drawing, hover
from gradshare.reports.page import PageFigure, report_page
from gradshare.reports.paper import DATA
from gradshare.reports.runs import Run, find_runs, is_run
from gradshare.reports.tables import all_tables


def write_report(folder: Path, command: str | None = None) -> Comparison:
    """Compare the runs in `folder` and write the report beside them; the comparison is returned.

    Writes report.html, table.md, table.tex, table.csv (a row a run), experiments.csv (a row an arm, over seeds), and
    the curves and gates as PNG and SVG, one of each for every data set and inner rate; and summary.json, unless the
    folder is itself a run, whose own summary.json stays.

    Args:
        folder: a run folder, or a folder with run folders one or two levels below: a comparison, a grid.
        command: the command line to show on the page, by default the one that writes this report.
    """
    folder = Path(folder)
    runs = find_runs(folder)
    comparison = compare_runs(runs)
    files = report_files(runs, comparison, command or f"gradshare report {shlex.quote(str(folder))}")
    if not is_run(folder):
        files["summary.json"] = (json.dumps(comparison, indent=2, allow_nan=False) + "\n").encode()
    for name, content in files.items():
        with writing(folder / name):
            replace_file(folder / name, content)
    return comparison


def report_files(runs: list[Run], comparison: Comparison, command: str) -> dict[str, bytes]:
    """Every file of the report, by name."""
    images: dict[str, bytes] = {}
    drawn: list[PageFigure] = []
    for suffix, title, members in _parts(runs):
        drawings: dict[str, Drawing | None] = {"curves": curves(members), "gates": gates(members)}
        for kind, drawing in drawings.items():
            if drawing is None:
                continue
            name = f"{kind}{suffix}"
            images[f"{name}.png"], images[f"{name}.svg"] = (image(drawing.figure, form) for form in ("png", "svg"))
            drawn.append(PageFigure(kind, name, title, images[f"{name}.svg"].decode(), hover(drawing), members))
    tables = all_tables(comparison)
    texts = {
        "table.md": markdown_page(tables),
        "table.tex": latex_page(tables),
        "table.csv": csv_table(comparison),
        "experiments.csv": csv_experiments(comparison),
        "report.html": report_page(runs, comparison, drawn, command),
    }
    return {**images, **{name: text.encode(errors="replace") for name, text in texts.items()}}


def _parts(runs: list[Run]) -> list[tuple[str, str, list[Run]]]:
    """What a figure shows, as in the paper one data set at one inner rate: the end of its file's name, title, runs."""
    found: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        one = setting(run)
        data = value_text(one.dataset)
        found.setdefault((DATA.get(data, data), value_text(one.inner_lr)), []).append(run)
    if len(found) == 1:
        return [("", "", runs)]
    parts: dict[str, tuple[str, str, list[Run]]] = {}
    for (data, rate), members in sorted(found.items()):
        plain = re.sub(r"[^A-Za-z0-9.]+", "-", f"-{data}-{rate}")[-60:]
        suffix = plain if plain not in parts else f"{plain}-{len(parts)}"
        parts[suffix] = (suffix, f"{data}, inner rate {rate}", members)
    return list(parts.values())


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
