"""Two validation curves against each other: who is ahead, by how much, and where the 95 % bands part."""

from __future__ import annotations

from functools import reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gradshare.reports.runs import Floats, Ints, Measure, Run


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
        "area": plain(pair.difference.mean()) if len(pair.epochs) else None,
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
