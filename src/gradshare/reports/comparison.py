"""All numbers of a report as one typed value: every run, every arm over its seeds, every experiment."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

from gradshare.errors import UserError
from gradshare.reports.model import Arm, Experiment, Measure, Run, Setting, common_measure, group, sign
from gradshare.reports.paper import PaperCell, departures, paper_cell
from gradshare.reports.statistics import (
    Gains,
    Hit,
    Spread,
    Verdict,
    Versus,
    choose_levels,
    gains,
    reached,
    spread,
    versus,
)
from gradshare.runs.config import NORM_STATISTICS


@dataclass(frozen=True)
class RunResult:
    """A run, compared with the run of the original and of sharing that has the same seed."""

    run: Run
    experiment: int  # its place in the comparison
    against_original: Versus | None
    against_shared: Versus | None
    gains: Gains | None  # of a control


@dataclass(frozen=True)
class Level:
    """A round validation accuracy (or loss), and when each run first reached it."""

    value: float
    reached: dict[str, Hit | None]  # by the name of the run


@dataclass(frozen=True)
class Reached:
    """When an arm reached a level, over seeds, and how much sooner than the original: (its epoch - own) / own."""

    epoch: Spread | None
    seconds: Spread | None
    speed_up: Spread | None
    speed_up_seconds: Spread | None


@dataclass(frozen=True)
class Tested:
    """The test of one run with its interval over tasks, or the mean of several with its interval over seeds."""

    value: float
    interval: float | None
    over: Literal["tasks", "seeds"]
    seeds: int


@dataclass(frozen=True)
class Lead:
    """An arm compared with another one: the mean difference over seeds, and whether it is ahead in each of them."""

    reference: str
    difference: Spread  # arm minus reference
    verdict: Verdict  # the seeds' own if they agree, else unclear


@dataclass(frozen=True, eq=False)
class ArmResult(Arm):
    """An arm over its seeds that are done.

    Differences and speed-ups are over the seeds whose original trained for as many epochs, if any did.
    """

    best_val: Spread | None
    best_epoch: Spread | None
    test: Tested | None
    speed_up: Spread | None
    mean_difference: Spread | None
    area: Spread | None
    final_difference: Spread | None
    reached: tuple[Reached, ...]  # one for each level
    against_original: Lead | None
    against_best_control: Lead | None
    """Compared with the control that it leads least, or that leads it most."""
    share_of_gain: float | None
    """For a control: the part of sharing's mean gain over the original that it has too."""


@dataclass(frozen=True)
class ExperimentResult:
    setting: Setting
    experiment: Experiment
    levels: tuple[Level, ...]
    paper: PaperCell | None
    departures: tuple[str, ...]  # options in which it is not the paper's experiment
    arms: tuple[ArmResult, ...]

    def main(self, arm: str) -> ArmResult | None:
        """An arm in the configuration with the most seeds done."""
        found = [one for one in self.arms if one.variant.name == arm]
        return max(found, key=lambda one: one.done, default=None)

    @property
    def controls(self) -> list[ArmResult]:
        return [one for one in self.arms if one.variant.control]


@dataclass(frozen=True)
class Comparison:
    measure: Measure
    runs: dict[str, RunResult]  # by name
    experiments: tuple[ExperimentResult, ...]

    @property
    def several_seeds(self) -> bool:
        return any(len(arm.runs) > 1 for one in self.experiments for arm in one.arms)

    @property
    def norm_note(self) -> str:
        """Whether validation and test are transductive or inductive."""
        found = Counter(one.run.norm_statistics for one in self.runs.values())
        if len(found) == 1:
            return NORM_STATISTICS[next(iter(found))]
        return " ".join(f"In {n} of {found.total()} runs: {NORM_STATISTICS[norm]}" for norm, n in sorted(found.items()))

    @property
    def has_original(self) -> bool:
        """Whether any run has an original to be compared with."""
        return any(one.against_original for one in self.runs.values())

    @property
    def has_controls(self) -> bool:
        """Whether any arm has a control to be compared with."""
        return any(arm.against_best_control for one in self.experiments for arm in one.arms)


def compare_runs(runs: list[Run]) -> Comparison:
    """Group runs into experiments, and compare every arm with the original and with the controls."""
    measure = common_measure(runs)
    if len({run.name for run in runs}) < len(runs):
        raise UserError(f"two runs have the same name: {', '.join(run.name for run in runs)}")
    experiments = group(runs)
    results = {run.name: _run(run, one, place) for place, one in enumerate(experiments) for run in one.runs}
    ordered = {run.name: results[run.name] for run in runs}
    return Comparison(measure, ordered, tuple(_experiment(one, results) for one in experiments))


