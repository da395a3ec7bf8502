"""Run values -> one JSON-serialisable comparison: everything the table, the findings and the page say."""

from __future__ import annotations

from typing import Any

import numpy as np

from gradshare.errors import UserError
from gradshare.reports.against import against, best_index, direction, gains, plain
from gradshare.reports.runs import Floats, Run, TestResult, common_measure
from gradshare.reports.thresholds import choose_thresholds, reached, seconds_until

Comparison = dict[str, Any]

NOTE = (
    "Every interval is a 95 % interval over tasks, for one training run of each arm. It does not cover how much"
    " another training run, with another seed, would differ; and overlapping bands do not show that two arms are equal."
)
SAME_SETTING = ("method", "dataset", "ways", "shots")


def compare_runs(runs: list[Run]) -> Comparison:
    """Compare every arm with the original, and every control with sharing too.

    Accuracies and losses are as in the metrics (accuracies from 0 to 1); `area` and `final_difference` are arm minus
    reference, in accuracy points (or in units of the loss); `speed_up` is a fraction.
    """
    measure = common_measure(runs)
    if len({run.name for run in runs}) < len(runs):
        raise UserError(f"two runs have the same name: {', '.join(run.name for run in runs)}")
    return {
        "version": 1,
        "measure": measure,
        "higher_is_better": direction(measure) > 0,
        "difference_unit": "accuracy points" if measure == "accuracy" else "loss",
        "note": NOTE,
        "arms": {run.name: _arm(run, runs) for run in runs},
        "thresholds": [
            {"value": value, "reached": {run.name: reached(run, value) for run in runs}}
            for value in choose_thresholds(runs)
        ],
    }


def _arm(run: Run, runs: list[Run]) -> dict[str, Any]:
    at, planned = best_index(run), run.config.get("epochs")
    last = int(run.epochs[-1]) if len(run.epochs) else None
    return {
        "arm": run.arm,
        "finished": run.finished,
        "epochs": len(run.epochs),
        "epochs_without_value": int((~np.isfinite(run.val)).sum()),
        "planned_epochs": planned if isinstance(planned, int) else None,
        "last_epoch": last,
        "best_epoch": None if at is None else int(run.epochs[at]),
        "best_val": None if at is None else plain(run.val[at]),
        "best_val_interval": None if at is None else plain(run.interval[at]),
        "chance": _chance(run),
        "test": _test(run),
        "train_seconds": None if last is None else plain(seconds_until(run, last)),
        "seconds_per_epoch": plain(run.train_seconds.mean()) if len(run.train_seconds) else None,
        "final_mean_m": _final_mean(run.m),
        "final_mean_lam": _final_mean(run.lam),
        **_references(run, runs),
    }


def _references(run: Run, runs: list[Run]) -> dict[str, Any]:
    original = _partner(run, runs, "original") if run.arm != "original" else None
    sharing = _partner(run, runs, "shared") if run.arm not in ("original", "shared") else None
    return {
        "against_original": against(run, original) if original else None,
        "against_shared": against(run, sharing) if sharing else None,
        "gains": gains(run, sharing, original) if original and sharing else None,
    }


def _partner(run: Run, runs: list[Run], arm: str) -> Run | None:
    """The run of that arm to compare with: the one in the same folder, or the only one in the same setting."""
    same = [other for other in runs if other.arm == arm and _setting(other) == _setting(run)]
    beside = [other for other in same if other.folder.parent == run.folder.parent]
    candidates = beside or same
    return candidates[0] if len(candidates) == 1 else None


def _setting(run: Run) -> list[Any]:
    return [run.config.get(key) for key in SAME_SETTING]


def _chance(run: Run) -> float | None:
    ways = run.config.get("ways")
    return plain(1 / ways) if run.measure == "accuracy" and isinstance(ways, int) and ways > 0 else None


def _test(run: Run) -> dict[str, Any] | None:
    if run.test_best is None and run.test_ensemble is None:
        return None
    best, ensemble = _test_result(run.test_best, run), _test_result(run.test_ensemble, run)
    return {"tasks": run.test_tasks, "best": best, "ensemble": ensemble}


def _test_result(result: TestResult | None, run: Run) -> dict[str, Any] | None:
    if result is None:
        return None
    value = result.accuracy if run.measure == "accuracy" else result.loss
    return {"value": plain(value), "interval": plain(result.interval), "epochs": list(result.epochs)}


def _final_mean(steps: Floats | None) -> float | None:
    return None if steps is None else plain(steps[-1].mean())
