"""The comparison in a terminal: the columns that matter most, narrow enough for 80 characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gradshare.errors import printable
from gradshare.reports import words
from gradshare.reports.comparison import ArmResult, Comparison, Lead
from gradshare.reports.statistics import mean
from gradshare.reports.tables import interval_notes, levels_table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

WIDTH, SHORTEST = 80, 12  # of a table, and of the column of names


def rich_table(comparison: Comparison) -> Group:
    """The verdicts of every experiment; for a single one, also the epochs and times to reach round values."""
    from rich.console import Group
    from rich.text import Text

    several, columns = len(comparison.experiments) > 1, _columns(comparison)
    arms = [arm for one in comparison.experiments for arm in one.arms]
    widths = [max(len(name), *(len(cell(arm)) for arm in arms)) for name, cell in columns.items()]
    widths[0] = min(widths[0], max(SHORTEST, WIDTH - sum(width + 2 for width in widths[1:])))
    parts: list[Text | Table] = []
    for one in comparison.experiments:
        rows = [[cell(arm) for cell in columns.values()] for arm in one.arms]
        parts += [Text(printable(one.setting.title), style="bold")] if several else []
        parts += [_drawn(list(columns), rows, widths), Text("")]
    parts.append(Text(_caption(comparison), style="dim"))
    levels = levels_table(comparison)
    if levels.rows and not several:
        cells = [[cell.text for cell in row] for row in levels.rows]
        parts += [Text(f"\n{levels.title}"), _drawn(levels.columns, cells)]
    return Group(*parts)


def _columns(comparison: Comparison) -> dict[str, Callable[[ArmResult], str]]:
    measure = comparison.measure

    def verdict(lead: Lead | None) -> str:
        return f"{lead.verdict} {words.signed(lead.difference.mean, measure)}" if lead else words.ABSENT

    def against_control(arm: ArmResult) -> str:
        lead = arm.against_best_control
        return f"{verdict(lead)} {printable(lead.reference)}" if lead else words.ABSENT

    columns: dict[str, Callable[[ArmResult], str]] = {
        "Arm": lambda arm: printable(arm.name) + "*" * any(run.marks for run in arm.runs)
    }
    if comparison.has_original:
        columns["Original"] = lambda arm: verdict(arm.against_original)
    if comparison.has_controls:
        columns["Best control"] = against_control
    columns["Test"] = lambda arm: words.tested(arm.test, measure)
    columns["Best val."] = lambda arm: words.level(mean(arm.best_val), measure)
    if not comparison.has_controls:
        columns["Ep"] = lambda arm: words.number(arm.best_epoch.mean) if arm.best_epoch else words.ABSENT
    return columns


def _drawn(columns: list[str], rows: list[list[str]], widths: list[int] | None = None) -> Table:
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for place, name in enumerate(columns):
        left = name in ("Arm", "Original", "Best control")
        width = widths[place] if widths else None
        drawn.add_column(name, justify="left" if left else "right", overflow="fold", width=width)
    for row in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))  # Text: a name such as [red] stays text
    return drawn


def _caption(comparison: Comparison) -> str:
    marks = dict.fromkeys(mark for one in comparison.runs.values() for mark in one.run.marks)
    lines = [f"* {' or '.join(marks)}."] if marks else []
    if comparison.has_original:
        unit = words.long_unit(comparison.measure)
        against = "Original, best control" if comparison.has_controls else "Original"
        lines.append(f"{against}: the verdict against it, and the mean difference in {unit}.")
    return " ".join([*lines, *interval_notes(comparison), comparison.norm_note])
