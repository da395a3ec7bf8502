"""The comparison as a table: for people (text, Markdown) and for programs (CSV)."""

from __future__ import annotations

import csv
import html
import io
from typing import Any, NamedTuple

from gradshare.reports import wording
from gradshare.reports.compare import Comparison
from gradshare.reports.runs import Measure

Rows = list[list[str]]


class Cell(NamedTuple):
    text: str
    value: str | float | None
    """What to sort by; None goes last."""


def table(comparison: Comparison) -> Rows:
    """The heading row, then a row an arm."""
    return [heading(comparison)] + [[cell.text for cell in row] for row in cells(comparison)]


def cells(comparison: Comparison) -> list[list[Cell]]:
    """A row an arm, each cell as text and as a value."""
    measure, against = comparison["measure"], has_reference(comparison)
    return [
        _own_cells(name, arm, measure) + (_compared_cells(arm, measure) if against else []) + _time_cells(arm)
        for name, arm in comparison["arms"].items()
    ]


def has_reference(comparison: Comparison) -> bool:
    """Whether any arm has an original to be compared with; without one, those columns are left out."""
    return any(arm["against_original"] for arm in comparison["arms"].values())


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


def heading(comparison: Comparison) -> list[str]:
    accuracy = comparison["measure"] == "accuracy"
    unit, mean = ("points", "lead") if accuracy else ("loss", "difference")
    against = ["Speed-up", f"Mean {mean}, {unit}", f"Last-epoch {mean}, {unit}", "Bands apart, better / worse"]
    return [
        *("Arm", f"Best val. {comparison['measure']}", "Epoch", "Test, best epoch", "Test, ensemble"),
        *(against if has_reference(comparison) else []),
        *("Time an epoch", "Training time"),
    ]


def _own_cells(name: str, arm: dict[str, Any], measure: Measure) -> list[Cell]:
    tests = [(arm["test"] or {}).get(kind) or {} for kind in ("best", "ensemble")]
    return [
        Cell(name if arm["finished"] else f"{name} (unfinished)", name),
        Cell(wording.level(arm["best_val"], measure, arm["best_val_interval"]), arm["best_val"]),
        Cell(wording.ABSENT if arm["best_epoch"] is None else str(arm["best_epoch"]), arm["best_epoch"]),
        *(Cell(wording.level(one.get("value"), measure, one.get("interval")), one.get("value")) for one in tests),
    ]


def _compared_cells(arm: dict[str, Any], measure: Measure) -> list[Cell]:
    versus = arm["against_original"] or {}
    lead, last = versus.get("area"), versus.get("final_difference")
    return [
        Cell(speed_up_text(versus), versus.get("speed_up")),
        Cell(wording.signed(lead, measure), lead),
        Cell(wording.signed(last, measure), last),
        Cell(bands_text(versus), versus.get("epochs_apart_better")),
    ]


def _time_cells(arm: dict[str, Any]) -> list[Cell]:
    return [Cell(wording.seconds(arm[key]), arm[key]) for key in ("seconds_per_epoch", "train_seconds")]


def speed_up_text(versus: dict[str, Any]) -> str:
    """In parentheses where the two did not train equally long: then the formula says little."""
    told = wording.percent(versus.get("speed_up"))
    return told if versus.get("equally_long", True) or versus["speed_up"] is None else f"({told})"


def bands_text(versus: dict[str, Any]) -> str:
    """How many of the common epochs have the band entirely on the better side, and how many on the worse."""
    if not versus.get("epochs_with_bands"):
        return wording.ABSENT
    better, worse = versus["epochs_apart_better"], versus["epochs_apart_worse"]
    since = f", from {versus['first_epoch_apart']}" if better else ""
    return f"{better} / {worse}{since}"


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
