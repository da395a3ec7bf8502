"""A table as a value, and the tables of runs: every run, and the time to reach given values."""

from __future__ import annotations

from typing import Any, NamedTuple

from gradshare.reports import wording
from gradshare.reports.compare import Comparison
from gradshare.reports.wording import Measure

Rows = list[list[str]]


class Cell(NamedTuple):
    text: str
    value: str | float | None = None
    """What to sort by; None goes last."""
    beside: str = ""
    """What stands below it in small letters: the paper's figure."""


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""
    arms: tuple[str, ...] = ()
    """Of each row, for its colour."""


AGAINST_NOTE = (
    f"Against the original: the paper's speed-up, (epoch of the original {wording.MINUS} epoch of the arm) / epoch of"
    " the arm, each the earliest best epoch, which says when an arm was at its best and not how good that was (in"
    " parentheses: the two did not train equally long); arm minus original, as a mean over the common epochs and at the"
    " last of them; and in how many epochs the 95 % bands are apart, with the first in which the arm's is the better."
)


def table(comparison: Comparison) -> Rows:
    """Every run as text: the heading row, then a row a run."""
    found = runs_table(comparison)
    return [found.columns] + [[cell.text for cell in row] for row in found.rows]


def runs_table(comparison: Comparison) -> Table:
    """A row a run."""
    measure, against = comparison["measure"], has_reference(comparison)
    rows = [
        _own_cells(name, arm, measure) + (_compared_cells(arm, measure) if against else []) + _time_cells(arm)
        for name, arm in comparison["arms"].items()
    ]
    note = f"{AGAINST_NOTE} {comparison['note']}" if against else comparison["note"]
    arms = tuple(arm["arm"] for arm in comparison["arms"].values())
    return Table("Every run", _heading(measure, against), rows, f"{note} Times are of training alone.", arms)


def has_reference(comparison: Comparison) -> bool:
    """Whether any arm has an original to be compared with; without one, those columns are left out."""
    return any(arm["against_original"] for arm in comparison["arms"].values())


def _heading(measure: Measure, against: bool) -> list[str]:
    unit, mean = ("points", "lead") if measure == "accuracy" else ("loss", "difference")
    compared = ["Speed-up", f"Mean {mean}, {unit}", f"Last-epoch {mean}, {unit}", "Bands apart, better / worse"]
    own = ["Run", f"Best val. {measure}", "Epoch", "Test, best epoch", "Test, ensemble"]
    return [*own, *(compared if against else []), "Time an epoch", "Training time"]


def _own_cells(name: str, arm: dict[str, Any], measure: Measure) -> list[Cell]:
    tests = [(arm["test"] or {}).get(kind) or {} for kind in ("best", "ensemble")]
    return [
        Cell(f"{name} ({', '.join(marks)})" if (marks := wording.marks(arm)) else name, name),
        Cell(wording.level(arm["best_val"], measure, arm["best_val_interval"]), arm["best_val"]),
        Cell(wording.ABSENT if arm["best_epoch"] is None else str(arm["best_epoch"]), arm["best_epoch"]),
        *(Cell(wording.level(one.get("value"), measure, one.get("interval")), one.get("value")) for one in tests),
    ]


def _compared_cells(arm: dict[str, Any], measure: Measure) -> list[Cell]:
    versus = arm["against_original"] or {}
    lead, last = versus.get("mean_difference"), versus.get("final_difference")
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


def threshold_table(experiment: dict[str, Any], measure: Measure) -> Table:
    """The epoch, and the training time, at which each arm first reached round values; means where several seeds did."""
    tops = [wording.round_level(each["value"], measure) for each in experiment["thresholds"]]
    rows = [[Cell(one["name"], one["name"]), *_reached_cells(one)] for one in experiment["repeats"]]
    note = (
        "The first epoch at or beyond the value, with the training time until its end; a dash: not reached. The values"
        " are three to five round ones between the worst first epoch and the best epoch of any run here."
        f" {wording.CLOCK}"
    )
    if any(len(one["runs"]) > 1 for one in experiment["repeats"]):
        note += " Of several seeds the mean of those that reached it, and in parentheses how many did where not all."
    title = f"Time to reach a validation {measure}"
    return Table(title, ["Arm", *tops], rows if tops else [], note, tuple(one["arm"] for one in experiment["repeats"]))


def _reached_cells(repeats: dict[str, Any]) -> list[Cell]:
    return [
        Cell(_reached(hit, len(repeats["counted"])), hit["epoch"] and hit["epoch"]["mean"])
        for hit in repeats["reached"]
    ]


def _reached(hit: dict[str, Any], of: int) -> str:
    epoch, time = hit["epoch"], hit["seconds"]
    if epoch is None:
        return wording.ABSENT
    told = "" if time is None else f" ({wording.seconds(time['mean'])})"
    part = f" ({epoch['seeds']} of {of})" if epoch["seeds"] < of else ""
    return f"epoch {wording.number_spread(epoch)}{told}{part}"
