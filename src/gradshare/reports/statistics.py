"""Validation curves compared with each other: leads, 95 % bands, speed-ups, levels reached, means over seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gradshare.reports.model import Floats, Ints, Measure, Run, common_measure, sign

Flags = NDArray[np.bool_]
Verdict = Literal["ahead", "behind", "mixed", "unclear"]
FEWEST, MOST = 3, 5  # levels to reach
FINEST_ACCURACY = 0.001
SETTLED = 25  # epochs without a better validation: a longer training would hardly move the best epoch
# the 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom, and of the normal distribution
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL_975 = 1.959964


@dataclass(frozen=True)
class Versus:
    """A run compared with a reference over the epochs in which both have a finite value.

    Differences are run minus reference: in accuracy points, or in units of the loss.
    """

    reference: str
    speed_up: float | None
    """(epoch of the reference - epoch of the run) / epoch of the run, each the best one: the paper's formula."""
    equally_long: bool
    """Whether both trained for as many epochs, or SETTLED epochs past their best; if not, the speed-up says little."""
    common_epochs: int
    mean_difference: float | None
    area: float | None
    """The area between the curves: the sum of the differences."""
    final_epoch: int | None
    final_difference: float | None
    final_bands: Literal["better", "worse", "overlap"] | None
    epochs_with_bands: int
    epochs_apart_better: int
    """Epochs in which the run's 95 % band lies entirely on the better side of the reference's."""
    epochs_apart_worse: int
    first_epoch_apart: int | None
    level_from_epoch: int | None
    """The first epoch from which the run's band is never entirely on the worse side."""
    verdict: Verdict
    """ahead: a lead on average, bands apart in some epoch, and never the other way round; mixed: both ways."""


@dataclass(frozen=True)
class Gains:
    """The mean gain of a control, and of sharing, over the original, over the epochs that all three have."""

    common_epochs: int
    gain: float
    gain_of_sharing: float


@dataclass(frozen=True)
class Spread:
    """A mean over seeds with half its 95 % interval over seeds, which is None for one seed."""

    mean: float
    interval: float | None
    seeds: int


@dataclass(frozen=True)
class Hit:
    """When a run first reached a level."""

    epoch: int
    seconds: float | None  # of training until the end of that epoch; None if an epoch was not timed


def versus(run: Run, reference: Run) -> Versus:
    """Compare a run with a reference."""
    common, own, other = np.intersect1d(run.epochs, reference.epochs, assume_unique=True, return_indices=True)
    finite = np.isfinite(run.val[own]) & np.isfinite(reference.val[other])
    epochs, own, other = common[finite], own[finite], other[finite]
    gap = run.val[own] - reference.val[other]
    reach = run.interval[own] + reference.interval[other]
    lead, known = sign(run.measure) * gap, np.isfinite(reach)
    better, worse = lead > reach, -lead > reach
    difference = points(run.measure) * gap
    return Versus(
        reference=reference.name,
        speed_up=speed_up(run, reference),
        equally_long=len(epochs) > 0 and (run.last_epoch == reference.last_epoch or _settled(run, reference)),
        common_epochs=len(epochs),
        mean_difference=float(difference.mean()) if len(epochs) else None,
        area=float(difference.sum()) if len(epochs) else None,
        final_epoch=int(epochs[-1]) if len(epochs) else None,
        final_difference=float(difference[-1]) if len(epochs) else None,
        final_bands=_final_bands(known, better, worse),
        epochs_with_bands=int(known.sum()),
        epochs_apart_better=int(better.sum()),
        epochs_apart_worse=int(worse.sum()),
        first_epoch_apart=_first(epochs[better]),
        level_from_epoch=_first(epochs[_since(known & ~worse)]),
        verdict=_verdict(lead, bool(better.any()), bool(worse.any())),
    )


def _final_bands(known: Flags, better: Flags, worse: Flags) -> Literal["better", "worse", "overlap"] | None:
    if not known[-1:].any():
        return None
    return "better" if better[-1] else "worse" if worse[-1] else "overlap"


def _since(held: Flags) -> slice:
    """The epochs at the end in all of which something held."""
    broken = np.flatnonzero(~held)
    return slice(broken[-1] + 1 if len(broken) else 0, None)


def _first(epochs: Ints) -> int | None:
    return int(epochs[0]) if len(epochs) else None


