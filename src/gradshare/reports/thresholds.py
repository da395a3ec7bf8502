"""How many epochs and seconds each arm needs to reach round accuracies (or losses)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gradshare.reports.against import direction, plain
from gradshare.reports.runs import Measure, Run, common_measure

FEWEST, MOST = 3, 5
FINEST_ACCURACY = 0.001


def choose_thresholds(runs: list[Run]) -> list[float]:
    """Three to five round values between the worst first epoch and the best epoch of any arm, easiest first.

    The step is the coarsest of 1, 2 and 5 times a power of ten that gives three; of more than five, the hardest stay.
    """
    curves = [run.val[np.isfinite(run.val)] for run in runs if np.isfinite(run.val).any()]
    if not curves:
        return []
    measure = common_measure(runs)
    sign = direction(measure)
    start = min(sign * curve[0] for curve in curves)
    end = max((sign * curve).max() for curve in curves)
    chosen: list[float] = []
    for step in _round_steps(float(end - start), measure):
        chosen = _multiples(float(start), float(end), step)
        if len(chosen) >= FEWEST:
            break
    return [sign * value for value in chosen[-MOST:]]


def reached(run: Run, threshold: float) -> dict[str, Any] | None:
    """The first epoch at or beyond the threshold, with the training seconds until then."""
    sign = direction(run.measure)
    hits = run.epochs[sign * run.val >= sign * threshold]
    if not len(hits):
        return None
    return {"epoch": int(hits[0]), "seconds": plain(seconds_until(run, int(hits[0])))}


def seconds_until(run: Run, epoch: int) -> float | None:
    """Training seconds of epochs 1 to `epoch`; None where one of them was not timed."""
    upto = run.timed_epochs <= epoch
    return float(run.train_seconds[upto].sum()) if upto.sum() == epoch else None


def _round_steps(span: float, measure: Measure) -> list[float]:
    """Steps from coarse to fine for a range of that length."""
    if span <= 0:
        return []
    top = math.floor(math.log10(span))
    steps = [digit * 10.0**power for power in range(top, top - 3, -1) for digit in (5, 2, 1)]
    finest = FINEST_ACCURACY if measure == "accuracy" else 0.0
    return [step for step in steps if step > finest * 0.999]


def _multiples(start: float, end: float, step: float) -> list[float]:
    """The multiples of `step` in (start, end], written as a person would: 0.35, not 0.35000000000000003."""
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    candidates = range(math.floor(start / step) - 1, math.floor(end / step) + 2)
    values = [round(count * step, places) for count in candidates]
    return [value for value in values if start < value <= end]
