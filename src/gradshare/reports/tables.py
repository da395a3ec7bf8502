"""The comparison as a table: for people (text, Markdown, terminal) and for programs (CSV)."""

from __future__ import annotations

import csv
import html
import io
from typing import TYPE_CHECKING, Any, NamedTuple

from gradshare.reports import wording
from gradshare.reports.compare import Comparison
from gradshare.reports.runs import Measure

if TYPE_CHECKING:
    from rich.table import Table

Rows = list[list[str]]


class Cell(NamedTuple):
    text: str
    value: str | float | None
    """What to sort by; None goes last."""


def table(comparison: Comparison) -> Rows:
    """The heading row, then a row an arm."""
    return [heading(comparison["measure"])] + [[cell.text for cell in row] for row in cells(comparison)]


def cells(comparison: Comparison) -> list[list[Cell]]:
    """A row an arm, each cell as text and as a value."""
    return [_row(name, arm, comparison["measure"]) for name, arm in comparison["arms"].items()]


def threshold_table(comparison: Comparison) -> Rows:
    """The heading row, then a row an arm: the epoch, and the training time, at which it first reached each value."""
    thresholds = comparison["thresholds"]
    top = ["Arm"] + [wording.round_level(each["value"], comparison["measure"]) for each in thresholds]
    return [top] + [[name] + [_reached(each["reached"][name]) for each in thresholds] for name in comparison["arms"]]


def markdown_table(comparison: Comparison) -> str:
    top, *rows = [[_markdown_cell(cell) for cell in row] for row in table(comparison)]
    rule = [":---"] + ["---:"] * (len(top) - 1)
    return "".join(f"| {' | '.join(row)} |\n" for row in [top, rule, *rows])


def csv_table(comparison: Comparison) -> str:
    """A row an arm, a column a number, unrounded and without units; an absent number is an empty cell."""
    rows = [_flat_row(name, arm) for name, arm in comparison["arms"].items()]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def rich_table(comparison: Comparison) -> Table:
    """The same table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    top, *rows = table(comparison)
    drawn = Table(caption=Text(comparison["note"]), caption_justify="left")
    for position, name in enumerate(top):
        drawn.add_column(Text(name), justify="right" if position else "left")
    for row in rows:
        drawn.add_row(*(Text(cell) for cell in row))  # Text: a name such as [red] stays text
    return drawn


def heading(measure: Measure) -> list[str]:
    unit = "points" if measure == "accuracy" else "loss"
    mean = "lead" if measure == "accuracy" else "difference"
    return [
        "Arm",
        f"Best val. {measure}",
        "Epoch",
        "Test, best epoch",
        "Test, ensemble",
        "Speed-up",
        f"Mean {mean}, {unit}",
        f"Last-epoch {mean}, {unit}",
        "Bands apart",
        "Time an epoch",
        "Training time",
    ]


def _row(name: str, arm: dict[str, Any], measure: Measure) -> list[Cell]:
    versus, test = arm["against_original"] or {}, arm["test"] or {}
    best, lead, last = arm["best_val"], versus.get("area"), versus.get("final_difference")
    tests = [test.get(kind) or {} for kind in ("best", "ensemble")]
    return [
        Cell(name if arm["finished"] else f"{name} (unfinished)", name),
        Cell(wording.level(best, measure, arm["best_val_interval"]), best),
        Cell(wording.ABSENT if arm["best_epoch"] is None else str(arm["best_epoch"]), arm["best_epoch"]),
        *(Cell(wording.level(one.get("value"), measure, one.get("interval")), one.get("value")) for one in tests),
        Cell(wording.percent(versus.get("speed_up")), versus.get("speed_up")),
        Cell(wording.signed(lead, measure), lead),
        Cell(wording.signed(last, measure), last),
        Cell(_bands(versus), versus.get("epochs_apart_better")),
        Cell(wording.seconds(arm["seconds_per_epoch"]), arm["seconds_per_epoch"]),
        Cell(wording.seconds(arm["train_seconds"]), arm["train_seconds"]),
    ]


def _bands(versus: dict[str, Any]) -> str:
    """How many of the common epochs have the band entirely on the better side, and how many on the worse."""
    if not versus.get("epochs_with_bands"):
        return wording.ABSENT
    better, worse = versus["epochs_apart_better"], versus["epochs_apart_worse"]
    since = f" from {versus['first_epoch_apart']}" if better else ""
    return f"{better} better{since}, {worse} worse"


def _reached(hit: dict[str, Any] | None) -> str:
    if hit is None:
        return wording.ABSENT
    time = "" if hit["seconds"] is None else f" ({wording.seconds(hit['seconds'])})"
    return f"epoch {hit['epoch']}{time}"


def _markdown_cell(text: str) -> str:
    return html.escape(text, quote=False).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def _flat_row(name: str, arm: dict[str, Any]) -> dict[str, Any]:
    versus, test = arm["against_original"] or {}, arm["test"] or {}
    tests = {kind: test.get(kind) or {} for kind in ("best", "ensemble")}
    own = ("finished", "epochs", "best_epoch", "best_val", "best_val_interval", "train_seconds", "seconds_per_epoch")
    compared = ("speed_up", "area", "final_epoch", "final_difference", "first_epoch_apart")
    counts = ("common_epochs", "epochs_apart_better", "epochs_apart_worse")
    return {
        "name": name,
        "arm": arm["arm"],
        **{key: arm[key] for key in own},
        **{f"test_{kind}{end}": tests[kind].get(key) for kind in tests for key, end in _TEST_COLUMNS},
        **{key: versus.get(key) for key in compared + counts},
    }


_TEST_COLUMNS = (("value", ""), ("interval", "_interval"))