def _verdict(lead: Floats, better: bool, worse: bool) -> Verdict:
    if better and worse:
        return "mixed"
    return "ahead" if better and lead.mean() > 0 else "behind" if worse and lead.mean() < 0 else "unclear"


def _settled(*runs: Run) -> bool:
    return all(run.last_epoch and run.best_epoch and run.last_epoch - run.best_epoch >= SETTLED for run in runs)


def speed_up(run: Run, reference: Run) -> float | None:
    own, other = run.best_epoch, reference.best_epoch
    return None if own is None or other is None else (other - own) / own


def gains(run: Run, sharing: Run, original: Run) -> Gains | None:
    """Compare the gain of a control with the gain of sharing; None if they have no epoch in common."""
    known = [np.isfinite(one.val) for one in (run, sharing, original)]
    lines = [(one.epochs[at], one.val[at]) for one, at in zip((run, sharing, original), known, strict=True)]
    epochs, (own, shared, base) = in_common_epochs(lines)
    if not len(epochs):
        return None
    scale = points(run.measure) * sign(run.measure)
    return Gains(len(epochs), float(scale * (own - base).mean()), float(scale * (shared - base).mean()))


def in_common_epochs(lines: list[tuple[Ints, Floats]]) -> tuple[Ints, Floats]:
    """The epochs that all lines have, [C], and the values of each line there, [lines, C]."""
    epochs = reduce(np.intersect1d, [own for own, _ in lines])
    return epochs, np.array([values[np.searchsorted(own, epochs)] for own, values in lines])


def points(measure: Measure) -> int:
    """Differences of accuracies are in points, differences of losses as they are."""
    return 100 if measure == "accuracy" else 1


# Levels to reach


def choose_levels(runs: list[Run]) -> list[float]:
    """Three to five round values between the worst first epoch and the best epoch of any run, easiest first.

    The step is the coarsest of 1, 2 and 5 times a power of ten that gives three; of more than five, the hardest stay.
    """
    curves = [run.val[np.isfinite(run.val)] for run in runs if run.best is not None]
    if not curves:
        return []
    measure = common_measure(runs)
    start = min(float(sign(measure) * curve[0]) for curve in curves)
    end = max(float((sign(measure) * curve).max()) for curve in curves)
    finest = FINEST_ACCURACY if measure == "accuracy" else 0.0
    steps = [step for step in round_steps(end - start) if step > finest * 0.999]
    choices = [[value for value in multiples(start, end, step) if value > start] for step in steps]
    chosen = next((values for values in choices if len(values) >= FEWEST), choices[-1] if choices else [])
    return [sign(measure) * value for value in chosen[-MOST:]]


def reached(run: Run, level: float) -> Hit | None:
    """The first epoch at a level or beyond it; None if the run never reached it."""
    hits = run.epochs[sign(run.measure) * run.val >= sign(run.measure) * level]
    return Hit(int(hits[0]), run.seconds_until(int(hits[0]))) if len(hits) else None


def round_steps(span: float) -> list[float]:
    """1, 2 and 5 times powers of ten, from coarse to fine, for a range of that length."""
    if span <= 0:
        return []
    top = math.floor(math.log10(span))
    return [digit * 10.0**power for power in range(top, top - 3, -1) for digit in (5, 2, 1)]


def multiples(low: float, high: float, step: float) -> list[float]:
    """The multiples of a step in [low, high], without rounding errors: 0.35, not 0.35000000000000003."""
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    values = [round(count * step, places) for count in range(math.floor(low / step), math.ceil(high / step) + 1)]
    return [value for value in values if low <= value <= high]


# Seeds


def spread(values: Iterable[float | None]) -> Spread | None:
    """The mean of the values that are known, with its 95 % interval over seeds (Student's t).

    Example:
        >>> spread([1.0, 3.0, None])
        Spread(mean=2.0, interval=12.706, seeds=2)
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    seeds = len(known)
    half = _t_975(seeds - 1) * statistics.stdev(known) / math.sqrt(seeds) if seeds > 1 else None
    return Spread(sum(known) / seeds, half, seeds)


def mean(found: Spread | None) -> float | None:
    return None if found is None else found.mean


def _t_975(freedom: int) -> float:
    """Beyond the table by the Cornish-Fisher expansion, which is right to three decimals there."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = NORMAL_975
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
