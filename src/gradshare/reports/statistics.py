"""Validation curves compared with each other: leads, 95 % bands, speed-ups, levels reached, means over seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gradshare.reports.model import Floats, Ints, Measure, Run, common_measure, sign

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
    gain: float | None
    gain_of_sharing: float | None


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


@dataclass(frozen=True)
class _Pair:
    """A run and its reference in their common epochs."""

    epochs: Ints  # [C]
    difference: Floats  # [C]
    better: NDArray[np.bool_]  # [C]
    worse: NDArray[np.bool_]  # [C]
    known: NDArray[np.bool_]  # [C], both have an interval

    @property
    def final_bands(self) -> Literal["better", "worse", "overlap"] | None:
        if not len(self.epochs) or not self.known[-1]:
            return None
        return "better" if self.better[-1] else "worse" if self.worse[-1] else "overlap"

    @property
    def level_from(self) -> int | None:
        held = self.known & ~self.worse
        trailing = len(held) if held.all() else int(np.argmin(held[::-1]))
        return int(self.epochs[-trailing]) if trailing else None

    def verdict(self, measure: Measure) -> Verdict:
        better, worse = self.better.any(), self.worse.any()
        lead = sign(measure) * self.difference.mean() if len(self.epochs) else 0
        if better and worse:
            return "mixed"
        return "ahead" if better and lead > 0 else "behind" if worse and lead < 0 else "unclear"


def versus(run: Run, reference: Run) -> Versus:
    """Compare a run with a reference."""
    pair = _pair(run, reference)
    any_common = len(pair.epochs) > 0
    first_better = pair.epochs[pair.better]
    return Versus(
        reference=reference.name,
        speed_up=speed_up(run, reference),
        equally_long=any_common and (run.last_epoch == reference.last_epoch or (_settled(run) and _settled(reference))),
        common_epochs=len(pair.epochs),
        mean_difference=float(pair.difference.mean()) if any_common else None,
        area=float(pair.difference.sum()) if any_common else None,
        final_epoch=int(pair.epochs[-1]) if any_common else None,
        final_difference=float(pair.difference[-1]) if any_common else None,
        final_bands=pair.final_bands,
        epochs_with_bands=int(pair.known.sum()),
        epochs_apart_better=int(pair.better.sum()),
        epochs_apart_worse=int(pair.worse.sum()),
        first_epoch_apart=int(first_better[0]) if len(first_better) else None,
        level_from_epoch=pair.level_from,
        verdict=pair.verdict(run.measure),
    )


def _settled(run: Run) -> bool:
    return run.last_epoch is not None and run.best_epoch is not None and run.last_epoch - run.best_epoch >= SETTLED


def speed_up(run: Run, reference: Run) -> float | None:
    own, other = run.best_epoch, reference.best_epoch
    return None if own is None or other is None else (other - own) / own


def gains(run: Run, sharing: Run, original: Run) -> Gains:
    """Compare the gain of a control with the gain of sharing."""
    epochs = reduce(np.intersect1d, [one.epochs[np.isfinite(one.val)] for one in (run, sharing, original)])
    scale = points(run.measure) * sign(run.measure)

    def gain(one: Run) -> float | None:
        difference = _values_at(one, epochs) - _values_at(original, epochs)
        return float(scale * difference.mean()) if len(epochs) else None

    return Gains(len(epochs), gain(run), gain(sharing))


def points(measure: Measure) -> int:
    """Differences of accuracies are in points, differences of losses as they are."""
    return 100 if measure == "accuracy" else 1


def _pair(run: Run, reference: Run) -> _Pair:
    common, own, other = np.intersect1d(run.epochs, reference.epochs, assume_unique=True, return_indices=True)
    finite = np.isfinite(run.val[own]) & np.isfinite(reference.val[other])
    own, other = own[finite], other[finite]
    gap = run.val[own] - reference.val[other]
    reach = run.interval[own] + reference.interval[other]
    lead = sign(run.measure) * gap
    return _Pair(common[finite], points(run.measure) * gap, lead > reach, -lead > reach, np.isfinite(reach))


def _values_at(run: Run, epochs: Ints) -> Floats:
    return run.val[np.searchsorted(run.epochs, epochs)]


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
    chosen: list[float] = []
    for step in _round_steps(end - start, measure):
        chosen = _multiples(start, end, step)
        if len(chosen) >= FEWEST:
            break
    return [sign(measure) * value for value in chosen[-MOST:]]


def reached(run: Run, level: float) -> Hit | None:
    """The first epoch at a level or beyond it; None if the run never reached it."""
    hits = run.epochs[sign(run.measure) * run.val >= sign(run.measure) * level]
    return Hit(int(hits[0]), run.seconds_until(int(hits[0]))) if len(hits) else None


def _round_steps(span: float, measure: Measure) -> list[float]:
    """Steps from coarse to fine for a range of that length."""
    if span <= 0:
        return []
    top = math.floor(math.log10(span))
    steps = [digit * 10.0**power for power in range(top, top - 3, -1) for digit in (5, 2, 1)]
    finest = FINEST_ACCURACY if measure == "accuracy" else 0.0
    return [step for step in steps if step > finest * 0.999]


def _multiples(start: float, end: float, step: float) -> list[float]:
    """The multiples of a step in (start, end], without rounding errors: 0.35, not 0.35000000000000003."""
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    candidates = range(math.floor(start / step) - 1, math.floor(end / step) + 2)
    values = [round(count * step, places) for count in candidates]
    return [value for value in values if start < value <= end]


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
    middle = sum(known) / len(known)
    return Spread(middle, _half_width(known, middle), len(known))


def mean(found: Spread | None) -> float | None:
    return None if found is None else found.mean


def _half_width(values: list[float], middle: float) -> float | None:
    freedom = len(values) - 1
    if freedom == 0:
        return None
    deviation = math.sqrt(sum((value - middle) ** 2 for value in values) / freedom)
    return _t_975(freedom) * deviation / math.sqrt(len(values))


def _t_975(freedom: int) -> float:
    """Beyond the table by the Cornish-Fisher expansion, which is right to three decimals there."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = NORMAL_975
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
