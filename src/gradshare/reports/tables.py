"""The tables of many runs: the paper's table, ours beside the paper's, speed-ups, means over seeds."""

from __future__ import annotations

from typing import Any

from gradshare.reports import wording
from gradshare.reports.compare import Comparison, main_arms
from gradshare.reports.experiments import value_text
from gradshare.reports.paper import DATA
from gradshare.reports.run_tables import Cell, Table, runs_table
from gradshare.reports.wording import Measure

PAPER_NOTE = (
    "The paper's ± is the 95 % confidence interval that it prints; ours is over tasks for one seed, over seeds"
    " for several. The reference code of MAML++ gives a spread over images, another quantity again. Batch norm is"
    " transductive here, as in the reference codes. Intervals that overlap do not show that two figures are equal."
)
SPEED_NOTE = (
    "The paper's: how much sooner than the original an arm had its best epoch, which hangs on the noise of two single"
    " epochs. More robust: how much sooner it reached the hardest round value that both reached, (the original's"
    " epoch or training time − the arm's) / the arm's; and the area between the curves, arm minus original, summed over"
    " the common epochs. Each run against the original of its own seed; of several seeds the mean, ± a 95 % interval"
    f" over seeds. {wording.CLOCK}"
)


def all_tables(comparison: Comparison) -> list[Table]:
    """One plain comparison: its runs first. Several experiments or seeds: the paper's table first, the runs last."""
    seeds, beside, speed, runs = (build(comparison) for build in (seeds_table, paper_table, speed_table, runs_table))
    several = len(comparison["experiments"]) > 1 or seeds.rows or beside.rows
    tables = [*accuracy_tables(comparison), beside, speed, seeds, runs] if several else [runs, speed]
    return [table for table in tables if table.rows]


def accuracy_tables(comparison: Comparison) -> list[Table]:
    """The paper's table, once for each shape and inner rate: test accuracy of both arms, and the speed-up."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for experiment in comparison["experiments"]:
        one = experiment["setting"]
        shape = f"{value_text(one['ways'])}-way {value_text(one['shots'])}-shot"
        found.setdefault((shape, value_text(one["inner_lr"])), []).append(experiment)
    tables = [
        _accuracy_table(f"Test {comparison['measure']} and speed-up, {shape}, inner rate {rate}", members, comparison)
        for (shape, rate), members in sorted(found.items(), key=lambda item: (item[0][1], item[0][0]))
    ]
    return [table for table in tables if any(cell.value is not None for row in table.rows for cell in row[1:])]


def _accuracy_table(title: str, members: list[dict[str, Any]], comparison: Comparison) -> Table:
    places = {(experiment["row"], _data(experiment)): experiment for experiment in members}
    rows, data = (list(dict.fromkeys(key[place] for key in places)) for place in (0, 1))
    columns = [f"{name}: {part}" for name in data for part in ("original", "with sharing", "speed-up")]
    empty = [Cell("")] * 3
    cells = [
        [
            Cell(row, row),
            *(
                cell
                for name in data
                for cell in (_pair_cells(places[row, name], comparison) if (row, name) in places else empty)
            ),
        ]
        for row in rows
    ]
    note = "Method/tasks a batch. Test: the ensemble of the best epochs where there is one, else the best epoch."
    other = [f"{row} from the store {_store(one)}" for (row, name), one in places.items() if _store(one) != name]
    note += f" {wording.listed(other)}." if other else ""
    chosen = [f"{row} on {name}, {_chosen(one)}" for (row, name), one in places.items() if _chosen(one)]
    note += f" Of an arm trained in several ways, the one with the most seeds: {'; '.join(chosen)}." if chosen else ""
    papers = any(experiment["paper"] for experiment in members)
    return Table(title, ["Method/tasks", *columns], cells, f"{note} {PAPER_NOTE}" if papers else note)


def _chosen(experiment: dict[str, Any]) -> str:
    """The arms of the paper's table that have several configurations, each in the one that is told of."""
    arms = main_arms(experiment)
    names = [arms[arm]["name"] for arm in ("original", "shared") if arm in arms]
    return wording.listed([name for name in names if name not in ("original", "shared")])


def _data(experiment: dict[str, Any]) -> str:
    return DATA.get(_store(experiment), _store(experiment))


def _store(experiment: dict[str, Any]) -> str:
    return value_text(experiment["setting"]["dataset"])


def _pair_cells(experiment: dict[str, Any], comparison: Comparison) -> list[Cell]:
    arms = main_arms(experiment)
    paper, measure = experiment["paper"] or {}, comparison["measure"]
    tests = [_test_cell(arms.get(arm), paper.get(arm), measure) for arm in ("original", "shared")]
    found = arms["shared"]["speed_up"] if "shared" in arms else None
    beside = f"paper {wording.percent(paper['speed_up'])}" if paper else ""
    return [*tests, Cell(wording.percent(found and found["mean"]), found and found["mean"], beside)]


def _test_cell(repeats: dict[str, Any] | None, paper: dict[str, Any] | None, measure: Measure) -> Cell:
    test = (repeats or {}).get("test") or {}
    beside = f"paper {wording.level(paper['value'], measure, paper['interval'])}" if paper else ""
    return Cell(wording.level(test.get("value"), measure, test.get("interval")), test.get("value"), beside)