def _run(run: Run, experiment: Experiment, place: int) -> RunResult:
    original = experiment.partner(run, "original") if run.arm != "original" else None
    sharing = experiment.partner(run, "shared") if run.arm not in ("original", "shared") else None
    return RunResult(
        run,
        place,
        versus(run, original) if original else None,
        versus(run, sharing) if sharing else None,
        gains(run, sharing, original) if original and sharing and run.variant.control else None,
    )


def _experiment(one: Experiment, results: dict[str, RunResult]) -> ExperimentResult:
    levels = tuple(
        Level(value, {run.name: reached(run, value) for run in one.runs}) for value in choose_levels(one.runs)
    )
    papers = next((run for run in one.runs if run.arm in ("original", "shared")), one.runs[0])
    return ExperimentResult(
        setting=one.setting,
        experiment=one,
        levels=levels,
        paper=paper_cell(papers.options),
        departures=tuple(departures(papers.options)),
        arms=tuple(_arm(arm, one, results, levels) for arm in one.arms),
    )


def _arm(arm: Arm, experiment: Experiment, results: dict[str, RunResult], levels: tuple[Level, ...]) -> ArmResult:
    counted = arm.counted
    against = [one for run in counted if (one := results[run.name].against_original)]
    equal = [one for one in against if one.equally_long]
    compared = equal or against
    difference = spread(one.mean_difference for one in compared)
    return ArmResult(
        name=arm.name,
        runs=arm.runs,
        best_val=spread(run.best_val for run in counted),
        best_epoch=spread(run.best_epoch for run in counted),
        test=_tested(counted),
        speed_up=spread(one.speed_up for one in equal),
        mean_difference=difference,
        area=spread(one.area for one in compared),
        final_difference=spread(one.final_difference for one in compared),
        reached=tuple(_reached(level, counted, results) for level in levels),
        against_original=_lead("original", difference, against),
        against_best_control=_best_control(arm, experiment),
        share_of_gain=_share_of_gain(counted, results),
    )


def _lead(reference: str, difference: Spread | None, against: list[Versus]) -> Lead | None:
    verdicts = {one.verdict for one in against if one.common_epochs}
    if difference is None:
        return None
    return Lead(reference, difference, verdicts.pop() if len(verdicts) == 1 else "unclear")


def _best_control(arm: Arm, experiment: Experiment) -> Lead | None:
    if arm.variant.name == "original":
        return None
    controls = {run.arm for run in experiment.runs if run.variant.control} - {arm.variant.name}
    leads = [
        _lead(name, spread(one.mean_difference for one in found), found)
        for name in sorted(controls)
        if (found := _against(arm, experiment, name))
    ]
    better = sign(common_measure(experiment.runs))
    return min((one for one in leads if one), key=lambda one: better * one.difference.mean, default=None)


def _against(arm: Arm, experiment: Experiment, other: str) -> list[Versus]:
    return [versus(run, partner) for run in arm.counted if (partner := experiment.partner(run, other))]


def _share_of_gain(counted: list[Run], results: dict[str, RunResult]) -> float | None:
    """None if sharing has no clear gain over the original."""
    found = [results[run.name] for run in counted]
    known = [(one.gains, one.against_shared) for one in found if one.gains and one.against_shared]
    sharing = [results[against.reference].against_original for _, against in known]
    gain, of_sharing = sum(one.gain for one, _ in known), sum(one.gain_of_sharing for one, _ in known)
    clear = any(one and one.epochs_apart_better for one in sharing)
    return gain / of_sharing if of_sharing > 0 and clear else None


def _reached(level: Level, counted: list[Run], results: dict[str, RunResult]) -> Reached:
    hits = [level.reached[run.name] for run in counted]
    against = [results[run.name].against_original for run in counted]
    originals = [level.reached[one.reference] if one else None for one in against]
    both = [(own, other) for own, other in zip(hits, originals, strict=True) if own and other]
    return Reached(
        epoch=spread(hit.epoch for hit in hits if hit),
        seconds=spread(hit.seconds for hit in hits if hit),
        speed_up=spread((other.epoch - own.epoch) / own.epoch for own, other in both),
        speed_up_seconds=spread(
            (other.seconds - own.seconds) / own.seconds for own, other in both if own.seconds and other.seconds
        ),
    )


def _tested(runs: list[Run]) -> Tested | None:
    scores = [(run.measured(run.test.ensemble), run.test.ensemble.interval) for run in runs if run.test]
    values = spread(value for value, _ in scores)
    if values is None:
        return None
    if values.seeds > 1:
        return Tested(values.mean, values.interval, "seeds", values.seeds)
    return Tested(values.mean, next(interval for value, interval in scores if value is not None), "tasks", 1)
