"""The comparison in a terminal: the columns that matter most, narrow enough for 80 characters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradshare.errors import printable
from gradshare.reports import wording
from gradshare.reports.compare import Comparison, result_of
from gradshare.reports.run_tables import bands_text, has_reference, speed_up_text, threshold_table
from gradshare.reports.wording import Measure

if TYPE_CHECKING:
    from rich.table import Table

OWN, AGAINST = ("Arm", "Best val.", "Ep", "Test", "Time"), ("Speed-up", "Lead", "Apart")


def rich_table(comparison: Comparison) -> Table:
    """One plain comparison: a row a run. Several experiments or seeds: a row an arm, means over its seeds."""
    from rich.table import Table
    from rich.text import Text

    plain = sum(len(one["repeats"]) for one in comparison["experiments"]) == len(comparison["arms"])
    alone = plain and len(comparison["experiments"]) == 1
    names, rows = _runs(comparison) if alone else _arms(comparison)
    caption = Text(_caption(comparison, "Lead" in names, "Apart" in names), style="dim")
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, caption=caption, caption_justify="left")
    for name in names:
        left = name in ("Arm", "Experiment")
        drawn.add_column(name, justify="left" if left else "right", overflow="fold", no_wrap=not left)
    for row in rows:
        drawn.add_row(*(Text(printable(cell)) for cell in row))  # Text: a name such as [red] stays text
    return drawn


def _runs(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Best validation, test (of the ensemble where there is one), training time, and the lead of every run."""
    against, measure = has_reference(comparison), comparison["measure"]
    rows = [
        _own(name, arm, measure) + (_against(arm, measure) if against else [])
        for name, arm in comparison["arms"].items()
    ]
    return [*OWN, *(AGAINST if against else ())], rows


def _arms(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Test, speed-up and lead of every arm of every experiment."""
    measure, rows = comparison["measure"], []
    for experiment in comparison["experiments"]:
        for one in experiment["repeats"]:
            test, done = one["test"] or {}, one["done"] == len(one["runs"])
            rows.append(
                [
                    experiment["title"],
                    one["name"] if done else f"{one['name']}*",
                    str(len(one["runs"])),
                    wording.level(test.get("value"), measure, test.get("interval")),
                    wording.percent(one["speed_up"] and one["speed_up"]["mean"]),
                    wording.signed(one["mean_difference"] and one["mean_difference"]["mean"], measure),
                ]
            )
    return ["Experiment", "Arm", "Seeds", "Test", "Speed-up", "Lead"], rows


def rich_thresholds(comparison: Comparison) -> Table | None:
    """Epochs and seconds that each arm took to reach round values; None where none is, or for several experiments."""
    from rich.table import Table
    from rich.text import Text

    if len(comparison["experiments"]) > 1 or not comparison["experiments"][0]["thresholds"]:
        return None
    found = threshold_table(comparison["experiments"][0], comparison["measure"])
    title = f"Epochs and training time to reach a validation {comparison['measure']}"
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, title=title, title_justify="left")
    for name in found.columns:
        drawn.add_column(name, justify="left" if name == "Arm" else "right", overflow="fold")
    for row in found.rows:
        drawn.add_row(*(Text(printable(cell.text)) for cell in row))
    return drawn


def _own(name: str, arm: dict[str, Any], measure: Measure) -> list[str]:
    result = result_of(arm)
    return [
        f"{name}*" if wording.marks(arm) else name,
        wording.level(arm["best_val"], measure, arm["best_val_interval"]),
        wording.ABSENT if arm["best_epoch"] is None else str(arm["best_epoch"]),
        wording.level(result.get("value"), measure, result.get("interval")),
        wording.seconds(arm["train_seconds"]),
    ]


def _against(arm: dict[str, Any], measure: Measure) -> list[str]:
    versus = arm["against_original"] or {}
    return [
        speed_up_text(versus),
        wording.signed(versus.get("mean_difference"), measure),
        bands_text(versus).split(",")[0].replace(" ", ""),
    ]


def _caption(comparison: Comparison, leads: bool, apart: bool) -> str:
    unit = "accuracy points" if comparison["measure"] == "accuracy" else "loss"
    told = f"Lead: arm minus original, mean over the common epochs, in {unit}. " if leads else ""
    told += "Apart: epochs in which the 95 % bands are apart, better/worse. " if apart else ""
    marks = dict.fromkeys(mark for arm in comparison["arms"].values() for mark in wording.marks(arm))
    marked = f"* {' or '.join(marks)}. " if marks else ""
    return f"{marked}{told}{comparison['note']}"