def paper_table(comparison: Comparison) -> Table:
    """A row for each figure of the paper's that has one of ours beside it."""
    rows = []
    for experiment in comparison["experiments"]:
        for repeats in experiment["repeats"]:
            told = experiment["paper"] and experiment["paper"].get(repeats["arm"])
            if told and repeats["test"]:
                rows.append(_beside(experiment, repeats, told))
    columns = [
        "Experiment",
        "Arm",
        "Ours",
        "Paper's",
        "Difference",
        "Intervals",
        "Speed-up",
        "Paper's",
        "Trained otherwise",
    ]
    return Table("Beside the paper", columns, rows, f"Difference: ours minus the paper's, in points. {PAPER_NOTE}")


def _beside(experiment: dict[str, Any], repeats: dict[str, Any], told: dict[str, Any]) -> list[Cell]:
    ours, speed = repeats["test"], repeats["speed_up"]
    papers = experiment["paper"]["speed_up"] if repeats["arm"] == "shared" else None
    intervals = intervals_text(ours, told)
    return [
        Cell(experiment["title"], experiment["title"]),
        Cell(repeats["arm"], repeats["arm"]),
        Cell(f"{wording.level(ours['value'], 'accuracy', ours['interval'])} ({ours['over']})", ours["value"]),
        Cell(wording.level(told["value"], "accuracy", told["interval"]), told["value"]),
        Cell(wording.signed(100 * (ours["value"] - told["value"]), "accuracy"), ours["value"] - told["value"]),
        Cell(intervals, intervals),
        Cell(wording.percent_spread(speed), speed and speed["mean"]),
        Cell(wording.percent(papers), papers),
        Cell("; ".join(experiment["departures"]) or "no", len(experiment["departures"])),
    ]


def intervals_text(ours: dict[str, Any], told: dict[str, Any]) -> str:
    if ours["interval"] is None:
        return wording.ABSENT
    return "overlap" if abs(ours["value"] - told["value"]) <= ours["interval"] + told["interval"] else "apart"


def seeds_table(comparison: Comparison) -> Table:
    """A row an arm that has several seeds: means, and 95 % intervals over seeds."""
    measure = comparison["measure"]
    unit = "points" if measure == "accuracy" else "loss"
    chosen = [
        (experiment["title"], one)
        for experiment in comparison["experiments"]
        for one in experiment["repeats"]
        if len(one["runs"]) > 1
    ]
    leads = [f"Mean lead, {unit}", f"Last-epoch lead, {unit}"]
    columns = ["Experiment", "Arm", "Seeds", "Test", f"Best val. {measure}", "Epoch", *leads]
    note = (
        "Means over the seeds that are done, with 95 % intervals over seeds (Student's t); each run against the"
        " original of its own seed."
    )
    rows = [_seeds_row(title, one, measure) for title, one in chosen]
    return Table("Over seeds", columns, rows, note, tuple(one["arm"] for _, one in chosen))


def _seeds_row(title: str, one: dict[str, Any], measure: Measure) -> list[Cell]:
    test, best = one["test"] or {}, one["best_val"] or {}
    differences = [one["mean_difference"], one["final_difference"]]
    return [
        Cell(title, title),
        Cell(one["name"], one["name"]),
        Cell(_seeds(one), len(one["counted"])),
        Cell(wording.level(test.get("value"), measure, test.get("interval")), test.get("value")),
        Cell(wording.level(best.get("mean"), measure, best.get("interval")), best.get("mean")),
        Cell(wording.number_spread(one["best_epoch"]), one["best_epoch"] and one["best_epoch"]["mean"]),
        *(Cell(wording.signed_spread(found, measure), found and found["mean"]) for found in differences),
    ]


def _seeds(one: dict[str, Any]) -> str:
    trained, done = len(one["runs"]), one["done"]
    return str(trained) if trained == done else f"{done} of {trained} done"


def speed_table(comparison: Comparison) -> Table:
    """The paper's speed-up beside more robust ones, a row an arm that has an original."""
    measure = comparison["measure"]
    chosen = [
        (experiment, one)
        for experiment in comparison["experiments"]
        for one in experiment["repeats"]
        if one["mean_difference"]
    ]
    unit = "points" if measure == "accuracy" else "loss"
    value = f"Validation {measure} both reached"
    columns = ["Experiment", "Arm", "The paper's", value, "At epoch", "Sooner, in epochs", "Sooner, in seconds"]
    rows = [_speed_row(experiment, one, measure) for experiment, one in chosen]
    arms = tuple(one["arm"] for _, one in chosen)
    return Table("Speed-up", [*columns, f"Area, {unit} × epochs"], rows, SPEED_NOTE, arms)


def _speed_row(experiment: dict[str, Any], one: dict[str, Any], measure: Measure) -> list[Cell]:
    common = [place for place, hit in enumerate(one["reached"]) if hit["speed_up"]]
    hit = one["reached"][common[-1]] if common else {}
    value = experiment["thresholds"][common[-1]]["value"] if common else None
    speeds = [hit.get("speed_up"), hit.get("speed_up_seconds")]
    return [
        Cell(experiment["title"], experiment["title"]),
        Cell(one["name"], one["name"]),
        Cell(wording.percent_spread(one["speed_up"]), one["speed_up"] and one["speed_up"]["mean"]),
        Cell(wording.ABSENT if value is None else wording.round_level(value, measure), value),
        Cell(wording.number_spread(hit.get("epoch")), hit["epoch"]["mean"] if hit else None),
        *(Cell(wording.percent_spread(speed), speed and speed["mean"]) for speed in speeds),
        Cell(wording.signed_spread(one["area"], measure), one["area"] and one["area"]["mean"]),
    ]
