"""The tables of a report as values: the one with the verdicts, and those with the details."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gradshare.method.variants import Variant
from gradshare.reports import words
from gradshare.reports.comparison import ArmResult, Comparison, ExperimentResult, Lead, Reached, RunResult
from gradshare.reports.model import Measure, Run, text_of
from gradshare.reports.paper import Figure, PaperCell, experiment_of
from gradshare.reports.statistics import Verdict, Versus, mean, seconds_until
from gradshare.runs.folder import Score


class Cell(NamedTuple):
    text: str
    value: str | float | None = None  # to sort by; None is last
    beside: str = ""  # below it in small letters
    verdict: Verdict | None = None  # its colour on the page
    marks: tuple[str, ...] = ()  # status and warnings


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""
    variants: tuple[Variant, ...] = ()  # of each row, for its colour


VERDICT_NOTE = (
    "Ahead: a better curve on average, with 95 % bands apart in some epoch and in none the other way round; mixed:"
    " bands apart both ways; unclear: neither, which does not show that two arms are equal. Several seeds must agree."
    " The difference is arm minus reference, the mean over the common epochs, in {unit}. The best control is the one"
    " that the arm leads least."
)
TASKS_NOTE = "± of one run is a 95 % interval over tasks, which does not cover what another seed would change."
SEEDS_NOTE = "± of several seeds is a 95 % interval over the seeds that are done (Student's t), wide for few."
PAPER_NOTE = (
    "The paper's ± is the 95 % interval that it prints; ours is over tasks for one seed, over seeds for several. Batch"
    " norm is transductive here, as in the reference codes. Intervals that overlap do not show that figures are equal."
)
CLOCK = "Seconds are clock times: they also depend on what else the machine did."


def all_tables(comparison: Comparison) -> list[Table]:
    """The verdicts first, then the details; tables without rows are left out."""
    details = (controls_table, speed_table, levels_table, runs_table)
    tables = [verdict_table(comparison), *paper_tables(comparison), *(build(comparison) for build in details)]
    return [table for table in tables if table.rows]


# The verdicts


def verdict_table(comparison: Comparison) -> Table:
    """A row for each arm of each experiment."""
    measure = comparison.measure
    columns = ["Arm", "Test", "Best validation", "at epoch"]
    parts: list[Callable[[ArmResult], list[Cell]]] = [lambda one: _own_cells(one, measure)]
    if comparison.has_original:
        columns += ["Against the original", "Speed-up"]
        parts.append(lambda one: [_lead_cell(one.against_original, measure), _speed_cell(one)])
    if any(one.against_best_control for one in _arms(comparison)):
        columns.append("Against the best control")
        parts.append(lambda one: [_control_cell(one, measure)])
    seeds = [SEEDS_NOTE] if comparison.several_seeds else []
    note = [VERDICT_NOTE.format(unit=_unit(measure)), TASKS_NOTE, *seeds] if comparison.has_original else [TASKS_NOTE]
    return _by_arm("Verdicts", columns, comparison, lambda _, one: [cell for part in parts for cell in part(one)], note)


def _own_cells(one: ArmResult, measure: Measure) -> list[Cell]:
    best = one.best_val
    interval = None if best is None else best.interval if len(one.arm.counted) > 1 else _interval_of_best(one)
    return [
        _name_cell(one),
        _test_cell(one, None, measure),
        Cell(words.level(mean(best), measure, interval), mean(best)),
        Cell(words.number_spread(one.best_epoch), mean(one.best_epoch)),
    ]


def _name_cell(one: ArmResult) -> Cell:
    runs = one.arm.runs
    if len(runs) == 1:
        return Cell(one.name, one.name, marks=tuple(runs[0].marks))
    done = f"{one.arm.done} of {len(runs)} done" if one.arm.done < len(runs) else ""
    kinds = [mark for run in runs for mark in run.marks]
    marks = tuple(f"{mark}: {kinds.count(mark)}" for mark in dict.fromkeys(kinds))
    return Cell(one.name, one.name, ", ".join(filter(None, (words.count(len(runs), "seed"), done))), marks=marks)


def _interval_of_best(one: ArmResult) -> float | None:
    (run,) = one.arm.counted
    interval = None if run.best is None else float(run.interval[run.best])
    return None if interval is None or interval != interval else interval


def _lead_cell(lead: Lead | None, measure: Measure, beside: str = "") -> Cell:
    if lead is None:
        return Cell(words.ABSENT)
    text = f"{lead.verdict} {words.signed_spread(lead.difference, measure)}"
    within = lead.difference.interval is not None and abs(lead.difference.mean) <= lead.difference.interval
    notes = [beside, "within the spread of seeds" if within and lead.verdict != "unclear" else ""]
    return Cell(text, lead.difference.mean, ", ".join(filter(None, notes)), lead.verdict)


def _control_cell(one: ArmResult, measure: Measure) -> Cell:
    lead = one.against_best_control
    return _lead_cell(lead, measure, lead.reference if lead else "")


def _speed_cell(one: ArmResult) -> Cell:
    return Cell(words.percent(mean(one.speed_up)), mean(one.speed_up))


def _arms(comparison: Comparison) -> Iterable[ArmResult]:
    return (arm for experiment in comparison.experiments for arm in experiment.arms)


def _by_arm(
    title: str,
    columns: list[str],
    comparison: Comparison,
    cells: Callable[[ExperimentResult, ArmResult], list[Cell]],
    note: Iterable[str],
) -> Table:
    """A table with a row for each arm that has cells; with a column for the experiment if there are several."""
    several = len(comparison.experiments) > 1
    found = [(one, arm, cells(one, arm)) for one in comparison.experiments for arm in one.arms]
    chosen = [(one, arm, row) for one, arm, row in found if row]
    rows = [[_text(one.setting.title), *row] if several else row for one, _, row in chosen]
    heading = (["Experiment"] if several else []) + columns
    return Table(title, heading, rows, " ".join(note), tuple(arm.variant for _, arm, _ in chosen))


def _text(text: str) -> Cell:
    return Cell(text, text)


def _unit(measure: Measure) -> str:
    return "accuracy points" if measure == "accuracy" else "units of the loss"


# Details


def controls_table(comparison: Comparison) -> Table:
    """How much of sharing's gain over the original each control has too."""
    measure = comparison.measure

    def cells(_: ExperimentResult, one: ArmResult) -> list[Cell]:
        share = one.share_of_gain
        if share is None:
            return []
        part = Cell(f"{100 * share:.0f} %", share)
        return [_text(one.name), _lead_cell(one.against_original, measure), part, _text(one.variant.keeps)]

    columns = ["Control", "Against the original", "Share of sharing's gain", "What it keeps"]
    note = "The gains are means over the epochs that original, sharing and control have in common."
    return _by_arm("What the controls explain", columns, comparison, cells, [note])


