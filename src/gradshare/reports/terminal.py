"""The comparison in a terminal: the columns that matter most, narrow enough for 80 characters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradshare.reports import wording
from gradshare.reports.compare import Comparison
from gradshare.reports.runs import Measure
from gradshare.reports.tables import bands_text, has_reference, speed_up_text, threshold_table

if TYPE_CHECKING:
    from rich.table import Table

OWN, AGAINST = ("Arm", "Best val.", "Ep", "Test", "Time"), ("Speed-up", "Lead", "Apart")


def rich_table(comparison: Comparison) -> Table:
    """A row an arm: best validation, test (the ensemble where there is one), training time, and the lead."""
    from rich.table import Table
    from rich.text import Text

    against = has_reference(comparison)
    caption = Text(_caption(comparison), style="dim")
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, caption=caption, caption_justify="left")
    for name in OWN + (AGAINST if against else ()):
        drawn.add_column(name, justify="left" if name == "Arm" else "right", overflow="fold", no_wrap=name != "Arm")
    for name, arm in comparison["arms"].items():
        row = _own(name, arm, comparison["measure"]) + (_against(arm, comparison["measure"]) if against else [])
        drawn.add_row(*map(Text, row))  # Text: a name such as [red] stays text
    return drawn


def rich_thresholds(comparison: Comparison) -> Table | None:
    """Epochs and seconds that each arm took to reach round values; None where there is nothing to reach."""
    from rich.table import Table
    from rich.text import Text

    if not comparison["thresholds"]:
        return None
    top, *rows = threshold_table(comparison)
    title = f"Epochs and training time to reach a validation {comparison['measure']}"
    drawn = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, title=title, title_justify="left")
    for name in top:
        drawn.add_column(name, justify="left" if name == "Arm" else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row))
    return drawn


def _own(name: str, arm: dict[str, Any], measure: Measure) -> list[str]:
    test = arm["test"] or {}
    result = test.get("ensemble") or test.get("best") or {}
    return [
        name if arm["finished"] else f"{name}*",
        wording.level(arm["best_val"], measure, arm["best_val_interval"]),
        wording.ABSENT if arm["best_epoch"] is None else str(arm["best_epoch"]),
        wording.level(result.get("value"), measure, result.get("interval")),
        wording.seconds(arm["train_seconds"]),
    ]


def _against(arm: dict[str, Any], measure: Measure) -> list[str]:
    versus = arm["against_original"] or {}
    return [
        speed_up_text(versus),
        wording.signed(versus.get("area"), measure),
        bands_text(versus).split(",")[0].replace(" ", ""),
    ]


def _caption(comparison: Comparison) -> str:
    unit = "accuracy points" if comparison["measure"] == "accuracy" else "loss"
    lead = (
        f"Lead: arm minus original, mean over the common epochs, in {unit}."
        " Apart: epochs in which the 95 % bands are apart, better/worse."
    )
    unfinished = "" if all(arm["finished"] for arm in comparison["arms"].values()) else "* unfinished. "
    return f"{unfinished}{lead + ' ' if has_reference(comparison) else ''}{comparison['note']}"
