"""The tables of a report as values: the one with the verdicts, and those with the details."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from gradshare.method.variants import Variant
from gradshare.reports import words
from gradshare.reports.comparison import ArmResult, Comparison, ExperimentResult, Lead, Reached, RunResult
from gradshare.reports.model import Measure, Run, count
from gradshare.reports.paper import experiment_of
from gradshare.reports.statistics import Verdict, Versus, mean
from gradshare.runs.folder import ENSEMBLE, Score


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
TEST_NOTE = f"Test: the best epochs, up to {ENSEMBLE}, predict together."
TASKS_NOTE = "± of one run is a 95 % interval over tasks, which does not cover what another seed would change."
SEEDS_NOTE = "± of several seeds is a 95 % interval over the seeds that are done (Student's t), wide for few."
PAPER_NOTE = (
    "The paper's ± is the 95 % interval that it prints; ours is over tasks for one seed, over seeds for several. Of"
    " several configurations of an arm, the one with the most seeds. Intervals that overlap do not show that figures"
    " are equal. The reference codes are transductive."
)
CLOCK = "Seconds are clock times: they also depend on what else the machine did."


def all_tables(comparison: Comparison) -> list[Table]:
    """The verdicts first, then the details; tables without rows are left out."""
    details = (paper_table, controls_table, speed_table, levels_table, runs_table)
    tables = [verdict_table(comparison), *(build(comparison) for build in details)]
    return [table for table in tables if table.rows]


def interval_notes(comparison: Comparison) -> list[str]:
    """What is tested, and what the intervals of these runs cover."""
    return [TEST_NOTE, TASKS_NOTE, SEEDS_NOTE] if comparison.several_seeds else [TEST_NOTE, TASKS_NOTE]


# The verdicts


def verdict_table(comparison: Comparison) -> Table:
    """A row for each arm of each experiment; columns that would be empty are left out."""
    measure = comparison.measure
    columns: dict[str, Callable[[ArmResult], Cell]] = {"Arm": _name_cell}
    if comparison.has_original:
        columns["Against the original"] = lambda one: _lead_cell(one.against_original, measure)
    if comparison.has_controls:
        columns["Against the best control"] = lambda one: _control_cell(one, measure)
    columns["Test"] = lambda one: _test_cell(one, measure)
    columns["Best validation"] = lambda one: _best_cell(one, measure)
    columns["at epoch"] = lambda one: Cell(words.number_spread(one.best_epoch), mean(one.best_epoch))
    if comparison.has_original:
        columns["Speed-up"] = lambda one: Cell(words.percent(mean(one.speed_up)), mean(one.speed_up))

    def cells(_: ExperimentResult, one: ArmResult) -> list[Cell]:
        return [cell(one) for cell in columns.values()]

    notes = [VERDICT_NOTE.format(unit=words.long_unit(measure))] if comparison.has_original else []
    notes += [*interval_notes(comparison), comparison.norm_note]
    return _by_arm("Verdicts", list(columns), comparison, cells, notes)


def _best_cell(one: ArmResult, measure: Measure) -> Cell:
    best, counted = one.best_val, one.counted
    interval = best.interval if best and len(counted) > 1 else counted[0].best_val_interval
    return Cell(words.level(mean(best), measure, interval), mean(best))


def _name_cell(one: ArmResult) -> Cell:
    runs = one.runs
    if len(runs) == 1:
        return Cell(one.name, one.name, marks=tuple(runs[0].marks))
    done = f"{one.done} of {len(runs)} done" if one.done < len(runs) else ""
    kinds = [mark for run in runs for mark in run.marks]
    marks = tuple(f"{mark}: {kinds.count(mark)}" for mark in dict.fromkeys(kinds))
    return Cell(one.name, one.name, ", ".join(filter(None, (count(len(runs), "seed"), done))), marks=marks)


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


def _test_cell(arm: ArmResult | None, measure: Measure, beside: str = "") -> Cell:
    if arm is None or arm.test is None:
        return Cell(words.ABSENT)
    return Cell(words.tested(arm.test, measure), arm.test.value, beside)


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
    hit, of = one.reached[place], len(one.counted)
    if hit.epoch is None:
        return Cell(f"{level}{words.ABSENT}")
    time = "" if hit.seconds is None else f" ({words.seconds(hit.seconds.mean)})"
    part = f" ({hit.epoch.seeds} of {of})" if hit.epoch.seeds < of else ""
    return Cell(f"{level}epoch {words.number_spread(hit.epoch)}{time}{part}", hit.epoch.mean)


def runs_table(comparison: Comparison) -> Table:
    """A row for each run."""
    measure, results = comparison.measure, list(comparison.runs.values())

    def difference(value: float | None) -> Cell:
        return Cell(words.signed(value, measure), value)

    def score(run: Run, found: Score | None) -> Cell:
        value = run.measured(found)
        return Cell(words.level(value, measure, found.interval if found else None), value)

    columns: dict[str, Callable[[RunResult], Cell]] = {
        "Run": lambda one: Cell(one.run.name, one.run.name, marks=tuple(one.run.marks)),
        "Best validation": lambda one: Cell(
            words.level(one.run.best_val, measure, one.run.best_val_interval), one.run.best_val
        ),
        "at epoch": lambda one: Cell(str(one.run.best_epoch or words.ABSENT), one.run.best_epoch),
        "Test, best epoch": lambda one: score(one.run, one.run.test.best if one.run.test else None),
        "Test, ensemble": lambda one: score(one.run, one.run.test.ensemble if one.run.test else None),
    }
    if comparison.has_original:
        columns[f"Mean lead, {words.unit(measure)}"] = lambda one: difference(
            one.against_original.mean_difference if one.against_original else None
        )
        columns["at the last epoch"] = lambda one: difference(
            one.against_original.final_difference if one.against_original else None
        )
        columns["Bands apart, better / worse"] = lambda one: _bands_cell(one.against_original)
    if any(one.run.m is not None or one.run.lam is not None for one in results):
        columns[f"Last {words.GATE_M}"] = lambda one: _gate_cell(one.run.final_mean_m)
        columns[f"Last {words.GATE_LAM}"] = lambda one: _gate_cell(one.run.final_mean_lam)
    columns["Time of an epoch"] = lambda one: Cell(words.seconds(one.run.seconds_per_epoch), one.run.seconds_per_epoch)
    columns["Training time"] = lambda one: Cell(words.seconds(one.run.train_seconds), one.run.train_seconds)
    rows = [[cell(one) for cell in columns.values()] for one in results]
    note = f"Times are of training only. {CLOCK} {TASKS_NOTE}"
    return Table("Every run", list(columns), rows, note, tuple(one.run.variant for one in results))


def _bands_cell(found: Versus | None) -> Cell:
    """In how many epochs the band is entirely on the better side (since when), and on the worse."""
    if found is None or not found.epochs_with_bands:
        return Cell(words.ABSENT)
    since = f", from {found.first_epoch_apart}" if found.epochs_apart_better else ""
    return Cell(f"{found.epochs_apart_better} / {found.epochs_apart_worse}{since}", found.epochs_apart_better)


def _gate_cell(value: float | None) -> Cell:
    return Cell(words.ABSENT if value is None else f"{value:.2f}", value)


# The paper


def paper_table(comparison: Comparison) -> Table:
    """Our test and speed-up for each experiment of the paper, with the figure that the paper prints below it."""
    measure = comparison.measure
    chosen = [one for one in comparison.experiments if experiment_of(one.experiment.runs[0].options)]
    rows = [
        [
            _text(one.setting.title),
            *(_test_cell(one.main(arm), measure, _printed(one, arm, measure)) for arm in ("original", "shared")),
            _paper_speed_cell(one),
            _text("; ".join(one.departures) or "no"),
        ]
        for one in chosen
        if any(arm.test for arm in one.arms)
    ]
    columns = ["Experiment", "Original", "With sharing", "Speed-up", "Trained otherwise"]
    return Table("Beside the paper", columns, rows, PAPER_NOTE)


def _printed(one: ExperimentResult, name: str, measure: Measure) -> str:
    """The configuration that is shown, if the arm has several, and the paper's figure."""
    arm, figure = one.main(name), one.paper.of(name) if one.paper else None
    which = arm.name if arm and arm.name != name else ""
    printed = f"paper {words.level(figure.value, measure, figure.interval)}" if figure else ""
    return ", ".join(filter(None, (which, printed)))


def _paper_speed_cell(one: ExperimentResult) -> Cell:
    shared = one.main("shared")
    speed = mean(shared.speed_up) if shared else None
    return Cell(words.percent(speed), speed, f"paper {words.percent(one.paper.speed_up)}" if one.paper else "")
