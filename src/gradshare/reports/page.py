"""One self-contained HTML page: no file, font or script from anywhere else, and whole without JavaScript."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html import escape as escape_markup
from itertools import groupby
from typing import Any, NamedTuple

from gradshare.errors import printable
from gradshare.reports import description
from gradshare.reports.compare import Comparison
from gradshare.reports.experiments import value_text
from gradshare.reports.figures import GRID, INK, OTHER, PAPER, STROKES
from gradshare.reports.findings import findings
from gradshare.reports.headline import headline, key_figures, unfinished, verdict_text
from gradshare.reports.page_style import SCRIPT, STYLE
from gradshare.reports.run_tables import Cell, Table, threshold_table
from gradshare.reports.runs import Run
from gradshare.reports.tables import all_tables
from gradshare.reports.wording import ABSENT, ARMS, GATE_LAM, GATE_M

OPEN_EXPERIMENTS = 3  # more than these are folded


class PageFigure(NamedTuple):
    """A figure of the page: what it shows, drawn, with the values behind it."""

    kind: str  # curves or gates
    name: str
    title: str
    svg: str
    panels: list[dict[str, Any]]
    runs: list[Run]


CAPTIONS = {
    "curves": (
        "Shaded: the 95 % interval over the validation tasks of a run. A dot marks the best epoch. MaxVal (of a loss:"
        " MinVal) and Ep: the best validation value and its earliest epoch. Test: the ensemble of the best epochs where"
        " there is one, else the best epoch alone. Of several seeds: a thin line each, their mean thick, and in the"
        " legend means, with ± over seeds."
    ),
    "gates": (
        f"Full lines: the mean of {GATE_M} over the inner steps; broken lines: that of {GATE_LAM}; faint, for a run"
        f" alone, each inner step. Both start at 0.5 (dotted). A high {GATE_M} trusts the tasks of the current batch"
        f" over the memory; a high {GATE_LAM} leaves less of the task's own gradient."
    ),
}
HEADINGS = {"curves": "Validation curves", "gates": "What the outer loop learned about sharing"}


def report_page(runs: list[Run], comparison: Comparison, figures: list[PageFigure], command: str) -> str:
    """The whole page. Every name from a file is escaped; the page's own policy forbids loading anything."""
    title = escape(description.title(runs))
    tables, alone = _tables(comparison), len(comparison["experiments"]) == 1
    sections = [
        _first_screen(title, runs, comparison),
        *(tables[:1] if alone else tables[:-2]),
        _experiments(comparison) if alone else "",
        *(
            _section(HEADINGS[kind], "\n".join(_figure(one, command) for one in members))
            for kind, members in groupby(sorted(figures, key=lambda one: one.kind), key=lambda one: one.kind)
        ),
        "" if alone else _experiments(comparison),
        *(tables[1:] if alone else tables[-2:]),
        _section("Configuration", _configuration(runs)),
        _section("Command", f"<pre>{escape(command)}</pre>"),
    ]
    body = "\n".join(section for section in sections if section)
    return (
        f"<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n<title>{title}</title>\n"
        f'<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv=Content-Security-Policy content="{_policy()}">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def _policy() -> str:
    """Nothing is loaded, and no script runs but ours."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _first_screen(title: str, runs: list[Run], comparison: Comparison) -> str:
    tiles = "".join(
        f"<div><dt>{_prose(one.label)}</dt><dd><b>{_prose(one.value)}</b><small>{_prose(one.detail)}</small></dd></div>\n"
        for one in key_figures(comparison)
    )
    undone = f"<p class=state>{_prose(unfinished(comparison))}</p>\n" if unfinished(comparison) else ""
    shown = f"<dl class=tiles>\n{tiles}</dl>\n" if tiles else ""
    return (
        f"<header>\n<h1>{title}</h1>\n<p class=headline>{_prose(headline(comparison))}</p>\n{undone}{shown}"
        f"<p class=lead>{_prose(description.description(runs))}</p>\n{_arms(runs)}\n</header>"
    )


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def _arms(runs: list[Run]) -> str:
    known = list(dict.fromkeys(run.arm for run in runs if run.arm in ARMS))
    pairs = "".join(f"<dt>{_swatch(arm)}{escape(arm)}</dt><dd>{escape(ARMS[arm].meaning)}</dd>\n" for arm in known)
    return f"<dl class=arms>\n{pairs}</dl>" if known else ""


def _tables(comparison: Comparison) -> list[str]:
    """Every table, its note only where the one before it did not say the same."""
    tables = all_tables(comparison)
    notes = ["", *(table.note for table in tables)]
    sections = [
        _section(table.title, _table(table) + (_note(table.note) if table.note != before else ""))
        for table, before in zip(tables, notes, strict=False)
    ]
    return [*sections, _failures(comparison)]


def _failures(comparison: Comparison) -> str:
    reasons = {name: arm["reason"] for name, arm in comparison["arms"].items() if arm["reason"]}
    pairs = "".join(f"<dt>{escape(name)}</dt>\n<dd>{escape(reason)}</dd>\n" for name, reason in reasons.items())
    return _section("Runs that failed or diverged", f"<div class=card><dl>\n{pairs}</dl></div>") if reasons else ""


def _table(table: Table) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    arms = table.arms or ("",) * len(table.rows)
    place = table.columns.index("Arm") if "Arm" in table.columns else 0
    rows = "".join(_table_row(row, arm, place) for row, arm in zip(table.rows, arms, strict=True))
    body = f"<thead><tr>{top}</tr></thead>\n<tbody>\n{rows}</tbody>"
    return f'<div class="card scroll"><table class=sortable>\n{body}\n</table></div>\n'


def _table_row(row: list[Cell], arm: str, place: int) -> str:
    """A row, with the colour of its arm in one of its cells."""
    return f"<tr>{''.join(_cell(cell, arm if at == place else '') for at, cell in enumerate(row))}</tr>\n"


def _cell(cell: Cell, arm: str) -> str:
    value = "" if cell.value is None else escape(str(cell.value))
    mark = r"(?:unfinished|running|waiting|failed|diverged|steps skipped|tasks diverged|gate saturated|files changed)"
    text = re.sub(rf"(\({mark}(?:, {mark})*\))$", r"<span class=state>\1</span>", _prose(cell.text))
    beside = f"<small>{_prose(cell.beside)}</small>" if cell.beside else ""
    return f'<td data-value="{value}">{_swatch(arm) if arm else ""}{text}{beside}</td>'


def _swatch(arm: str) -> str:
    return f'<i style="background: {themed(STROKES.get(arm, OTHER).color)}"></i>'


def _experiments(comparison: Comparison) -> str:
    """What the numbers show, and the time to reach given values, for each experiment."""
    experiments, told = comparison["experiments"], findings(comparison)
    parts = []
    for place, experiment in enumerate(experiments):
        pairs = "".join(
            f"<dt>{escape(one.about)}</dt>\n<dd>{_prose(one.text)}</dd>\n" for one in told if one.experiment == place
        )
        times = threshold_table(experiment, comparison["measure"])
        timed = f"<h3>{escape(times.title)}</h3>\n{_table(times)}{_note(times.note)}" if times.rows else ""
        parts.append(f"<div class=card><dl>\n{pairs}</dl></div>\n{timed}")
    if len(experiments) == 1:
        return _section("What this shows", parts[0])
    opened = " open" if len(experiments) <= OPEN_EXPERIMENTS else ""
    folds = []
    for experiment, part in zip(experiments, parts, strict=True):
        verdict = f"<span>{_prose(verdict_text(experiment, comparison))}</span>"
        summary = f"<summary>{_prose(experiment['title'])}{verdict}</summary>"
        folds.append(f"<details class=experiment{opened}>{summary}\n{part}\n</details>")
    return _section("What this shows, experiment by experiment", "\n".join(folds))


def _configuration(runs: list[Run]) -> str:
    named = all(run.name == run.arm for run in runs)  # then the first column says the arm already
    differing = [key for key in description.differing_keys(runs) if key != "arm" or not named]
    same = [key for key in description.all_keys(runs) if key not in description.differing_keys(runs)]
    top = _row("th", ["Run", *(escape(key) for key in differing)])
    rows = "".join(_row("td", [escape(run.name), *(escape(_value(run, key)) for key in differing)]) for run in runs)
    pairs = "".join(_row("td", [escape(key), escape(_value(runs[0], key))]) for key in same)
    table = f'<div class="card scroll"><table>\n<thead>{top}</thead>\n<tbody>\n{rows}</tbody>\n</table></div>'
    kept = "The settings that all arms have in common" if len(runs) > 1 else "All settings"
    shown = table if differing else ""
    return f"{shown}\n<details><summary>{kept} ({len(same)})</summary>\n<table>\n{pairs}</table></details>"


def _value(run: Run, key: str) -> str:
    return value_text(run.config[key]) if key in run.config else ABSENT


def _row(tag: str, contents: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{content}</{tag}>" for content in contents) + "</tr>\n"


def escape(text: str) -> str:
    """A name of anybody's as text, and nothing but text."""
    return escape_markup(printable(text))


def _prose(text: str) -> str:
    """Escaped, with numbers kept on one line with their signs and units."""
    return re.sub(r"(?<=\d) (?=%)| (?=[=±] )|(?<=[=±]) ", "\N{NO-BREAK SPACE}", escape(text))


def _note(*texts: str) -> str:
    return "".join(f"<p class=note>{_prose(text)}</p>\n" for text in texts)


def _figure(one: PageFigure, command: str) -> str:
    """The drawing, its caption, the command that made it, and those that trained its runs."""
    title = f"<h3>{_prose(one.title)}</h3>\n" if one.title else ""
    values = escape(json.dumps(one.panels, separators=(",", ":")))
    trained = [line for line in map(description.training_command, one.runs) if line]
    commands = (
        f"<details><summary>The commands that train what it shows ({len(trained)})</summary>\n"
        f"<pre>{chr(10).join(map(escape, trained))}</pre></details>\n"
        if trained
        else ""
    )
    return (
        f'{title}<figure class=card data-panels="{values}">\n{inline_svg(one.svg, one.name)}\n'
        f"<figcaption>{_prose(CAPTIONS[one.kind])}\n"
        f"<p class=made>Drawn by <code>{escape(command)}</code>; also in {escape(one.name)}.svg and .png.</p>\n"
        f"{commands}</figcaption>\n</figure>"
    )


def inline_svg(svg: str, name: str) -> str:
    """matplotlib's SVG as part of a page: its own names, the page's colours, no XML prologue, no addresses."""
    drawing = svg[svg.index("<svg") :]
    start, rest = drawing.split(">", 1)
    size = re.search(r'viewBox="[^"]*"', start)
    opened = f'<svg {size.group() if size else ""} role="img" aria-label="{name}">'
    named = re.sub(r'(?<= id=")|(?<=url\(#)|(?<=href="#)', f"{name}-", rest)
    return opened + re.sub(r"(?<=fill: )#\w{6}|(?<=stroke: )#\w{6}", lambda color: themed(color.group()), named)


def themed(color: str) -> str:
    """The page's own colour in the place of ink, grid and paper, so that figures follow light and dark."""
    return {INK: "currentColor", GRID: "var(--line)", PAPER: "var(--card)"}.get(color, color)
