"""The comparison in a terminal: the columns that matter most, narrow enough for 80 characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from gradshare.errors import printable
from gradshare.reports import words
from gradshare.reports.comparison import ArmResult, Comparison, Lead
from gradshare.reports.model import Measure
from gradshare.reports.statistics import mean
from gradshare.reports.tables import SEEDS_NOTE, TASKS_NOTE, levels_table

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

WIDTH, SHORTEST = 80, 12  # of a table, and of the column of names
Column = Callable[[ArmResult, Measure], str]


def rich_table(comparison: Comparison) -> Group:
    """The verdicts of every experiment; for a single one, also the epochs and times to reach round values."""
    from rich.console import Group
    from rich.text import Text

    several, measure = len(comparison.experiments) > 1, comparison.measure
    arms = [arm for one in comparison.experiments for arm in one.arms]
    controls = any(arm.against_best_control for arm in arms)
    columns: dict[str, Column] = {"Arm": _name}
    columns |= {"Original": _against_original} if comparison.has_original else {}
    columns |= {"Best control": _against_control} if controls else {}
    columns |= {"Test": _test, "Best val.": _best} | ({} if controls else {"Ep": _epoch})
    widths = [max(len(name), *(len(cell(arm, measure)) for arm in arms)) for name, cell in columns.items()]
    widths[0] = min(widths[0], max(SHORTEST, WIDTH - sum(width + 2 for width in widths[1:])))
    parts: list[Text | Table] = []
    for one in comparison.experiments:
        rows = [[cell(arm, measure) for cell in columns.values()] for arm in one.arms]
        parts += [Text(printable(one.setting.title), style="bold")] if several else []
        parts += [_drawn(list(columns), rows, widths), Text("")]
    parts.append(Text(_caption(comparison), style="dim"))
    levels = levels_table(comparison)
    if levels.rows and not several:
        cells = [[cell.text for cell in row] for row in levels.rows]
        parts += [Text(f"\n{levels.title}"), _drawn(levels.columns, cells)]
    return Group(*parts)


def _name(arm: ArmResult, _: Measure) -> str:
    return printable(arm.name) + "*" * any(run.marks for run in arm.runs)


def _test(arm: ArmResult, measure: Measure) -> str:
    return words.tested(arm.test, measure)


def _best(arm: ArmResult, measure: Measure) -> str:
    return words.level(mean(arm.best_val), measure)


def _epoch(arm: ArmResult, _: Measure) -> str:
    return words.ABSENT if arm.best_epoch is None else words.number(arm.best_epoch.mean)


def _against_original(arm: ArmResult, measure: Measure) -> str:
    return _lead(arm.against_original, measure)


def _against_control(arm: ArmResult, measure: Measure) -> str:
    lead = arm.against_best_control
    return _lead(lead, measure) + (f" {printable(lead.reference)}" if lead else "")


def _lead(lead: Lead | None, measure: Measure) -> str:
    return words.ABSENT if lead is None else f"{lead.verdict} {words.signed(lead.difference.mean, measure)}"


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
        unit = "accuracy points" if comparison.measure == "accuracy" else "units of the loss"
        lines.append(f"Original, best control: the verdict against it, and the mean difference in {unit}.")
    return " ".join([*lines, TASKS_NOTE, *([SEEDS_NOTE] if comparison.several_seeds else []), comparison.norm_note])
