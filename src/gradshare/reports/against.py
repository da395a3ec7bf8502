"""Validation curves against each other: who is ahead, where the 95 % bands part, when a value is reached; and seeds."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradshare.reports.runs import Floats, Ints, Run, common_measure
from gradshare.reports.wording import Measure

FEWEST, MOST = 3, 5
FINEST_ACCURACY = 0.001
# the 97.5 % quantile of Student's t for 1, 2, ... degrees of freedom, and of the normal distribution
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
NORMAL_975 = 1.959964


class Pair(NamedTuple):
    """An arm and its reference at the epochs where both have a finite value."""

    epochs: Ints  # [C]
    difference: Floats  # [C], arm minus reference, in `unit_scale` units
    better: NDArray[np.bool_]  # [C], the arm's band lies entirely on the better side
    worse: NDArray[np.bool_]  # [C]
    known: NDArray[np.bool_]  # [C], both intervals were recorded


def best_epoch(run: Run) -> int | None:
    """The earliest epoch of the highest validation accuracy (of the lowest loss)."""
    at = best_index(run)
    return None if at is None else int(run.epochs[at])


def best_index(run: Run) -> int | None:
    if not np.isfinite(run.val).any():
        return None
    return int(np.nanargmax(direction(run.measure) * np.where(np.isfinite(run.val), run.val, np.nan)))


def direction(measure: Measure) -> int:
    """+1 where more is better, -1 where less is."""
    return 1 if measure == "accuracy" else -1


def unit_scale(measure: Measure) -> int:
    """Differences of accuracies are told in points, those of losses as they are."""
    return 100 if measure == "accuracy" else 1


def speed_up(run: Run, reference: Run) -> float | None:
    """(epoch_reference - epoch_run) / epoch_run, each the best epoch: the paper's formula."""
    own, other = best_epoch(run), best_epoch(reference)
    return None if own is None or other is None else (other - own) / own


def against(run: Run, reference: Run) -> dict[str, Any]:
    """The numbers of `run` against `reference` over their common epochs."""
    pair = _pair(run, reference)
    first_better = pair.epochs[pair.better]
    return {
        "reference": reference.name,
        "speed_up": plain(speed_up(run, reference)),
        "equally_long": len(pair.epochs) > 0 and bool(run.epochs[-1] == reference.epochs[-1]),
        "common_epochs": len(pair.epochs),
        "mean_difference": plain(pair.difference.mean()) if len(pair.epochs) else None,
        "area": plain(pair.difference.sum()) if len(pair.epochs) else None,
        "final_epoch": int(pair.epochs[-1]) if len(pair.epochs) else None,
        "final_difference": plain(pair.difference[-1]) if len(pair.epochs) else None,
        "final_bands": _final_bands(pair),
        "epochs_with_bands": int(pair.known.sum()),
        "epochs_apart_better": int(pair.better.sum()),
        "epochs_apart_worse": int(pair.worse.sum()),
        "first_epoch_apart": int(first_better[0]) if len(first_better) else None,
        "level_from_epoch": _level_from(pair),
    }


def gains(run: Run, sharing: Run, original: Run) -> dict[str, Any]:
    """The mean gain of a control and of sharing over the original, over the epochs that all three have."""
    epochs = reduce(np.intersect1d, [one.epochs[np.isfinite(one.val)] for one in (run, sharing, original)])
    base = _values_at(original, epochs)
    scale = unit_scale(run.measure) * direction(run.measure)
    mean = [plain(scale * (_values_at(one, epochs) - base).mean()) if len(epochs) else None for one in (run, sharing)]
    return {"common_epochs": len(epochs), "gain": mean[0], "gain_of_sharing": mean[1]}


def plain(value: float | None) -> float | None:
    """A number for JSON: NaN and infinity become null, and the noise of the last bits goes."""
    return None if value is None or not np.isfinite(value) else float(f"{value:.9g}")


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


def spread(values: list[float | None]) -> dict[str, Any] | None:
    """The mean, its 95 % interval over seeds (None for one seed), and the number of seeds that have a value."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    mean = sum(known) / len(known)
    return {"mean": plain(mean), "interval": _half_width(known, mean), "seeds": len(known)}


def _pair(run: Run, reference: Run) -> Pair:
    common, own, other = np.intersect1d(run.epochs, reference.epochs, assume_unique=True, return_indices=True)
    finite = np.isfinite(run.val[own]) & np.isfinite(reference.val[other])
    own, other = own[finite], other[finite]
    gap = run.val[own] - reference.val[other]
    reach = run.interval[own] + reference.interval[other]
    lead = direction(run.measure) * gap
    return Pair(common[finite], unit_scale(run.measure) * gap, lead > reach, -lead > reach, np.isfinite(reach))


def _final_bands(pair: Pair) -> str | None:
    if not len(pair.epochs) or not pair.known[-1]:
        return None
    return "better" if pair.better[-1] else "worse" if pair.worse[-1] else "overlap"


def _level_from(pair: Pair) -> int | None:
    """The first epoch from which on, to the last, the arm's band is never entirely on the worse side."""
    held = pair.known & ~pair.worse
    trailing = len(held) if held.all() else int(np.argmin(held[::-1]))
    return int(pair.epochs[-trailing]) if trailing else None


def _values_at(run: Run, epochs: Ints) -> Floats:
    return run.val[np.searchsorted(run.epochs, epochs)]


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


def _half_width(values: list[float], mean: float) -> float | None:
    freedom = len(values) - 1
    if freedom == 0:
        return None
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / freedom)
    return plain(_t_975(freedom) * deviation / math.sqrt(len(values)))


def _t_975(freedom: int) -> float:
    """Beyond the table by the Cornish-Fisher expansion, right to three decimals there."""
    if freedom <= len(T_975):
        return T_975[freedom - 1]
    z = NORMAL_975
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