def speed_table(comparison: Comparison) -> Table:
    """The paper's speed-up beside more robust ones."""
    measure = comparison.measure
    columns = ["Arm", "The paper's speed-up", f"Validation {measure} that both reached", "at epoch"]
    columns += ["Sooner, in epochs", "Sooner, in seconds", f"Area, {words.unit(measure)} × epochs"]
    note = (
        "The paper's: (best epoch of the original − best epoch of the arm) / best epoch of the arm, which depends on"
        " the noise of two epochs. More robust: how much sooner the arm reached the hardest level that both reached;"
        " and the area between the curves. Each run is compared with the original of its own seed."
    )
    return _by_arm("Speed-up", columns, comparison, lambda one, arm: _speed_cells(one, arm, measure), [note, CLOCK])


def _speed_cells(experiment: ExperimentResult, one: ArmResult, measure: Measure) -> list[Cell]:
    if one.mean_difference is None:
        return []
    common = [place for place, hit in enumerate(one.reached) if hit.speed_up]
    hit = one.reached[common[-1]] if common else Reached(None, None, None, None)
    value = experiment.levels[common[-1]].value if common else None
    return [
        _text(one.name),
        Cell(words.percent_spread(one.speed_up), mean(one.speed_up)),
        Cell(words.ABSENT if value is None else words.round_level(value, measure), value),
        Cell(words.number_spread(hit.epoch), mean(hit.epoch)),
        *(Cell(words.percent_spread(speed), mean(speed)) for speed in (hit.speed_up, hit.speed_up_seconds)),
        Cell(words.signed_spread(one.area, measure), mean(one.area)),
    ]


