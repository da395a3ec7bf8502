"""One self-contained HTML page: no file, font or script from anywhere else, and whole without JavaScript."""

from __future__ import annotations

import base64
import hashlib
import re
from html import escape

from gradshare.reports import description
from gradshare.reports.arms import ARMS
from gradshare.reports.compare import Comparison
from gradshare.reports.figures import GRID, INK, OTHER, PAPER, STROKES
from gradshare.reports.findings import findings
from gradshare.reports.page_style import SCRIPT, STYLE
from gradshare.reports.runs import Run
from gradshare.reports.tables import Cell, cells, has_reference, heading, threshold_table
from gradshare.reports.wording import ABSENT, GATE_LAM, GATE_M, MINUS


def report_page(
    runs: list[Run],
    comparison: Comparison,
    curves_svg: bytes,
    gates_svg: bytes | None = None,
    command: str | None = None,
) -> str:
    """The whole page. Every name from a file is escaped; the page's own policy forbids loading anything."""
    title = escape(description.title(runs))
    sections = [
        f"<h1>{title}</h1>\n<p class=lead>{_prose(description.description(runs))}</p>\n{_arms(runs)}",
        _section("Results", _results(comparison)),
        _section("What this shows", _findings(comparison)),
        _section("Validation curves", _figure("curves", curves_svg, _CURVES)),
        _section("What the outer loop learned about sharing", _figure("gates", gates_svg, _GATES)) if gates_svg else "",
        _section(f"Time to reach a validation {comparison['measure']}", _thresholds(comparison)),
        _section("Configuration", _configuration(runs)),
        _section("Command", f"<pre>{escape(command)}</pre>") if command else "",
    ]
    body = "\n".join(section for section in sections if section)
    return (
        f"<!doctype html>\n<html lang=en>\n<head>\n<meta charset=utf-8>\n<title>{title}</title>\n"
        f'<meta name=viewport content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv=Content-Security-Policy content="{_policy()}">\n<style>{STYLE}</style>\n</head>\n'
        f"<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


_CURVES = (
    "Shaded: the 95 % interval over the validation tasks. A dot marks the best epoch. MaxVal (of a loss:"
    " MinVal) and Ep: the best validation value and its earliest epoch. Test: the ensemble of the best epochs where"
    " there is one, else the best epoch alone."
)
_GATES = (
    "Thick: the mean over inner steps; faint: each inner step. Both start at 0.5 (dotted)."
    f" A high {GATE_M} trusts the tasks of the current batch over the memory;"
    f" a high {GATE_LAM} leaves less of the task's own gradient."
)


_AGAINST = (
    f"Against the original: the paper's speed-up, (epoch of the original {MINUS} epoch of the arm) / epoch of the arm,"
    " each the earliest best epoch, which says when an arm was at its best and not how good that was (in"
    " parentheses: the two did not train equally long); arm minus original, as a mean"
    " over the common epochs and at the last of them; and in how many epochs the 95 % bands are apart, with the first"
    " in which the arm's is the better."
)


def _policy() -> str:
    """Nothing is loaded, and no script runs but ours."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _section(title: str, content: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{content}\n</section>" if content else ""


def _arms(runs: list[Run]) -> str:
    known = list(dict.fromkeys(run.arm for run in runs if run.arm in ARMS))
    if not known:
        return ""
    pairs = "".join(f"<dt>{escape(arm)}</dt><dd>{escape(ARMS[arm].meaning)}</dd>\n" for arm in known)
    return f"<dl class=arms>\n{pairs}</dl>"


def _results(comparison: Comparison) -> str:
    top = _row("th", [escape(name) for name in heading(comparison)])
    arms = [arm["arm"] for arm in comparison["arms"].values()]
    rows = "".join(_value_row(row, arm) for row, arm in zip(cells(comparison), arms, strict=True))
    notes = ([_AGAINST] if has_reference(comparison) else []) + [comparison["note"] + " Times are of training alone."]
    return _table(f"<thead>{top}</thead>\n<tbody>\n{rows}</tbody>", "sortable") + _note(*notes)


def _value_row(row: list[Cell], arm: str) -> str:
    values = ["" if cell.value is None else escape(str(cell.value)) for cell in row]
    tagged = [f'<td data-value="{value}">' for value in values]
    tagged[0] += f'<i style="background: {themed(STROKES.get(arm, OTHER).color)}"></i>'
    return f"<tr>{''.join(tag + escape(cell.text) + '</td>' for tag, cell in zip(tagged, row, strict=True))}</tr>\n"


def _findings(comparison: Comparison) -> str:
    pairs = "".join(f"<dt>{escape(one.about)}</dt>\n<dd>{_prose(one.text)}</dd>\n" for one in findings(comparison))
    return f"<div class=card><dl>\n{pairs}</dl></div>"


def _thresholds(comparison: Comparison) -> str:
    if not comparison["thresholds"]:
        return ""
    top, *rows = [[escape(text) for text in row] for row in threshold_table(comparison)]
    body = "".join(_row("td", row) for row in rows)
    note = "The first epoch at or beyond the value, with the training time until its end; a dash: not reached."
    return _table(f"<thead>{_row('th', top)}</thead>\n<tbody>\n{body}</tbody>") + _note(note)


def _configuration(runs: list[Run]) -> str:
    named = all(run.name == run.arm for run in runs)  # then the first column says the arm already
    differing = [key for key in description.differing_keys(runs) if key != "arm" or not named]
    same = [key for key in description.all_keys(runs) if key not in description.differing_keys(runs)]
    top = _row("th", ["Arm", *(escape(key) for key in differing)])
    rows = "".join(_row("td", [escape(run.name), *(escape(_value(run, key)) for key in differing)]) for run in runs)
    pairs = "".join(_row("td", [escape(key), escape(_value(runs[0], key))]) for key in same)
    shown = _table(f"<thead>{top}</thead>\n<tbody>\n{rows}</tbody>") if differing else ""
    kept = "The settings that all arms have in common" if len(runs) > 1 else "All settings"
    return f"{shown}\n<details><summary>{kept} ({len(same)})</summary>\n<table>\n{pairs}</table></details>"


def _value(run: Run, key: str) -> str:
    return description.value_text(run.config[key]) if key in run.config else ABSENT


def _row(tag: str, contents: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{content}</{tag}>" for content in contents) + "</tr>\n"


def _table(content: str, kind: str = "plain") -> str:
    return f'<div class="card scroll"><table class={kind}>\n{content}\n</table></div>\n'


def _prose(text: str) -> str:
    """Escaped, with numbers kept on one line with their signs and units."""
    return re.sub(r"(?<=\d) (?=%)| (?=[=±] )|(?<=[=±]) ", "\N{NO-BREAK SPACE}", escape(text))


def _note(*texts: str) -> str:
    return "".join(f"<p class=note>{_prose(text)}</p>\n" for text in texts)


def _figure(name: str, svg: bytes, caption: str) -> str:
    return (
        f"<figure class=card>\n{inline_svg(svg.decode(), name)}\n<figcaption>{_prose(caption)}</figcaption>\n</figure>"
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