def levels_table(comparison: Comparison) -> Table:
    """When each arm first reached round values; means over the seeds that did."""
    measure, several = comparison.measure, len(comparison.experiments) > 1
    most = max(len(one.levels) for one in comparison.experiments)
    if not most:
        return Table("", [], [])
    first = [words.round_level(level.value, measure) for level in comparison.experiments[0].levels]
    columns = [f"Level {number}" for number in range(1, most + 1)] if several else first

    def cells(experiment: ExperimentResult, one: ArmResult) -> list[Cell]:
        values = [f"{words.round_level(level.value, measure)}: " if several else "" for level in experiment.levels]
        found = [_reached_cell(one, place, value) for place, value in enumerate(values)]
        return [_text(one.name), *found, *[Cell("")] * (most - len(found))]

    note = (
        "The first epoch at the level or beyond it, with the training time until its end; a dash: not reached. Levels"
        " are round values between the worst first epoch and the best epoch of any run of the experiment."
    )
    title = f"Epochs and training time to reach a validation {measure}"
    return _by_arm(title, ["Arm", *columns], comparison, cells, [note, CLOCK])


def _reached_cell(one: ArmResult, place: int, level: str) -> Cell:
    hit, of = one.reached[place], len(one.arm.counted)
    if hit.epoch is None:
        return Cell(f"{level}{words.ABSENT}")
    time = "" if hit.seconds is None else f" ({words.seconds(hit.seconds.mean)})"
    part = f" ({hit.epoch.seeds} of {of})" if hit.epoch.seeds < of else ""
    return Cell(f"{level}epoch {words.number_spread(hit.epoch)}{time}{part}", hit.epoch.mean)


def runs_table(comparison: Comparison) -> Table:
    """A row for each run."""
    measure, against = comparison.measure, comparison.has_original
    columns = ["Run", "Best validation", "at epoch", "Test, best epoch", "Test, ensemble"]
    columns += (
        [f"Mean lead, {words.unit(measure)}", "at the last epoch", "Bands apart, better / worse"] if against else []
    )
    gates = any(one.run.m is not None or one.run.lam is not None for one in comparison.runs.values())
    columns += [f"Last {words.GATE_M}", f"Last {words.GATE_LAM}"] if gates else []
    rows = [
        _run_cells(one, measure)
        + (_versus_cells(one.against_original, measure) if against else [])
        + (_gate_cells(one) if gates else [])
        + _time_cells(one)
        for one in comparison.runs.values()
    ]
    note = f"Times are of training only. {CLOCK} {TASKS_NOTE}"
    variants = tuple(one.run.variant for one in comparison.runs.values())
    return Table("Every run", [*columns, "Time of an epoch", "Training time"], rows, note, variants)


def _run_cells(one: RunResult, measure: Measure) -> list[Cell]:
    run = one.run
    value, interval = (None, None) if run.best is None else (float(run.val[run.best]), float(run.interval[run.best]))
    scores = [run.test.best, run.test.ensemble] if run.test else [None, None]
    return [
        Cell(run.name, run.name, marks=tuple(run.marks)),
        Cell(words.level(value, measure, None if interval != interval else interval), value),
        Cell(words.ABSENT if run.best_epoch is None else str(run.best_epoch), run.best_epoch),
        *(_score_cell(run, score, measure) for score in scores),
    ]


def _score_cell(run: Run, score: Score | None, measure: Measure) -> Cell:
    value = run.measured(score)
    return Cell(words.level(value, measure, score.interval if score else None), value)


def _versus_cells(found: Versus | None, measure: Measure) -> list[Cell]:
    if found is None:
        return [Cell(words.ABSENT)] * 3
    return [
        Cell(words.signed(found.mean_difference, measure), found.mean_difference),
        Cell(words.signed(found.final_difference, measure), found.final_difference),
        Cell(bands_text(found), found.epochs_apart_better),
    ]


def bands_text(found: Versus) -> str:
    """In how many epochs the band is entirely on the better side (since when), and on the worse."""
    if not found.epochs_with_bands:
        return words.ABSENT
    since = f", from {found.first_epoch_apart}" if found.epochs_apart_better else ""
    return f"{found.epochs_apart_better} / {found.epochs_apart_worse}{since}"


def _gate_cells(one: RunResult) -> list[Cell]:
    last = [None if steps is None else float(steps[-1].mean()) for steps in (one.run.m, one.run.lam)]
    return [Cell(words.ABSENT if value is None else f"{value:.2f}", value) for value in last]


def _time_cells(one: RunResult) -> list[Cell]:
    run = one.run
    each = float(run.seconds.mean()) if len(run.seconds) else None
    total = seconds_until(run, int(run.epochs[-1])) if len(run.epochs) else None
    return [Cell(words.seconds(value), value) for value in (each, total)]


# The paper


def paper_tables(comparison: Comparison) -> list[Table]:
    """The paper's table with our figures, for each shape and inner rate; and every figure beside the paper's."""
    found: dict[tuple[str, str], list[ExperimentResult]] = {}
    for one in comparison.experiments:
        if experiment_of(one.experiment.runs[0].options) and any(arm.test for arm in one.arms):
            found.setdefault((text_of(one.setting.inner_lr), one.setting.shape), []).append(one)
    tables = [
        _accuracy_table(f"{shape}, inner rate {rate}", found[rate, shape], comparison.measure)
        for rate, shape in sorted(found)
    ]
    return [*tables, beside_the_paper(comparison)]


def _accuracy_table(what: str, members: list[ExperimentResult], measure: Measure) -> Table:
    """A row for each method and number of tasks; three columns for each data set."""
    places = {(one.setting.row, one.setting.data): one for one in members}
    rows, data = (list(dict.fromkeys(key[place] for key in places)) for place in (0, 1))
    columns = [f"{name}: {part}" for name in data for part in ("original", "with sharing", "speed-up")]
    cells = [
        [_text(row), *(cell for name in data for cell in _pair_cells(places.get((row, name)), measure))] for row in rows
    ]
    stores = [
        f"{row} from the store {text_of(one.setting.dataset)}"
        for (row, name), one in places.items()
        if text_of(one.setting.dataset) != name
    ]
    chosen = [f"{row} on {name}, {told}" for (row, name), one in places.items() if (told := _chosen(one))]
    notes = ["Method/tasks in a batch. Test: the ensemble of the best epochs."]
    notes += [f"{words.listed(stores)}."] if stores else []
    notes += (
        [f"Of an arm with several configurations, the one with the most seeds: {'; '.join(chosen)}."] if chosen else []
    )
    notes += [PAPER_NOTE] if any(one.paper for one in members) else []
    return Table(
        f"The paper's table: test {measure} and speed-up, {what}", ["Method/tasks", *columns], cells, " ".join(notes)
    )


def _chosen(one: ExperimentResult) -> str:
    """The configuration that is shown, for the arms that have several."""
    arms = [one.main(arm) for arm in ("original", "shared")]
    return words.listed([arm.name for arm in arms if arm and arm.name != arm.variant.name])


def _pair_cells(one: ExperimentResult | None, measure: Measure) -> list[Cell]:
    if one is None:
        return [Cell("")] * 3
    shared, paper = one.main("shared"), one.paper
    speed = shared.speed_up if shared else None
    beside = f"paper {words.percent(paper.speed_up)}" if paper else ""
    tests = [_test_cell(one.main(arm), paper.of(arm) if paper else None, measure) for arm in ("original", "shared")]
    return [*tests, Cell(words.percent(mean(speed)), mean(speed), beside)]


def _test_cell(arm: ArmResult | None, paper: Figure | None, measure: Measure) -> Cell:
    test = arm.test if arm else None
    beside = f"paper {words.level(paper.value, measure, paper.interval)}" if paper else ""
    return Cell(words.tested(test, measure), test.value if test else None, beside)


def beside_the_paper(comparison: Comparison) -> Table:
    """A row for each figure of the paper's table that we have a figure for."""
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
    rows = [
        _beside(one, arm, one.paper, told)
        for one in comparison.experiments
        for arm in one.arms
        if one.paper and (told := one.paper.of(arm.variant.name)) and arm.test
    ]
    return Table("Beside the paper", columns, rows, f"Difference: ours minus the paper's, in points. {PAPER_NOTE}")


def _beside(one: ExperimentResult, arm: ArmResult, paper: PaperCell, told: Figure) -> list[Cell]:
    assert arm.test is not None
    ours, speed = arm.test, arm.speed_up
    papers = paper.speed_up if arm.variant.name == "shared" else None
    difference = ours.value - told.value
    intervals = words.ABSENT
    if ours.interval is not None:
        intervals = "overlap" if abs(difference) <= ours.interval + told.interval else "apart"
    return [
        _text(one.setting.title),
        _text(arm.variant.name),
        Cell(f"{words.level(ours.value, 'accuracy', ours.interval)} ({ours.over})", ours.value),
        Cell(words.level(told.value, "accuracy", told.interval), told.value),
        Cell(words.signed(100 * difference, "accuracy"), difference),
        _text(intervals),
        Cell(words.percent_spread(speed), mean(speed)),
        Cell(words.percent(papers), papers),
        _text("; ".join(one.departures) or "no"),
    ]
